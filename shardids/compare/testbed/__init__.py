"""The testbed of key schemes: throw-away servers, client processes, and a clock that can be stepped."""

"""Where key schemes run: throw-away servers, client processes, and a clock that can be stepped."""

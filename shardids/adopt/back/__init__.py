"""The way back: the database follows the shards after the switch, and can take over again."""

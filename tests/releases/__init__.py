"""What databases of released versions of shardids hold: a dump each, to be upgraded by a test."""

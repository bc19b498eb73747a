"""Other engines on the same shards: the files that poolers and proxies read, and the capture of changes."""

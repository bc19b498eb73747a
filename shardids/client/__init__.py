"""What applications import: clusters, sessions, routing, retries and blocks of IDs."""

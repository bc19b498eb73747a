"""Tenants, which are keys with their rows: where they live, how large they are, which of them are busy."""

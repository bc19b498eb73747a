"""A small shop on one PostgreSQL database, as many are: serial keys, foreign keys, look-up by e-mail."""

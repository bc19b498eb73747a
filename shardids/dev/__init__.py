"""Embedded PostgreSQL servers, development clusters made of them, and the demo."""

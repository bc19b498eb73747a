"""Embedded servers, clusters of them to play with, and the demo."""

"""The catalog of a cluster: its rows, the topology they describe, and connections to what they name."""

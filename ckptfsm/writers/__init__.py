"""Writes the shards of one rank, in a process of its own."""

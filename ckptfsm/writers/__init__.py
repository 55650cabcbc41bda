"""Writes the shards of one rank, in a forked process."""

"""Copies of checkpoints in other places: object stores and directories."""

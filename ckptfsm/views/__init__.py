"""The lives of a root's checkpoints, for display. Decides nothing, and writes nothing to the root."""

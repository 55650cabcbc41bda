"""The lives of a root's checkpoints, for people. Decides nothing, and writes nothing to the root."""

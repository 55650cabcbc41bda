"""The lives of a root's checkpoints, for people: read from the journal, as a table, as a picture.

This package decides nothing and writes nothing to the root.
"""

"""The layers of proof, one module each, and their common parts."""

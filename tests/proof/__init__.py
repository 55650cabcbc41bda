"""The layers of proof, one module each, and what they have in common."""

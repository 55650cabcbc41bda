"""verl, driven by a controller."""

"""Public reports of lost checkpoints: a model of what was wrong in each, and the library on the same."""

"""Public reports of lost checkpoints: a model of the bug in each, and the library on the same
history."""

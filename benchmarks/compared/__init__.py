"""The same small trainer with the checkpoints of several libraries, as their own pages write it."""

"""Talks to the trainer and to the coordinator: managers, and each rank's side of a save."""

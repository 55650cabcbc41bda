"""Runs the jobs of ``on_tracked`` beside the training."""

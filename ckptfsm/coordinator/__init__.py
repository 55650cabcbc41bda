"""Sequences the moves of a root: a journal record, then its effect; opens and recovers."""

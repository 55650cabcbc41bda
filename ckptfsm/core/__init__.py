"""Decides: states, moves, recovery, retention. No I/O, no clock, no torch."""

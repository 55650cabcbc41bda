"""Planted bugs: each one breaks a promise on purpose, so that a layer of proof can show it sees it."""

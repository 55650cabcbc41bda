"""Keeps the protocol on disk: journal, ownership, receipts, manifests and trash."""

"""Test doubles for the ports, for our tests and for those of people who embed the library.

``simfs`` is an adversarial file system in memory, ``faults`` injects errors and pauses into any
storage. Rules: production code never imports this package; nothing here sleeps.
"""

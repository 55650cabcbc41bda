"""Follows a root, and takes each tracked checkpoint under a lease: evaluators, jobs, copies."""

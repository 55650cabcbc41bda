"""Measurements of ckptfsm beside megatron-core's stock asynchronous save.

Run with ``python -m benchmarks``; figures are only ever reported, nothing here fails on a time.
"""

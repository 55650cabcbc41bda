"""Metrics in the trainer: hooks for Prometheus, OpenTelemetry, TensorBoard, Weights & Biases, JSON.

Each hook is given to a manager as ``hooks=[...]``, on the ranks that shall tell. The names of the
metrics are in ``ckptfsm.core.metrics``, as for ``ckptfsm export``.
"""

"""The demonstration: a real Megatron-core trainer, small enough for two CPU cores.

Rules: the modules here may import torch and megatron.core, and nothing outside this package imports
them at module level (``import ckptfsm`` stays free of torch). The trainer knows nothing about
checkpoints on disk: it offers a sharded state dict and takes one back.
"""

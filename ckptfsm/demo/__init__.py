"""The demonstration: a real Megatron-core trainer, small enough for two CPU cores."""

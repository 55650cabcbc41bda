"""The only part of the library that imports torch and megatron-core."""

from ckptfsm.adapters.versions import installed, judge, require

require("torch", "megatron-core", extra="megatron")
judge("nvidia-resiliency-ext", installed("nvidia-resiliency-ext"))  # optional

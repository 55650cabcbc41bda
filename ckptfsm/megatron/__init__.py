"""What needs megatron-core: its planner, its loader, requests of its queue."""

from ckptfsm.adapters.versions import installed, judge, require

require("torch", "megatron-core", extra="megatron")
judge("nvidia-resiliency-ext", installed("nvidia-resiliency-ext"))  # optional

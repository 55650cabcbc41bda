"""State of torch: its copies, shared memory and bytes, and words between ranks. No megatron-core."""

from ckptfsm.adapters.versions import require

require("torch", extra="megatron")

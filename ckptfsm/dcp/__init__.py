"""State of torch: its copies, shared memory, bytes and plans. No megatron-core."""

from ckptfsm.adapters.versions import require

require("torch", extra="megatron")

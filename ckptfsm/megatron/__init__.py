"""The only part of the library that imports torch and megatron-core."""

from ckptfsm.versions import require

require("torch", "megatron-core", extra="megatron")

"""Checks torch and megatron-core; imported first by the modules that need them."""

from ckptfsm.adapters.versions import require

PACKAGES = ("torch", "megatron-core")
require(*PACKAGES, extra="verl")

"""Imported first by the modules that need torch and megatron-core: says what is missing or too old."""

from ckptfsm.adapters.versions import require

PACKAGES = ("torch", "megatron-core")
require(*PACKAGES, extra="verl")

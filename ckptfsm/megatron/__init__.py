"""The only part of the library that imports torch and megatron-core."""

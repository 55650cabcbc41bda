"""A trainer with the functions of Megatron-LM's ``megatron.training``, and the same order of calls.

Megatron-LM's own package is not on PyPI; with a clone of it ``tests/integrations/test_megatron_lm.py``
runs under the real one. What matters to a drop-in is here, written anew after core_v0.16.1
(55ac7082517c3878ae653c07c09c534b8aed49f6): which function a module imports by name, what
``save_checkpoint`` does in which order, which closures it hangs onto the request, and when ``pretrain``
loads, saves and finalizes. Its faults are kept: they are what the tests are about.
"""

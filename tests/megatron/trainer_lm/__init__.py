"""A trainer with the functions of Megatron-LM's ``megatron.training``, and the same order of calls.

Megatron-LM's package is not on PyPI; with a clone of it ``tests/integrations/test_megatron_lm.py``
runs under the real one. All that matters to a drop-in is here, written anew after core_v0.16.1
(55ac7082517c3878ae653c07c09c534b8aed49f6): the functions that a module imports by name, the order
of calls in ``save_checkpoint``, the closures that it hangs onto the request, and when ``pretrain``
loads, saves and finalizes. Its faults are kept: the tests are about them.
"""

"""Whether what was reported is still so in the newest versions, by the report's name.

Rules: "run" means that the stock code was run; "read" that its sources were read and not run.
"""

from __future__ import annotations

from types import MappingProxyType

VERSIONS = "megatron-core 0.19.2, nvidia-resiliency-ext 0.7.0 and verl 0.9.1, on 2026-11-25"
NOT_RUN = "not run"

TODAY: MappingProxyType[str, str] = MappingProxyType(
    {
        "verl-4253": "changed (read): the request is scheduled, by an import that fails, see #8000",
        "verl-6067": "still there (read): the trainer calls a finalizer that no worker defines",
        "verl-7952": "still there (read): with `async_save` the trainer leaves the tracker to a "
        "backend, and only Megatron's writes it",
        "verl-forgets": "still there (read): what to delete is a list in memory",
        "verl-same-step": "still there (read): a path is put on the list without a look at it",
        "verl-7401": "still there (run): the SFT trainer of verl 0.9.1 trains nothing",
        "megatron-6970": "still there (run): a killed persistent worker of megatron-core 0.19.2 is "
        "polled without an end",
        "megatron-temporal": "still there (run): a killed writer of megatron-core 0.19.2 counts as "
        "done, and the finalizers of a bare request run",
        "megatron-tracker": "still there (run): an empty tracker ends `megatron.training` with "
        "status 0",
        "megatron-non-persistent": "still there (run): clean-up deletes 100 and keeps a partial 200",
        "verl-8000": "still there: verl 0.9.1 imports it (read), megatron-core 0.19.2 has no such "
        "module (run)",
    }
)


def today(name: str) -> str:
    """The finding of a report, as a cell of the page."""
    return TODAY.get(name, NOT_RUN)

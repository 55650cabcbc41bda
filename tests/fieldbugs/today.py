"""Whether each reported bug is still there in the newest versions, by the report's name.

Rules: "(run)" means that stock code was run, by a test of ``TESTS`` whose marker names the report;
"(read)" that its sources were read and not run.
"""

from __future__ import annotations

from types import MappingProxyType

VERSIONS = (
    "megatron-core 0.19.2, nvidia-resiliency-ext 0.7.0, verl 0.9.1, torchtitan 0.3.0, "
    "Accelerate 1.15.0, transformers 5.23.0 and lightning 2.6.6, on 2026-11-27"
)
TESTS = "tests/integrations/test_field_bugs_today.py"
OTHER = "another project"

TODAY: MappingProxyType[str, str] = MappingProxyType(
    {
        "verl-4253": "changed (run): the request is handed to a queue that cannot be imported, and "
        "the save raises, see #8000",
        "verl-4638-tracker": "changed (run): no longer at the request, but when the actor is "
        "written, whatever the critic's writers do",
        "verl-4638-prune": "changed (run): no longer at the request, but when the actor is written, "
        "whatever the critic's writers do",
        "verl-4638-memory": "still there (run): the queue of megatron-core 0.19.2 holds the staged "
        "copy until a poll finds the writer done",
        "verl-4873": "changed (run): one role waits for its own save; the old actor is deleted "
        "before the critic is saved",
        "verl-5016": "gone (run): rank 0 of a role writes the tracker",
        "verl-6067": "still there (run): the trainer calls a finalizer that no worker defines",
        "verl-7952": "still there (run): with `async_save` and FSDP nobody writes the tracker, and "
        "the next run starts from 0",
        "verl-ranks-delete": "still there (run): rank 1 deletes what the tracker names",
        "verl-gutted": "still there (run): the directory that a SIGKILL leaves is found, and cannot be "
        "loaded",
        "verl-forgets": "still there (run): two stay where one should",
        "verl-same-step": "still there (run): the tracked step deletes itself, with Megatron and "
        "with FSDP",
        "bridge-5184": OTHER,
        "bridge-5117": "still there (run): queues of megatron-core 0.19.2 share one persistent worker, "
        "and take its answers to older calls for their own",
        "bridge-3267": OTHER,
        "megatron-6970": "still there (run): megatron-core 0.19.2 and nvidia-resiliency-ext 0.7.0 "
        "poll a killed persistent worker without an end",
        "megatron-results": "still there (run): of two requests in flight together, both are "
        "finalized and neither can be loaded, in megatron-core 0.19.2 and nvidia-resiliency-ext "
        "0.7.0 (a temporal worker each)",
        "megatron-temporal": "changed (run): the finalizers of a bare request still run; of those of "
        "a save the first now raises, for want of a result, in both packages",
        "megatron-tracker": "still there (run): an empty or torn tracker ends `megatron.training` "
        "with status 0",
        "megatron-non-persistent": "still there (run): clean-up deletes 100 and keeps a partial 200",
        "skyrl-2145": OTHER,
        "kempner-102": OTHER,
        "nemo-10228": OTHER,
        "automodel-3390": OTHER,
        "prime-rl-1763": OTHER,
        "metaseq-53": OTHER,
        "ferrosa-399": OTHER,
        "lightning-1150": "still there (run): with `AsyncCheckpointIO`, no file is left while the "
        "second is written",
        "verl-7401": "still there (run): the SFT trainer's handler loads the state; the PPO trainer "
        "no longer does",
        "swift-9908": OTHER,
        "verl-8000": "still there (run): verl 0.9.1 imports it, megatron-core 0.19.2 has no such "
        "module",
        "nvrx-staging": "still there (run): in shared memory with cached structure, in a temporal "
        "queue, or once a second queue was made; drained in a sole queue in `cpu_shm_mode`",
        "bridge-5778": OTHER,
        "titan-4197": "still there (run): behind two half directories the whole checkpoint is deleted, "
        "while the next one is in flight",
        "titan-4270": "still there (run): `close` returns while the writer writes",
        "accelerate-total-limit": "still there (run): a SIGKILL in the save leaves one directory, "
        "without its last file",
        "transformers-35782": "still there (run): `resume_from_checkpoint=True` ends with "
        "`FileNotFoundError`",
    }
)


def today(name: str) -> str:
    """The finding of a report, as a cell of the page."""
    return TODAY[name]

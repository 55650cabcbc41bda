"""verl (0.7.1, 0.9.0, 0.9.1), released and unchanged, with checkpoints that ckptfsm drives.

``install`` is for the driver; it puts ``ckptfsm.integrations.verl.rank_manager`` into the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ckptfsm.core.config import Settings
from ckptfsm.core.errors import ConfigError
from ckptfsm.integrations.verl.trainer import (
    Checkpoints,
    Options,
    Trainer,
    install_ppo,
    of_verl,
    retention_of,
)
from ckptfsm.integrations.workers import Calls, RayCalls
from ckptfsm.ranks.participant import Hook

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "install",
    "install_in_verl",
    "Checkpoints",
    "retention_of",
    "Calls",
    "RayCalls",
]
_SFT = "verl.trainer.sft_trainer"
_SFT_OF_RAY = "verl.trainer.sft_trainer_ray"


def install(
    trainer: Trainer,
    *,
    extra_parts: Callable[[Any], Mapping[str, Any]] | None = None,
    calls: Calls | None = None,
    hooks: Sequence[Hook] = (),
    **settings: Unpack[Settings],
) -> Trainer:
    """Give a trainer, or a trainer's class, checkpoints that ckptfsm drives.

    A class is subclassed, and the subclass returned; an object is changed, before it loads.

    - ``extra_parts(trainer)`` returns more parts of a checkpoint (bytes or ``FileTree`` by name).
    - ``calls`` calls functions in workers, by default through Ray.
    - ``hooks`` are those of ``Controller``.
    - ``settings`` are those of ``Controller``, and ``writer_files`` and ``common_state`` of the
      workers. ``retention`` follows verl's configuration unless given. ``copies`` go along with one in
      verl's ``default_hdfs_dir``; if there are any, ``jobs_drain_s`` is an hour unless given.

    An untested verl is used, with a warning. Raises ``ConfigError`` for a setting that does not
    exist or has no effect under verl. Without ``extra_parts``, also raised for a trainer with an
    unknown ``_save_checkpoint``; making an object of such a subclass raises it too.
    """
    base = trainer if isinstance(trainer, type) else type(trainer)
    if "checkpoints" in vars(trainer):
        raise ConfigError(f"{base.__name__} has these checkpoints already")
    options = Options(extra_parts, calls or RayCalls(), settings, hooks)
    modules = {kind.__module__ for kind in base.__mro__}
    if _SFT_OF_RAY in modules:
        raise ConfigError(
            f"{base.__name__} of {_SFT_OF_RAY} is not supported: its saves go through a handler that "
            "ckptfsm does not replace. Start verl's other SFT trainer, with the same words: "
            "torchrun ... -m ckptfsm.integrations.verl.sft"
        )
    if _SFT not in modules:
        return install_ppo(trainer, options)
    from ckptfsm.integrations.verl.sft import install_sft  # needs torch, unlike a driver

    return install_sft(trainer, options)


def install_in_verl(**options: Any) -> list[str]:
    """Give these checkpoints to every trainer that the installed verl may make.

    Returns their names. Those are ``RayPPOTrainer``, and in 0.9 the registry that ``main_ppo`` asks by
    default. ``options`` are those of ``install``. Call it where verl is imported, before a trainer is
    made. A second call without options changes nothing. Raises ``ConfigError`` if verl is not installed.
    """
    module = of_verl("verl.trainer.ppo.ray_trainer")
    module.RayPPOTrainer = _installed(module.RayPPOTrainer, options)
    names = ["RayPPOTrainer"]
    # These trainers need TransferQueue, which verl names in an extra only; without it verl cannot
    # make one.
    if find_spec("verl.trainer.ppo.v1") is not None and find_spec("transfer_queue") is not None:
        # The package, not its base module: the package imports the trainers, and each registers
        # itself.
        registry = of_verl("verl.trainer.ppo.v1").trainer_base.TRAINER_REGISTRY
        for name in list(registry):
            registry[name] = _installed(registry[name], options)
            names.append(name)
    return names


def _installed(kind: type, options: Mapping[str, Any]) -> type:
    """The class with these checkpoints; with options, ``install`` refuses a class that has them."""
    return kind if "checkpoints" in vars(kind) and not options else install(kind, **options)

"""``TrainingState``: what a plain torch trainer saves and loads, as one state dict.

Torch names the values: model and optimizer have the same names in a single process, under
DistributedDataParallel and under FSDP2. So what one of them saved, another one can load.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    _get_fqns,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from ckptfsm.core.errors import ConfigError, RestoreFailed
from ckptfsm.core.parts import PerRank
from ckptfsm.dcp.gate import Gate

if TYPE_CHECKING:
    from ckptfsm.ranks.manager import Manager

_AT_ONCE = 32  # parameters; each takes memory for a gradient and a copy while its state is made
_OWN = ("model", "optimizer", "untouched", "scheduler", "scaler", "loader", "rng_state")


class TrainingState:
    """The state of a trainer: ``state_dict()`` to save or to ask for it, ``load_state_dict()`` to
    go on.

    - ``model`` may be wrapped by DistributedDataParallel, ``fully_shard`` or ``torch.compile``. Give
      several as a ``ModuleDict``. ``optimizer`` may be several; make them after ``fully_shard``.
    - ``scheduler`` and ``scaler`` have ``state_dict`` and ``load_state_dict``, and are alike on all
      ranks. Each rank keeps the state of its own ``loader``.
    - ``rng``: each rank also keeps its random numbers, those of ``random``, numpy, torch, and of
      the current device of an accelerator that is in use.
    - ``more`` are further modules or objects with the two methods, by name, alike on all ranks.

    On another number of ranks the random numbers are left out with a ``ReshardWarning``, because
    ``reshard_drops`` has ``"rng_state"`` by default. The state of a ``loader`` raises
    ``RestoreFailed`` there, unless that setting also has ``"loader"``: the loader then stays as it is.

    Neither method takes a step: weights, gradients and the optimizer are those of the trainer.

    Raises ``ConfigError`` if an optimizer has a parameter that the model has not, if a name in
    ``more`` is taken, and for a model under the first FSDP of torch.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        *,
        scheduler: Any = None,
        scaler: Any = None,
        loader: Any = None,
        rng: bool = True,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        one = isinstance(optimizer, torch.optim.Optimizer)
        self.model = model
        self.optimizers: tuple[Any, ...] = (optimizer,) if one else tuple(optimizer)  # type: ignore[arg-type]
        self._plain = {"scheduler": scheduler, "scaler": scaler}
        self._plain = {name: each for name, each in self._plain.items() if each is not None}
        self._loader, self._rng, self._more = loader, rng, dict(more or {})
        self._stateless: set[Any] = set()  # parameters of which their optimizer keeps nothing
        for name in _OWN:
            if name in self._more:
                raise ConfigError(f"the name {name!r} in `more` is taken: choose another", key=name)
        if FullyShardedDataParallel.fsdp_modules(model):
            raise ConfigError(
                "the model is under FullyShardedDataParallel, the first FSDP of torch: use fully_shard"
            )
        for each in self.optimizers:
            _check_owner(model, each)

    def restore(self, ckpts: Manager, *, step: int | None = None) -> int:
        """Load the latest checkpoint, or that of ``step`` (collective). Returns its step.

        Returns 0 if there is no evidence of any checkpoint; nothing has changed then. Raises what
        ``CheckpointManager.restore`` and ``load_state_dict`` raise.
        """
        restored = ckpts.restore(self.state_dict(), step=step)
        if restored is None:
            return 0
        self.load_state_dict(restored.state)
        return restored.step

    def state_dict(self) -> dict[str, Any]:
        """The values to save, or to load into (collective under torch.distributed).

        The tensors are those of the trainer, no copies. An optimizer has no state of a parameter
        that never had a gradient. Such a state is made up here, so that every checkpoint has the same
        keys, and ``untouched`` names it.
        """
        _let_buffers_be_rank_0s(self.model)
        state: dict[str, Any] = {"model": get_model_state_dict(self.model)}
        if self.optimizers:
            with self._every_state() as untouched:
                state["optimizer"] = get_optimizer_state_dict(self.model, self.optimizers)
            state["untouched"] = sorted(untouched)
        for name, each in self._plain.items():
            state[name] = (each.state_dict(),)
        for name, each in self._more.items():
            state[name] = _state_of(each)
        if self._loader is not None:
            state["loader"] = PerRank(self._loader.state_dict())
        if self._rng:
            state["rng_state"] = PerRank(random_state())
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up a loaded state, the random numbers last.

        Raises ``RestoreFailed`` if a value is missing or does not fit. A value that the ranks cannot
        divide may be missing, see ``TrainingState``.
        """
        optimizer = ("optimizer",) if self.optimizers else ()
        for name in ("model", *optimizer, *self._plain, *self._more):
            if name not in state_dict:
                raise RestoreFailed(f"the loaded state has no {name!r}", key=name)
        with _refused("model"):
            set_model_state_dict(self.model, dict(state_dict["model"]))
        if self.optimizers:
            with _refused("optimizer"):
                self._load_optimizers(state_dict["optimizer"], state_dict.get("untouched", ()))
        for name, each in {**self._plain, **self._more}.items():
            with _refused(name):
                _load(each, state_dict[name])
        if self._loader is not None and "loader" in state_dict:
            self._loader.load_state_dict(_own(state_dict["loader"]))
        if self._rng and "rng_state" in state_dict:
            set_random_state(_own(state_dict["rng_state"]))

    @contextmanager
    def _every_state(self) -> Iterator[list[str]]:
        """Within, the optimizers have a state of each trained parameter. Gives the names of those
        that they have in truth not.

        Some have an empty one. With none at all, torch would take a step to make it.
        """
        names, untouched, added = _names_of(self.model), [], []
        try:
            for optimizer in self.optimizers:
                lacking = [each for each in _trained(optimizer) if not optimizer.state.get(each)]
                added += [(optimizer, each) for each in lacking]
                make = [each for each in lacking if each not in self._stateless]
                for place in range(0, len(make), _AT_ONCE):
                    _make_state(optimizer, make[place : place + _AT_ONCE])
                for each in lacking:
                    if optimizer.state[each]:
                        untouched.append(names[each])
                    else:
                        self._stateless.add(each)
            yield untouched
        finally:
            for optimizer, each in added:
                optimizer.state.pop(each, None)

    def _load_optimizers(self, given: Mapping[str, Any], untouched: Iterable[str]) -> None:
        names, untouched = _names_of(self.model), set(untouched)
        states = dict(given["state"])
        for optimizer in self.optimizers:
            for each in _trained(optimizer):
                optimizer.state.setdefault(each, {})  # with none at all, torch would take a step
                if each in self._stateless:
                    states.setdefault(names[each], {})
        set_optimizer_state_dict(self.model, self.optimizers, {**given, "state": states})
        for optimizer in self.optimizers:
            for each in _parameters(optimizer):
                state = states.get(names[each])
                if not state or names[each] in untouched:
                    optimizer.state.pop(each, None)
                    continue
                held = optimizer.state[each]
                for key, value in state.items():
                    # torch gives it the dtype of the parameter, also where the optimizer has another,
                    # and leaves out that of a frozen parameter
                    is_tensor = isinstance(value, torch.Tensor)
                    if key not in held or (is_tensor and held[key].dtype != value.dtype):
                        held[key] = value


def _check_owner(model: torch.nn.Module, optimizer: Any) -> None:
    known = set(model.parameters())
    for number, group in enumerate(optimizer.param_groups):
        for place, each in enumerate(group["params"]):
            if each not in known:
                raise ConfigError(
                    f"parameter {place} of the {type(optimizer).__name__}'s group {number}, with shape "
                    f"{tuple(each.shape)}, is not one of the model's: make the optimizer from this "
                    "model, after fully_shard"
                )


def _names_of(model: torch.nn.Module) -> dict[Any, str]:
    """Torch's name of each parameter, without those of wrappers."""
    return {each: next(iter(_get_fqns(model, name))) for name, each in model.named_parameters()}


def _parameters(optimizer: Any) -> list[Any]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _trained(optimizer: Any) -> list[Any]:
    return [each for each in _parameters(optimizer) if each.requires_grad]


def _make_state(optimizer: Any, lacking: Sequence[Any]) -> None:
    """Let an optimizer make its state of some parameters, by a step that is undone at once.

    The values of that state do not matter. Raises ``ConfigError`` if the optimizer refuses.
    """
    groups = [dict(group) for group in optimizer.param_groups]  # some optimizers count in them
    grads = [(each, each.grad) for each in _parameters(optimizer)]
    before = [each.detach().clone() for each in lacking]
    hooks = {name: vars(optimizer)[name] for name in _STEP_HOOKS if name in vars(optimizer)}
    try:
        for hook in vars(optimizer).get(_STEP_HOOKS[0], {}).values():
            if isinstance(getattr(hook, "__self__", None), Gate):
                hook(optimizer, (), {})  # a save in flight may still read what changes for a moment
        vars(optimizer).update({name: {} for name in hooks})
        for each, _ in grads:
            each.grad = None
        for each in lacking:
            each.grad = torch.zeros_like(each)
        type(optimizer).step(optimizer)  # not the step that a scheduler has wrapped, and counts
    except Exception as error:
        raise ConfigError(
            f"{type(optimizer).__name__} makes no state by a step with gradients of zero "
            f"({type(error).__name__}: {error}): give no optimizer, and save its state_dict yourself"
        ) from error
    finally:
        vars(optimizer).update(hooks)
        for each, grad in grads:
            each.grad = grad
        with torch.no_grad():
            for each, old in zip(lacking, before, strict=True):
                each.copy_(old)
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(values)


_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def _let_buffers_be_rank_0s(model: torch.nn.Module) -> None:
    """Do now what DistributedDataParallel does before its next forward pass.

    Until then, the running means of a BatchNorm differ by rank, and one rank's are kept.
    """
    for module in model.modules():
        if isinstance(module, DistributedDataParallel) and module.broadcast_buffers:
            for buffer in module.module.buffers():
                dist.broadcast(buffer, group=module.process_group, group_src=0)


def _state_of(each: Any) -> Any:
    """The state of an object. One without tensors is a single value, whatever its keys are."""
    if isinstance(each, torch.nn.Module):
        return get_model_state_dict(each)
    state = each.state_dict()
    return state if _has_tensor(state) else (state,)


def _has_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_tensor, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensor, value))
    return isinstance(value, torch.Tensor)


def _load(each: Any, state: Any) -> None:
    if isinstance(each, torch.nn.Module):
        set_model_state_dict(each, dict(state))
    else:
        each.load_state_dict(state[0] if isinstance(state, tuple) else state)


def _own(value: Any) -> Any:
    """A rank's own value, also of a state dict that was never saved."""
    return value.value if isinstance(value, PerRank) else value


@contextmanager
def _refused(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        said = f"{name!r} does not fit: {type(error).__name__}: {error}"
        raise RestoreFailed(said, key=name) from error


def random_state() -> dict[str, Any]:
    """The states of the generators of random numbers, in values that torch can load."""
    version, numbers, gauss = random.getstate()
    found: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "torch": torch.get_rng_state(),
    }
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        found["numpy"] = [str(name), [int(key) for key in keys], *rest]
    kind = _accelerator()
    if kind is not None and torch.get_device_module(kind).is_initialized():
        found[kind] = torch.get_device_module(kind).get_rng_state()
    return found


def set_random_state(state: Mapping[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy as np

        name, keys, *rest = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    for kind in sorted(set(state) - {"python", "torch", "numpy"}):
        if kind != _accelerator():
            raise RestoreFailed(
                f"the random numbers of {kind!r} were saved, and there is none here: go on without "
                "them with rng=False",
                key="rng_state",
            )
        torch.get_device_module(kind).set_rng_state(state[kind])


def _accelerator() -> str | None:
    """The type of this machine's accelerator, if it has one."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if found is None else found.type

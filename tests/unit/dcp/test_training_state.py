"""``TrainingState``: a trainer that resumes goes on as one that never stopped; saves disturb none."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptfsm.core.errors import ConfigError, RestoreFailed
from ckptfsm.core.parts import PerRank
from ckptfsm.dcp.gate import Gate, GatedMemory
from ckptfsm.dcp.training_state import TrainingState

_EACH = ("loader", "rng_state")


class Net(torch.nn.Module):
    """Has a buffer, dropout, a tied, a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(12, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.drop = torch.nn.Dropout(0.3)
        self.frozen = torch.nn.Linear(6, 6).requires_grad_(False)
        self.unused = torch.nn.Parameter(torch.ones(5))
        self.out = torch.nn.Linear(6, 12, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(self.norm(self.frozen(self.embed(x)))))


class Loader:
    def __init__(self) -> None:
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.place = state["place"]


class Counting(torch.optim.Optimizer):
    """Has no learning rate, counts in its groups, and keeps its state in another dtype."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for each in group["params"]:
                if each.grad is not None:
                    state = self.state[each]
                    state.setdefault("mean", torch.zeros_like(each, dtype=torch.float64))
                    state["mean"].mul_(0.9).add_(each.grad / 3)
                    each.sub_(0.01 * each + 0.01 * state["mean"].to(each.dtype) / group["k"])


Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: Mapping[str, Make] = MappingProxyType(
    {
        "AdamW": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), weight_decay=0.1),
        "Adam": lambda p: torch.optim.Adam(p, fused=True, amsgrad=True, weight_decay=0.1),
        "NAdam": torch.optim.NAdam,
        "Rprop": torch.optim.Rprop,
        "Adagrad": torch.optim.Adagrad,
        "Adafactor": torch.optim.Adafactor,
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(
            p, lr=0.01, momentum=0.9, dampening=0.5, weight_decay=0.1
        ),
        "Counting": Counting,
    }
)


class Trainer:
    def __init__(self, make: Make, seed: int = 1) -> None:
        for each in (torch.manual_seed, random.seed, np.random.seed):
            each(seed)
        self.model, self.loader = Net(), Loader()
        self.optimizer = make(self.model.parameters())
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        has_lr = "lr" in self.optimizer.defaults
        after = torch.optim.lr_scheduler.MultiStepLR
        self.scheduler = after(self.optimizer, [2, 5]) if has_lr else None
        self.state = TrainingState(
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            loader=self.loader,
            more={"average": self.average},
        )

    def train(self, steps: int) -> Trainer:
        for _ in range(steps):
            self.loader.place += 1
            noise = random.random() + np.random.rand() + self.loader.place
            loss = self.model(torch.randint(0, 12, (5,))).square().mean() * noise
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.average.update_parameters(self.model)
            if self.scheduler is not None:
                self.scheduler.step()
        return self

    def seen(self) -> Any:
        """Everything that a trainer has, and what it draws next."""
        scheduler = self.scheduler.state_dict() if self.scheduler is not None else None
        draws = torch.rand(2), random.random(), np.random.rand()
        parts = (self.model, self.optimizer, self.average)
        return copy.deepcopy(
            [*(each.state_dict() for each in parts), scheduler, self.loader.place, draws]
        )


def write(state: Mapping[str, Any], place: Path) -> None:
    dcp.save(_plain(state), checkpoint_id=place, no_dist=True)


def read(template: Mapping[str, Any], place: Path) -> dict[str, Any]:
    plain = _plain(template)
    dcp.load(plain, checkpoint_id=place, no_dist=True)
    return {key: value[0] if key in _EACH else value for key, value in plain.items()}


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    return {k: (v.value,) if isinstance(v, PerRank) else v for k, v in state.items()}


def assert_same(one: Any, other: Any, place: str = "") -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other) and one.dtype == other.dtype, place
    elif isinstance(one, dict):
        assert list(map(str, one)) == list(map(str, other)), place
        for key, value in one.items():
            assert_same(value, other[key], f"{place}.{key}")
    elif isinstance(one, (list, tuple)):
        for number, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{place}.{number}")
    else:
        assert one == other, place


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_trainer_goes_on_bit_for_bit(tmp_path: Path, name: str, at: int) -> None:
    """Catches: a state that is left out or made up, as that of an optimizer before its first step, of
    a parameter without gradients, in another dtype; a save or a template that changes the trainer."""
    make = OPTIMIZERS[name]
    saved = Trainer(make).train(at)
    write(saved.state.state_dict(), tmp_path)
    wanted = saved.train(4).seen()
    assert_same(wanted, Trainer(make).train(at + 4).seen())
    resumed = Trainer(make, seed=2)
    resumed.state.load_state_dict(read(resumed.state.state_dict(), tmp_path))
    assert_same(wanted, resumed.train(4).seen())


@pytest.mark.parametrize("first", ["restore", "freeze"])
def test_moments_of_a_parameter_that_was_trained_and_is_frozen(tmp_path: Path, first: str) -> None:
    """Catches: moments that begin at zero where a parameter is thawed again, though it was frozen after
    the restore; others than torch would leave out, where it was frozen before."""
    make = OPTIMIZERS["AdamW"]
    saved = Trainer(make).train(3)
    saved.model.norm.requires_grad_(False)
    saved.train(1)
    write(saved.state.state_dict(), tmp_path)
    saved.train(1).model.norm.requires_grad_(True)
    saved.train(1)
    resumed = Trainer(make, seed=2)
    resumed.model.norm.requires_grad_(first != "freeze")
    resumed.state.load_state_dict(read(resumed.state.state_dict(), tmp_path))
    assert (resumed.model.norm.weight in resumed.optimizer.state) == (first == "restore")
    resumed.model.norm.requires_grad_(False)
    resumed.train(1).model.norm.requires_grad_(True)
    resumed.train(1)
    assert torch.equal(saved.model.norm.weight, resumed.model.norm.weight) == (first == "restore")


def test_a_state_dict_is_made_without_a_step_of_the_trainers() -> None:
    """Catches: hooks of the optimizer or its scheduler that see a step which nobody took; gradients
    that are gone."""
    trainer, seen = Trainer(OPTIMIZERS["AdamW"]), []
    undo = [
        trainer.optimizer.register_step_pre_hook(lambda *_: seen.append("before")),
        trainer.optimizer.register_step_post_hook(lambda *_: seen.append("after")),
    ]
    trainer.model(torch.arange(5)).sum().backward()
    gradients = [each.grad for each in trainer.model.parameters()]
    counts = vars(trainer.scheduler).get("_step_count"), vars(trainer.optimizer).get("_opt_called")
    trainer.state.load_state_dict(trainer.state.state_dict())
    assert seen == [] and not trainer.optimizer.state
    assert all(a is b.grad for a, b in zip(gradients, trainer.model.parameters(), strict=True))
    assert counts == (trainer.scheduler._step_count, vars(trainer.optimizer).get("_opt_called"))
    trainer.optimizer.step()
    assert seen == ["before", "after"]
    for each in undo:
        each.remove()


def test_an_optimizer_without_state_is_not_asked_at_each_save(monkeypatch) -> None:
    """Catches: a pass over all weights at each save of plain SGD."""
    trainer, steps = Trainer(OPTIMIZERS["SGD"]), []
    monkeypatch.setattr(type(trainer.optimizer), "step", lambda *_: steps.append(1))
    trainer.state.state_dict()
    trainer.state.state_dict()
    assert steps == [1]


def test_what_is_left_out_stays_as_it_is(tmp_path: Path) -> None:
    """Catches: values that another number of ranks cannot take up, and which end the restore or are
    reset."""
    trainer = Trainer(OPTIMIZERS["SGD"]).train(2)
    state = trainer.state.state_dict()
    assert isinstance(state["loader"], PerRank) and isinstance(state["rng_state"], PerRank)
    draws = torch.get_rng_state()
    trainer.loader.place = 7
    trainer.state.load_state_dict({k: v for k, v in state.items() if k not in _EACH})
    assert trainer.loader.place == 7 and torch.equal(draws, torch.get_rng_state())


class Fewer(Net):
    def __init__(self) -> None:
        super().__init__()
        del self.norm


def test_what_does_not_fit_is_told() -> None:
    """Catches: an optimizer made before fully_shard, whose steps and checkpoints are of nobody's
    weights; values of another model, or none, taken for this one's."""
    model, other = Net(), Net()
    with pytest.raises(ConfigError, match=r"parameter 0 of the SGD's group 0, with shape \(5,\)"):
        TrainingState(model, torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="'loader' in `more`"):
        TrainingState(model, more={"loader": other})
    closed = TrainingState(model, torch.optim.LBFGS(model.embed.parameters()))
    with pytest.raises(ConfigError, match="LBFGS makes no state"):
        closed.state_dict()
    trainer = Trainer(OPTIMIZERS["AdamW"])
    whole = trainer.state.state_dict()
    for key in ("model", "optimizer", "scheduler", "average"):
        with pytest.raises(RestoreFailed, match=f"has no '{key}'"):
            trainer.state.load_state_dict({k: v for k, v in whole.items() if k != key})
    with pytest.raises(RestoreFailed, match=r"(?s)'model' does not fit: .*norm\.weight"):
        trainer.state.load_state_dict({**whole, "model": Fewer().state_dict()})
    lacking = copy.copy(whole["optimizer"])
    lacking["state"] = {k: v for k, v in lacking["state"].items() if k != "norm.weight"}
    with pytest.raises(RestoreFailed, match=r"'optimizer' does not fit: .*norm\.weight"):
        trainer.state.load_state_dict({**whole, "optimizer": lacking})


class Waiting(Gate):
    """A gate that counts how often somebody waits at it."""

    def __init__(self) -> None:
        self.waits, self._engine, self._promise = 0, None, GatedMemory()

    def before_update(self) -> None:
        self.waits += 1


def test_a_state_that_has_to_be_made_waits_for_the_save_in_flight() -> None:
    """Catches: a save that fails, because weights were changed for a moment while it read them."""
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 2), "unused": torch.nn.Linear(2, 2)})
    optimizer = torch.optim.AdamW(model.parameters())
    gate = Waiting()
    gate.attach(optimizer)
    model["used"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert gate.waits == 1
    TrainingState(model, optimizer).state_dict()
    assert gate.waits == 2

"""The programs of the ranks of the Megatron-LM test jobs. See ``jobs.py``; its rules hold here."""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jobs import (
    TIMES,
    Here,
    Told,
    is_state_of,
    managed,
    meet,
    request_for,
    state_of,
    template_of,
    told,
)
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.serialization import load_common_state_dict
from trainer_lm import async_utils, checkpointing, global_vars, training

from ckptfsm.core.errors import CkptFsmError, RecoveryWarning
from ckptfsm.integrations.megatron_lm import InstalledTraining, MegatronLMCheckpoints, install
from ckptfsm.megatron.compat import cpu_devices
from ckptfsm.writers import rank_writer

PACKAGE = "trainer_lm"


@dataclass
class Model:
    """Its state is a function of the iteration. The replica is the data-parallel part.

    ``gate``: rank 0's forked writer of the save at ``gated_at`` stands there.
    """

    here: Here
    gate: str = ""
    gated_at: int = 0
    loaded: bool | None = None

    def sharded_state_dict(self, iteration: int) -> dict[str, Any]:
        state = state_of(iteration, self.here)
        for name, value in (("a", 1.0), ("b", 2.0)):
            data = torch.full((64, 4), iteration + value)
            state[name] = ShardedTensor.from_rank_offsets(name, data, replica_id=self.here.rank)
        if self.gate:
            let_writers_stand(self.gate if iteration == self.gated_at else "")
        return state

    def template(self) -> dict[str, Any]:
        data = {name: torch.zeros(64, 4) for name in "ab"}
        replicas = {n: ShardedTensor.from_rank_offsets(n, d) for n, d in data.items()}
        for replica in replicas.values():
            replica.replica_id = self.here.rank
        return {**template_of(self.here), **replicas}

    def load(self, state: dict[str, Any], iteration: int) -> None:
        replicas = bool((state["a"] == iteration + 1).all() and (state["b"] == iteration + 2).all())
        self.loaded = replicas and is_state_of(state, iteration, self.here)


_write_rank = rank_writer.write_rank


def let_writers_stand(gate: str) -> None:
    """Let rank 0's writers that are forked from now on stand at a gate first; "" for none."""
    held = gate and torch.distributed.get_rank() == 0
    rank_writer.write_rank = partial(_write_behind, gate) if held else _write_rank


def _write_behind(gate: str, *job: Any, **named: Any) -> list[tuple[str, int, Any]]:
    meet(gate, "writer")
    return _write_rank(*job, **named)


@contextmanager
def owned(installed: bool, **settings: Any) -> Iterator[InstalledTraining | None]:
    if not installed:
        yield None
        return
    with install(PACKAGE, **{**TIMES, **settings}) as training_:
        yield training_


def train(
    here: Here,
    root: str,
    installed: bool,
    gate: str = "",
    gated_at: int = 0,
    settings: dict[str, Any] | None = None,
    **args: Any,
) -> Told:
    """Load, train to ``train_iters`` and save on the way, with or without the drop-in."""
    here.join_with_queue()
    global_vars.set_args(**{"save": root, "load": root, **args})
    model = Model(here, gate, gated_at)
    how = {**({"engine": "fork"} if gate else {}), **(settings or {})}
    outcome: Told = {"error": None, "start": None, "exit": False}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", RecoveryWarning)
        try:
            with cpu_devices(), owned(installed, **how):
                outcome["start"] = training.pretrain(model)
        except CkptFsmError as error:
            outcome["error"] = told(error)
        except SystemExit as ending:
            outcome["exit"] = ending.code in (None, 0)
    warned = [w.category.__name__ for w in said if w.category is RecoveryWarning]
    return {**outcome, "loaded": model.loaded, "ran": checkpointing.RAN, "warned": warned}


def saved_arguments(here: Here, root: str, iteration: int) -> bool:
    """Whether the arguments in a checkpoint say that it was asynchronous."""
    here.join()
    with cpu_devices():
        common = load_common_state_dict(f"{root}/iter_{iteration:07d}")
    asked: bool = common["args"].async_save
    return asked


def train_on_while_saving(here: Here, root: str, gate: str, trained: str) -> Told:
    """Iteration 2 is saved; the writers of 4 stand at a gate while training goes on to 7."""
    here.join_with_queue()
    args = global_vars.set_args(save=root, load=root)
    model = Model(here, gate, gated_at=4)
    with cpu_devices(), owned(True, engine="fork"):
        for iteration in (2, 4):
            args.iteration = iteration
            checkpointing.save_checkpoint(iteration, model, None, None, 0)
            async_utils.maybe_finalize_async_save(blocking=iteration == 2)
        for args.iteration in (5, 6, 7):
            async_utils.maybe_finalize_async_save()
        ran = list(checkpointing.RAN)
        meet(trained)
        async_utils.maybe_finalize_async_save(blocking=True, terminate=True)
    return {"early": ran, "ran": checkpointing.RAN}


def retain_while_saving(here: Here, root: str, gate: str, retained: str) -> None:
    """Only the last one is kept; retention has its turn while the writers of 4 stand at a gate."""
    here.join_with_queue()
    global_vars.set_args(save=root, load=root, save_retain_interval=100)
    model = Model(here, gate, gated_at=4)
    with cpu_devices(), owned(True, engine="fork") as training_:
        assert training_ is not None
        for iteration in (2, 4):
            checkpointing.save_checkpoint(iteration, model, None, None, 0)
            async_utils.maybe_finalize_async_save(blocking=iteration == 2)
        manager = training_.checkpoints.open()
        manager.pin(2)
        manager.unpin(2)
        meet(retained)
        async_utils.maybe_finalize_async_save(blocking=True, terminate=True)


def save_synchronously(here: Here, root: str) -> Told:
    """The content of the tracker when ``save_checkpoint`` returns."""
    here.join_with_queue()
    global_vars.set_args(save=root, async_save=False)
    model = Model(here)
    with owned(True):
        checkpointing.save_checkpoint(4, model, None, None, 0)
        tracker = Path(checkpointing.get_checkpoint_tracker_filename(root)).read_text().strip()
        asked = global_vars.get_args().async_save
    return {"tracker": tracker, "asked": asked, "ran": checkpointing.RAN}


def install_and_uninstall(here: Here, root: str) -> Told:
    """Which names the drop-in changes, and whether they come back. And its refusals."""
    here.join_with_queue()
    args = global_vars.set_args(save=root)
    modules = (checkpointing, async_utils, training)
    before = [dict(vars(module)) for module in modules]
    installed = install(PACKAGE, **TIMES)
    changed = {
        f"{module.__name__}.{name}"
        for module, names in zip(modules, before, strict=True)
        for name, value in names.items()
        if vars(module)[name] is not value
    }
    checkpointing.save_checkpoint(2, Model(here), None, None, 0)
    refused = []
    try:
        installed.uninstall()
    except CkptFsmError as error:
        refused.append(error.message)
    async_utils.maybe_finalize_async_save(blocking=True)
    for name, value in (("ckpt_format", "torch"), ("dataloader_save", root)):
        before_this = getattr(args, name, None)
        setattr(args, name, value)
        try:
            checkpointing.save_checkpoint(4, Model(here), None, None, 0)
        except CkptFsmError as error:
            refused.append(error.message)
        setattr(args, name, before_this)
    installed.uninstall()
    after = [dict(vars(module)) for module in modules]
    return {"changed": sorted(changed), "refused": refused, "restored": before == after}


def refuse_other_trainers(here: Here) -> list[str]:
    """A trainer that is not there, one without a name that is replaced, and one that was older."""
    said = []
    for package, module, name in (
        ("no_such_trainer", async_utils, "schedule_async_save"),
        (PACKAGE, async_utils, "schedule_async_save"),
        (PACKAGE, checkpointing, "ensure_directory_exists"),
        (PACKAGE, async_utils, "reset_persistent_async_worker"),
    ):
        stock = getattr(module, name)
        delattr(module, name)
        try:
            install(package).uninstall()
            said.append("")
        except CkptFsmError as error:
            said.append(error.message)
        setattr(module, name, stock)
    return said


def fail_on_one_rank(here: Here, root: str) -> Told:
    """Stock's ``save_checkpoint`` raises on rank 1, behind its last collective; another works."""
    here.join_with_queue()
    global_vars.set_args(save=root)
    stock = checkpointing.save_checkpoint
    failing = [here.rank == 1]

    def save_checkpoint(*arguments: Any, **keywords: Any) -> None:
        stock(*arguments, **keywords)
        if failing.pop():
            raise OSError("a fault of this test")

    checkpointing.save_checkpoint = save_checkpoint
    try:
        with install(PACKAGE, **TIMES) as installed, cpu_devices():
            try:
                checkpointing.save_checkpoint(2, Model(here), None, None, 0)
                error = None
            except CkptFsmError as problem:
                error = told(problem)
            failing.append(False)
            checkpointing.save_checkpoint(4, Model(here), None, None, 0)
            async_utils.maybe_finalize_async_save(blocking=True)
            return {"error": error, "steps": installed.checkpoints.open(root).all_steps()}
    finally:
        checkpointing.save_checkpoint = stock


class Broken:
    """Is accepted, and cannot be written."""

    looks = 0

    def __reduce__(self) -> tuple[Any, ...]:
        Broken.looks += 1
        if Broken.looks > 1:
            raise RuntimeError("a broken state")
        return (OrderedDict, ())


def fail_and_terminate(here: Here, root: str) -> Told:
    """A save that fails while the trainer leaves; then another process opens the root."""
    here.join_with_queue()
    ckpts = MegatronLMCheckpoints(root, **TIMES)
    ckpts.save(2, {**state_of(2, here), "broken": Broken()})
    try:
        ckpts.maybe_finalize_async_save(blocking=True, terminate=True)
        error = None
    except CkptFsmError as problem:
        error = told(problem)
    try:
        MegatronLMCheckpoints(root, on_failure=2, **TIMES)
        again = ""
    except CkptFsmError as problem:
        again = problem.message
    with managed(here, root) as manager:
        return {"error": error, "steps": manager.all_steps(), "again": again}


def save_alone(here: Here, root: str) -> Told:
    """A custom trainer: states, a ready request, an iteration twice, after ``terminate``."""
    here.join_with_queue()
    ckpts = MegatronLMCheckpoints(root, save_retain_interval=4, **TIMES)
    steps = []
    for iteration in (2, 4):
        ckpts.save(iteration, state_of(iteration, here))
        ckpts.maybe_finalize_async_save(blocking=True)
        steps.append(ckpts.open().all_steps())
    again = ckpts.save(4, state_of(4, here))
    directory = f"{root}/iter_0000006"
    if here.rank == 0:
        os.mkdir(directory)
    torch.distributed.barrier()
    ckpts.schedule_async_save(request_for(directory, state_of(6, here)), iteration=6)
    busy = ckpts.is_empty_async_queue()
    ckpts.maybe_finalize_async_save(blocking=True, terminate=True)
    steps.append([again.skipped, busy, ckpts.is_empty_async_queue()])
    ckpts.save(7, state_of(7, here))
    ckpts.maybe_finalize_async_save(blocking=True, terminate=True)
    for iteration in (8, 9):  # a second directory; nothing was said of retention there
        ckpts.save(iteration, state_of(iteration, here), directory=f"{root}.2")
        ckpts.maybe_finalize_async_save(blocking=True)
    steps.append(ckpts.open(f"{root}.2").all_steps())
    ckpts.maybe_finalize_async_save(blocking=True, terminate=True)
    return {"steps": steps}

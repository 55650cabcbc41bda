"""The queue and the drop-in for Megatron-LM in one process: the tests that kill planted bugs of
them.

The queue: two ranks as threads, made-up requests, forked writers. The drop-in for Megatron-LM: one
rank, under the trainer of ``tests/megatron``, with megatron-core's saves. The tests that lie there say
more, and take longer.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import inspect
import os
import queue
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import ThreadTransport, run_ranks

from ckptfsm.adapters.fork import fork_child
from ckptfsm.core.config import CheckpointConfig
from ckptfsm.core.errors import (
    ConfigError,
    SaveFailed,
    SaveFailedWarning,
    SaveRefused,
    StepExistsError,
    WriterDied,
)
from ckptfsm.core.layout import STAGING, TRACKER
from ckptfsm.core.parts import PartSpec
from ckptfsm.disk.stock import COMMON_KEY
from ckptfsm.writers import rank_writer

PATIENCE_S = 20.0
STAGED = f"{STAGING}/iter_0000001"
HERE = threading.local()


class Gate:
    """Writers wait here, in their read of a FIFO, until it is opened for so many of them."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        os.mkfifo(path)
        self._end = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # so that no process waits for an open

    def open(self, count: int) -> None:
        os.write(self._end, b"." * count)

    def close(self) -> None:
        os.close(self._end)

    def __call__(self) -> None:
        with open(self.path, "rb", buffering=0) as go:
            go.read(1)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.close()


# --------------------------------------------------------------------------------------- the queue


class Rank:
    """A rank with a queue, and the queue of results that all its requests share."""

    def __init__(self, transport: ThreadTransport, **settings: Any) -> None:
        from ckptfsm.integrations.queue import AsyncCallsQueue

        HERE.transport = transport
        self.rank = transport.rank
        self.queue = AsyncCallsQueue(**settings)
        self.results: queue.Queue[Any] = queue.Queue()
        self.ran: list[tuple[str, Any]] = []

    def request(self, name: str, write: Callable[[], Any] = int, *more: Any) -> Any:
        """A request of one bucket. Its finalizer notes the result that it took; ``more`` run before
        that."""
        return SimpleNamespace(
            async_fn=partial(put_result, name, write),
            async_fn_args=[self.rank, [name], self.results],
            finalize_fns=[*more, partial(self.take, name)],
        )

    def take(self, name: str) -> None:
        self.ran.append((name, self.results.get(timeout=PATIENCE_S)))

    def finish(self, **how: Any) -> Any:
        """The result of the next call of the queue, or the type of its error."""
        try:
            return self.queue.maybe_finalize_async_calls(**{"blocking": True, **how})
        except SaveFailed as error:
            return type(error)


def put_result(name: str, write: Callable[[], Any], rank: int, buckets: Any, results: Any) -> None:
    write()
    results.put({0: name})


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ValueError("made up")


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[ThreadTransport], Any]], Any]:
    """Runs work on two ranks, each on a thread; what each returned. An error of one is raised."""
    from ckptfsm.integrations import queue as module
    from ckptfsm.megatron import foreign

    monkeypatch.setattr(module, "transport_of", lambda config: HERE.transport)
    monkeypatch.setattr(foreign, "cpu_devices", contextlib.nullcontext)  # not for two threads

    def run(work: Callable[[ThreadTransport], Any]) -> Any:
        returned = run_ranks(2, work, timeout_s=PATIENCE_S)
        for error in returned:
            if isinstance(error, BaseException):
                raise AssertionError(f"a rank ended with {error!r}") from error
        return returned

    return run


def strategy() -> dict[str, Any]:
    """Who makes a request; megatron-core asks from 0.17 on."""
    from megatron.core import dist_checkpointing

    known = inspect.signature(dist_checkpointing.save).parameters
    return {"async_strategy": "mcore"} if "async_strategy" in known else {}


def results_of(*names: str) -> list[tuple[str, Any]]:
    return [(name, {0: name}) for name in names]


def test_I5_requests_in_flight_together_keep_their_results(ranks: Any) -> None:
    """Catches: results that are swapped through the queue that all stock requests share."""

    def work(transport: ThreadTransport) -> Any:
        here = Rank(transport)
        for name in "abc":
            here.queue.schedule_async_request(here.request(name))
        for call in here.queue._calls:  # all of them are written
            assert call.child is not None
            call.child.wait(PATIENCE_S)
        return here.finish(), here.ran

    assert ranks(work) == [([0, 1, 2], results_of("a", "b", "c"))] * 2


def test_I5_a_result_that_was_not_taken_is_not_the_next_requests(ranks: Any) -> None:
    """Catches: finalizers that raise and leave their payload to the next request."""

    def work(transport: ThreadTransport) -> Any:
        here = Rank(transport)
        here.queue.schedule_async_request(here.request("a", int, fail))
        here.queue.schedule_async_request(here.request("b"))
        return here.finish(), here.finish(), here.ran

    assert ranks(work) == [(SaveFailed, [1], results_of("b"))] * 2


def test_I10_a_killed_writer_is_an_error_on_every_rank(ranks: Any) -> None:
    """Catches: a killed writer that counts as done, finalizers of its request, a rank that is not
    told."""

    def work(transport: ThreadTransport) -> Any:
        here = Rank(transport)
        here.queue.schedule_async_request(here.request("a", die if here.rank == 1 else int))
        here.queue.schedule_async_request(here.request("b"))
        return here.finish(), here.ran, here.finish(), here.ran

    for first, _, then, ran in ranks(work):
        assert (first, then) == (WriterDied, [1])
        assert ran == results_of("b")


def test_I6_finalizers_wait_for_the_writers_of_all_ranks(ranks: Any, gate: Gate) -> None:
    """Catches: a rank that finalizes when its writer is done: before the checkpoint is whole."""

    def work(transport: ThreadTransport) -> Any:
        here = Rank(transport)
        here.queue.schedule_async_request(here.request("a", gate if here.rank == 1 else int))
        (call,) = here.queue._calls
        if here.rank == 0:
            assert call.child is not None
            call.child.wait(PATIENCE_S)
        early = [*(here.finish(blocking=False) for _ in range(3)), list(here.ran)]
        if here.rank == 1:
            gate.open(1)
        return early, here.finish(), here.ran

    assert ranks(work) == [([[], [], [], []], [0], results_of("a"))] * 2


def test_I10_a_hung_writer_misses_its_deadline(ranks: Any, gate: Gate) -> None:
    """Catches: a writer on a dead file system that is waited for, for ever."""

    def work(transport: ThreadTransport) -> Any:
        here = Rank(transport, writer_timeout_s=0.5)
        here.queue.schedule_async_request(here.request("a", gate if here.rank == 1 else int))
        return here.finish(), here.ran

    assert ranks(work) == [(SaveFailed, [])] * 2


def test_I5_a_call_that_was_aborted_is_not_the_next_one(ranks: Any) -> None:
    """Catches: a completion of a failed run that counts for the first call of the retry."""

    def work(transport: ThreadTransport) -> Any:
        here = Rank(transport)
        here.queue.schedule_async_request(here.request("a"))
        here.queue.close(abort=True)
        left = here.queue.get_num_unfinalized_calls()
        here.queue.schedule_async_request(here.request("b"))
        return left, here.finish(), here.ran

    assert ranks(work) == [(0, [1], results_of("b"))] * 2


@pytest.mark.parametrize("begun", [False, True])
def test_I5_requests_that_are_staged_into_the_same_shared_memory(
    ranks: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """Catches: wrong values without an error. nvidia-resiliency-ext stages each request into the memory
    of the one before; a fork does not freeze memory that processes share."""
    import torch

    from ckptfsm.integrations import queue as module

    def work(transport: ThreadTransport) -> Any:
        here = Rank(transport)
        if begun:
            parts: dict[str, Any] = {}
            manager: Any = SimpleNamespace(save=lambda step, parts: parts)
            filling = module._Filling(1, manager, dict.fromkeys("abc", ""), parts)
            here.queue._transport = transport
        memory = torch.zeros(4).share_memory_()
        buckets = [("path", "file", ([], [("item", memory)]))]
        for value, name in enumerate("abc", 1):
            memory.fill_(value)
            request = here.request(name)
            request.async_fn = partial(put_values, gate)
            request.preload_fn = lambda: buckets
            if begun:
                here.queue._fill(filling, request)
            else:
                here.queue.schedule_async_request(request)
        if begun:
            requests = [part.request for part in parts.values()]
            return [values_in(request.async_fn_args[1]) for request in requests]
        gate.open(3)
        assert here.finish() == [0, 1, 2]
        return [result[0] for _, result in here.ran]

    assert ranks(work) == [[[1.0] * 4, [2.0] * 4, [3.0] * 4]] * 2


def put_values(gate: Gate, rank: int, buckets: Any, results: Any) -> None:
    gate()
    results.put({0: values_in(buckets)})


def values_in(buckets: Any) -> list[float]:
    ((_, _, (_, ((_, tensor),))),) = buckets
    values: list[float] = tensor.tolist()
    return values


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("ready", [False, True])
def test_I5_ready_parts_that_were_staged_into_one_memory_are_refused(
    tmp_path: Path, shared: bool, ready: bool
) -> None:
    """Catches: two requests that were made before either was copied, so that both parts have the
    values of the second. A refusal of functions: each of them is called after the one before was
    copied."""
    import torch

    from ckptfsm.megatron.foreign import ForeignRequest, stage_foreign

    memory = torch.zeros(4)
    other = memory.clone()
    if shared:
        memory.share_memory_()
        other = memory

    def request(directory: str, tensor: Any) -> Any:
        return SimpleNamespace(async_fn=put_result, async_fn_args=[0, [tensor]], finalize_fns=[])

    def part(name: str, tensor: Any) -> Any:
        spec = PartSpec(name=name, kind="foreign", directory=name, ranks=(0,))
        build = partial(request, tensor=tensor)
        made = {"request": build("")} if ready else {"build": build}
        return stage_foreign(spec, ForeignRequest(**made), 0, str(tmp_path), before)

    before: list[Any] = []
    before.append(part("actor", memory))
    if shared and ready:
        with pytest.raises(SaveRefused, match="'actor' and 'critic' were staged into the same"):
            part("critic", other)
    else:
        assert part("critic", other).name == "critic"


def test_I5_pinned_memory_is_kept_until_the_finalizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: pinned memory that its allocator gives to the next request while a writer, which may
    share it, still reads it; gigabytes of ordinary memory that are kept with it."""
    import torch

    from ckptfsm.megatron.foreign import stage_request

    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr("torch.Tensor.is_pinned", lambda tensor: tensor.numel() == 4)
    request = SimpleNamespace(
        async_fn=put_result,
        async_fn_args=[0, [torch.zeros(4), torch.zeros(5)], queue.Queue()],
        finalize_fns=[],
    )
    staged = stage_request("a", request)
    staged.let_go()
    assert [tensor.numel() for tensor in staged.arguments] == [4]
    staged.finalize({})
    assert staged.arguments == []


def test_I5_results_of_another_queue_are_left_to_it(ranks: Any) -> None:
    """Catches: two queues in use at once that swap their results: both are finalized, and neither
    can be loaded."""

    def work(transport: ThreadTransport) -> Any:
        here = Rank(transport)
        if here.rank == 1:
            here.results.put("of another queue")
        said = []
        for name in "ab":
            here.queue.schedule_async_request(here.request(name))
            try:
                said.append(here.queue.maybe_finalize_async_calls(blocking=True))
            except SaveFailed as error:
                left = here.results.get_nowait() if here.rank == 1 else "of another queue"
                said += [
                    error.facts["reason"],
                    error.facts["rank"],
                    left,
                    "megatron-core" in error.message,
                ]
        return said, here.ran

    assert ranks(work) == [(["two_queues", 1, "of another queue", True, [1]], results_of("b"))] * 2


class GoneQueue(queue.Queue[Any]):
    """A results queue after its process died."""

    def empty(self) -> bool:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")


def test_I10_a_results_queue_that_is_gone_is_an_error_on_every_rank(ranks: Any) -> None:
    """Catches: a rank that raises alone what its results queue raises, while the other waits for it."""

    def work(transport: ThreadTransport) -> Any:
        here = Rank(transport)
        kept = here.results
        if here.rank == 1:
            here.results = GoneQueue()
        here.queue.schedule_async_request(here.request("a"))
        with pytest.raises(SaveFailed, match="rank 1: .*Connection refused") as told:
            here.queue.maybe_finalize_async_calls(blocking=True)
        here.results = kept
        here.queue.schedule_async_request(here.request("b"))
        return told.value.facts["reason"], here.finish(), here.ran

    assert ranks(work) == [("results_queue", [1], results_of("b"))] * 2


def raise_in_a_thread(rank: int, buckets: Any, results: Any) -> None:
    """As megatron-core's writer, which waits until its workers have counted down."""
    threading.Thread(target=sys.exit, args=(3,)).start()
    threading.Event().wait()


def test_I10_a_write_worker_that_is_a_thread_ends_its_writer(ranks: Any) -> None:
    """Catches: a writer that waits for a thread that raised until its deadline, since threads end
    without a word."""

    def work(transport: ThreadTransport) -> Any:
        here = Rank(transport)
        request = here.request("a")
        if here.rank == 1:
            request.async_fn = raise_in_a_thread
        here.queue.schedule_async_request(request)
        return here.finish(), here.ran

    assert ranks(work) == [(WriterDied, [])] * 2


@dataclass(frozen=True)
class Index:
    """The name of a tensor or object."""

    fqn: str


@pytest.mark.parametrize(
    ("left", "length", "said"),
    [
        (("a", "b"), 4, ""),
        (("a",), 4, "no result for 1 of 2 items, 'b' for one"),
        (("a", "b"), 5, "has 8 bytes, and 9 were written to it"),
    ],
)
def test_I3_the_words_of_a_writer_are_compared_with_its_files(
    tmp_path: Path, left: tuple[str, ...], length: int, said: str
) -> None:
    """Catches: a shard that is shorter than its results say, or an item without a result: tracked,
    the older ones pruned, and no loader can read it."""
    shard = tmp_path / STAGED / "__0_0.distcp"
    shard.parent.mkdir(parents=True)
    (shard.parent / "common.pt").write_bytes(b"c")

    def write(rank: int, buckets: Any, results: Any) -> None:
        shard.write_bytes(b"12345678")
        where = [SimpleNamespace(relative_path=shard.name, offset=o, length=length) for o in (0, 4)]
        found = zip(left, where, strict=False)
        results.put({0: [SimpleNamespace(index=Index(n), storage_data=at) for n, at in found]})

    items = [(SimpleNamespace(index=Index(name)), b"") for name in "ab"]
    outcome = outcome_of(tmp_path, 1, write, (str(shard), shard.name, (items, [])))
    if said:
        assert said in outcome.explain()
    else:
        assert outcome.payload == ["__0_0.distcp"]


@pytest.mark.parametrize(
    ("planned", "written", "older", "ran", "said"),
    [
        (True, True, False, True, ""),
        (True, True, True, False, "megatron-core would load it instead"),
        (False, True, True, True, "megatron-core would load it instead"),  # its items are elsewhere
        (False, False, False, True, "there is no common.pt"),
        (False, False, True, True, ""),  # up to megatron-core 0.18
    ],
)
def test_I4_one_common_state_is_written_and_no_other_lies_beside_it(
    tmp_path: Path, planned: bool, written: bool, older: bool, ran: bool, said: str
) -> None:
    """Catches: megatron-core 0.19, which writes no common.pt, refused. A common.pt that an
    interrupted save left in the directory, which a loader takes instead of the newer state in the
    shards."""
    item = SimpleNamespace(index=Index(COMMON_KEY if planned else "w"))
    shard = tmp_path / STAGED / "__0_0.distcp"
    shard.parent.mkdir(parents=True)
    if older:
        (shard.parent / "common.pt").write_bytes(b"of an interrupted save")

    def write(rank: int, buckets: Any, results: Any) -> None:
        shard.write_bytes(b"x")
        where = SimpleNamespace(relative_path=shard.name)
        found = dict.fromkeys([item.index, *[Index(COMMON_KEY)] * written])
        results.put({0: [SimpleNamespace(index=each, storage_data=where) for each in found]})

    outcome = outcome_of(tmp_path, 0, write, (str(shard), shard.name, ([(item, b"")], [])))
    if said:
        assert re.search(said, outcome.explain())
    else:
        assert outcome.payload == ["__0_0.distcp", *["common.pt"] * older]
    assert shard.exists() == ran


def outcome_of(root: Path, rank: int, write: Callable[..., None], bucket: Any) -> Any:
    """The fate of a writer of this rank; its request has one bucket, in ``STAGED``."""
    from ckptfsm.adapters.posix_storage import PosixStorage
    from ckptfsm.megatron.foreign import ForeignPart, stage_request

    request = SimpleNamespace(
        async_fn=write, async_fn_args=[0, [bucket], queue.Queue()], finalize_fns=[]
    )
    part = ForeignPart("state", "", rank, stage_request("state", request))
    storage = PosixStorage(root, create=True)
    work = partial(written_names, part, storage, STAGED)
    outcome = fork_child(work, keep=storage.descriptors()).wait(PATIENCE_S)
    storage.close_root()
    assert outcome is not None
    return outcome


def written_names(part: Any, storage: Any, place: str) -> list[str]:
    """The output of a writer. Only for a child: a writer changes how its process forks."""
    return [file.name for file in part.write(storage, place).files]


def test_a_request_that_misses_a_package_names_the_installed_ones(ranks: Any) -> None:
    """Catches: nvidia-resiliency-ext that is half installed, and an error without the installed
    parts and the remedy."""

    def make() -> Any:
        raise ModuleNotFoundError("A compatible `nvidia-resiliency-ext` installation is required")

    def work(transport: ThreadTransport) -> Any:
        here = Rank(transport)
        here.queue.schedule_async_request(make if here.rank == 1 else partial(here.request, "a"))
        with pytest.raises(
            SaveFailed, match="nvidia-resiliency-ext .*: install what is missing"
        ) as told:
            here.queue.maybe_finalize_async_calls(blocking=True)
        here.queue.schedule_async_request(here.request("b"))
        return "megatron-core" in told.value.message, here.finish(), here.ran

    assert ranks(work) == [(True, [1], results_of("b"))] * 2


def test_install_without_a_holder_says_where_queues_are_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches: an AttributeError of a module that the user did not name; a queue where no trainer
    looks."""
    from ckptfsm.integrations import queue as module

    monkeypatch.setattr(module, "_imported", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"megatron-core \d.*after importing it, or name the holder"
    ):
        module.install()
    with pytest.raises(ConfigError, match="has no attribute 'its_queue'"):
        module.install(None, SimpleNamespace(), "its_queue")
    trainer = SimpleNamespace(_async_calls_queue=None)
    monkeypatch.setattr(module, "_imported", {"megatron.training.async_utils": trainer}.get)
    with module.install() as queue:
        assert trainer._async_calls_queue is queue
    assert trainer._async_calls_queue is None


def test_F5_a_queue_goes_on_while_the_tracker_is_blocked(tmp_path: Path) -> None:
    """Catches: a trainer that stands still in ``schedule_async_request``; a request that was skipped and
    is taken for finalized."""
    from megatron.core import dist_checkpointing

    from ckptfsm.integrations.queue import AsyncCallsQueue
    from ckptfsm.megatron.compat import cpu_devices

    def request(step: int) -> Any:
        directory = tmp_path / f"root/iter_000000{step}"
        directory.mkdir()
        state = Model().sharded_state_dict(step)
        return dist_checkpointing.save(state, str(directory), async_sharded_save=True, **strategy())

    def schedule(step: int) -> None:
        queue.begin(step, f"{tmp_path}/root/iter_000000{step}", ["state"])
        queue.schedule_async_request(partial(request, step))

    tracker = tmp_path / "root" / TRACKER
    queue = AsyncCallsQueue(
        writer_files=1, exit_timeout_s=0.5, on_failure="warn", busy_timeout_s=20.0
    )
    with cpu_devices(), one_rank():
        schedule(1)
        assert queue.maybe_finalize_async_calls(blocking=True) == [0]
        tracker.unlink()
        tracker.mkdir()
        schedule(2)
        with pytest.warns(SaveFailedWarning, match="was skipped: step 2 .*EISDIR"):
            schedule(3)
        assert queue.maybe_finalize_async_calls() == []
        assert queue.get_num_unfinalized_calls() == 1
        tracker.rmdir()
        schedule(4)
        assert queue.maybe_finalize_async_calls(blocking=True) == [1, 3]
        queue.close()
    assert tracker.read_text().strip() == "4"


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Refusing:
    """A manager that refuses its first save."""

    config = CheckpointConfig()

    def __init__(self, root: str) -> None:
        self._storage = SimpleNamespace(root=root)
        self.saved: list[int] = []

    def save(self, step: int, parts: Any) -> Any:
        self.saved.append(step)
        if len(self.saved) == 1:
            raise StepExistsError("made up", step=step, latest=step)
        return SimpleNamespace(done=True, skipped=False, exception=lambda: None)

    def latest_step(self) -> None:
        """Nothing is tracked."""

    def step_in_flight(self) -> None:
        """Nothing is in flight."""

    def wait_until_finished(self) -> None:
        """Nothing is in flight."""


def test_a_refused_checkpoint_is_not_begun_any_more(tmp_path: Path) -> None:
    """Catches: a queue that takes the next checkpoint's parts for those of one that was refused."""
    from ckptfsm.integrations.queue import AsyncCallsQueue

    manager: Any = Refusing(str(tmp_path))
    queue = AsyncCallsQueue(manager=manager)
    queue.begin(1, f"{tmp_path}/iter_0000001", ["state"])
    with pytest.raises(ConfigError, match="was not scheduled"):
        queue.begin(2, f"{tmp_path}/iter_0000002", ["state"])
    with pytest.raises(StepExistsError):
        queue.schedule_async_request(SimpleNamespace())
    queue.begin(2, f"{tmp_path}/iter_0000002", ["state"])
    assert queue.schedule_async_request(SimpleNamespace()) == 1
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    assert manager.saved == [1, 2]


# ----------------------------------------------------------------------------------- Megatron-LM


class Model:
    """Its state is its iteration. ``gate``: writers wait there."""

    def __init__(self, gate: Gate | None = None) -> None:
        self.gate = gate
        self.loaded: dict[str, Any] = {}

    def sharded_state_dict(self, iteration: int) -> dict[str, Any]:
        let_writers_begin_with(self.gate)
        return {**self.template(float(iteration)), "common": iteration}

    def template(self, value: float = 0.0) -> dict[str, Any]:
        import torch
        from megatron.core.dist_checkpointing import ShardedTensor

        return {"w": ShardedTensor.from_rank_offsets("w", torch.full((8,), value))}

    def load(self, state: dict[str, Any], iteration: int) -> None:
        self.loaded = {"w": state["w"].tolist(), "iteration": iteration}


_write_rank = rank_writer.write_rank


def let_writers_begin_with(act: Callable[[], object] | None) -> None:
    """Let writers that are forked from now on do this first."""
    rank_writer.write_rank = _write_rank if act is None else partial(_write_after, act)


def _write_after(act: Callable[[], object], *job: Any, **named: Any) -> list[tuple[str, int, Any]]:
    act()
    return _write_rank(*job, **named)


class Training:
    """A run under the trainer of ``tests/megatron``, with the drop-in."""

    def __init__(self, root: Path) -> None:
        self.root = root
        modules = ("checkpointing", "async_utils", "global_vars")
        for name in modules:
            setattr(self, name, importlib.import_module(f"trainer_lm.{name}"))
        self.args: Any = None
        self.ran: list[str] = self.checkpointing.RAN
        self.ran.clear()

    checkpointing: Any
    async_utils: Any
    global_vars: Any

    @contextlib.contextmanager
    def installed(self, settings: Mapping[str, Any] = {}, **args: Any) -> Iterator[Any]:
        from ckptfsm.integrations.megatron_lm import install
        from ckptfsm.megatron.compat import cpu_devices

        self.args = self.global_vars.set_args(save=str(self.root), load=str(self.root), **args)
        quick = {"exit_timeout_s": 0.5, **settings}
        with cpu_devices(), install("trainer_lm", **quick) as dropin:
            yield dropin

    def save(self, iteration: int, model: Model | None = None, **how: Any) -> None:
        self.checkpointing.save_checkpoint(iteration, model or Model(), None, None, 0, **how)

    def finalize(self, blocking: bool = True) -> None:
        self.async_utils.maybe_finalize_async_save(blocking=blocking)

    def tracked(self, below: str = "") -> str | None:
        tracker = self.root / below / TRACKER
        return tracker.read_text().strip() if tracker.exists() else None

    def iterations(self, below: str = "") -> list[int]:
        return sorted(int(p.name[5:]) for p in (self.root / below).glob("iter_*"))


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "megatron"))
    try:
        with one_rank():
            yield Training(tmp_path / "root")
    finally:
        let_writers_begin_with(None)
        for name in [n for n in sys.modules if n.partition(".")[0] == "trainer_lm"]:
            del sys.modules[name]


REPORTS = ["onelogger", "wandb"]


def test_hooks_hear_of_the_save_directory_alone(training: Training) -> None:
    """Catches: metrics that stay empty under Megatron-LM, or that mix two roots."""
    heard: list[Any] = []
    settings = {"hooks": [heard.append]}
    with training.installed(settings, non_persistent_ckpt_type="global"):
        training.save(2)
        training.finalize()
        training.save(4, non_persistent_ckpt=True)
        training.finalize()
    assert {record.step for record in heard} == {2}
    assert heard[-1].acknowledges


def test_I2_the_tracker_and_the_reports_wait_for_the_writer(training: Training, gate: Gate) -> None:
    """Catches: Megatron-LM's closure that tracks and deletes, run when the save is asked for, or at
    all; reports before the checkpoint is tracked; a step's directory before it is complete."""
    with training.installed():
        training.checkpointing.load_checkpoint(Model(), None, None)
        training.save(2)
        training.finalize()
        training.save(4, Model(gate))
        for _ in range(5):
            training.finalize(blocking=False)
        assert (training.tracked(), training.iterations()) == ("2", [2])
        assert training.ran == [f"{who} 2" for who in REPORTS]
        gate.open(1)
        training.finalize()
        assert (training.tracked(), training.iterations()) == ("4", [2, 4])
    assert training.ran == [f"{who} {iteration}" for iteration in (2, 4) for who in REPORTS]


def test_I2_closures_do_not_run_through_a_second_request(training: Training) -> None:
    """Catches: newer versions hang the closure that tracks onto what they write beside a checkpoint:
    run there, it names an iteration that is not complete."""

    class Distilled(Model):
        def sharded_state_dict(self, iteration: int) -> dict[str, Any]:
            training.checkpointing.schedule_async_save(SimpleNamespace(finalize_fns=[fail]))
            return super().sharded_state_dict(iteration)

    with training.installed():
        with pytest.raises(SaveRefused, match="ConfigError: a request beside the checkpoint"):
            training.save(2, Distilled())
        training.save(2)
        training.finalize()
        assert training.tracked() == "2"


def test_an_engine_without_effect_is_refused():
    """Catches: a trainer that believes its saves to be gated, and never hears that they are not."""
    from ckptfsm.integrations.queue import AsyncCallsQueue

    with pytest.raises(ConfigError, match="engine='eager' has no effect"):
        AsyncCallsQueue(engine="eager")


def test_I7_the_retain_interval_keeps_the_last_and_the_multiples(training: Training) -> None:
    """Catches: a multiple that is deleted, a checkpoint between them that stays for ever."""
    with training.installed(save_retain_interval=4):
        for iteration in (2, 4, 6, 7):
            training.save(iteration)
            training.finalize()
    assert training.iterations() == [4, 7]
    assert training.tracked() == "7"


def test_I2_a_synchronous_save_is_tracked_when_it_returns(training: Training) -> None:
    """Catches: a trainer that goes on, or ends, with a save that it takes for done."""
    with training.installed(async_save=False):
        training.save(2)
        assert training.tracked() == "2"
        assert training.args.async_save is False


@pytest.mark.parametrize("asynchronous", [True, False])
def test_F5_megatron_lm_goes_on_while_the_tracker_is_blocked(
    training: Training, asynchronous: bool
) -> None:
    """Catches: a training that stands still, or ends, for a tracker that cannot be written. A
    report of a skipped save; a step that is not tracked once the disk is mended."""
    settings = {"on_failure": "warn", "busy_timeout_s": 20.0}
    with training.installed(settings=settings, async_save=asynchronous):
        training.save(2)
        training.finalize()
        tracker = training.root / TRACKER
        tracker.unlink()
        tracker.mkdir()
        with pytest.warns(SaveFailedWarning, match="was skipped: step 4 .*EISDIR"):
            training.save(4)
            training.save(6)
            training.finalize(blocking=False)
        assert training.ran == [f"{who} 2" for who in REPORTS]
        tracker.rmdir()
        training.save(8)
        training.finalize()
    assert (training.tracked(), training.iterations()) == ("8", [2, 4, 8])
    assert training.ran == [f"{who} {iteration}" for iteration in (2, 4, 8) for who in REPORTS]


def test_F18_a_torn_tracker_does_not_end_the_run_with_status_0(training: Training) -> None:
    """Catches: stock code that loads before the root was recovered."""
    with training.installed():
        training.save(2)
    (training.root / TRACKER).write_text("")
    model = Model()
    with training.installed():
        assert training.checkpointing.load_checkpoint(model, None, None) == (2, 0)
    assert model.loaded == {"w": [2.0] * 8, "iteration": 2}


def test_I7_the_cleanup_by_names_does_not_run(training: Training) -> None:
    """Catches: the tracked directory deleted for the sake of a newer non-persistent one that is
    partial."""
    place = "non_persistent"
    with training.installed({"engine": "fork"}, non_persistent_ckpt_type="global"):
        training.save(2, non_persistent_ckpt=True)
        training.finalize()
        (training.root / place / "iter_0000009").mkdir()
        with contextlib.suppress(SaveFailed):
            training.save(4, Doomed(), non_persistent_ckpt=True)
            training.finalize()
        assert training.tracked(place) == "2"
        assert 2 in training.iterations(place)


def test_I2_a_failed_save_is_raised_and_not_reported_as_saved(training: Training) -> None:
    """Catches: people who are told of a checkpoint that is not there, a trainer that is not told."""
    with training.installed(settings={"engine": "fork"}):
        training.save(2, Doomed())
        with pytest.raises(WriterDied):
            training.finalize()
        assert (training.ran, training.tracked()) == ([], None)


class Doomed(Model):
    """A model that kills its writer."""

    def sharded_state_dict(self, iteration: int) -> dict[str, Any]:
        state = super().sharded_state_dict(iteration)
        let_writers_begin_with(die)
        return state


def test_the_optimizer_of_a_save_gates_it(training: Training) -> None:
    """Catches: state in host memory that is copied as a whole, although its optimizer can wait; a
    step that does not wait; an optimizer that waits once more after each save."""
    torch = pytest.importorskip("torch")
    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    chained = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=inner)])
    with training.installed() as dropin:
        for iteration in (2, 4):
            training.checkpointing.save_checkpoint(iteration, Model(), chained, None, 0)
            training.finalize()
        calls: list[int] = []
        manager = dropin.checkpoints.open()
        assert manager._engine._gate
        manager.before_update = lambda: calls.append(1)
        inner.step()
        assert calls == [1]
        assert dropin.checkpoints.open(training.root / "other")._engine._gate

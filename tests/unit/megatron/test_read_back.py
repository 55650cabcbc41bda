"""I12: values are loaded back before a save is accepted; the kinds are in the tests of megatron."""

from __future__ import annotations

import collections
import errno
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import torch  # noqa: E402
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedTensor  # noqa: E402

from ckptfsm.core.errors import ClassNotKeptWarning, SaveRefused, StorageError  # noqa: E402
from ckptfsm.dcp.driver import StateDriver  # noqa: E402
from ckptfsm.dcp.state_format import DriverOptions  # noqa: E402
from ckptfsm.megatron.read_back import ReadBack  # noqa: E402
from ckptfsm.megatron.torch_dist import keeps_common_in_shard  # noqa: E402


def test_a_class_that_is_not_kept_is_told_once() -> None:
    """Catches: a Counter that is a dict after a restart, and raises KeyError in the middle of a step."""
    judge = ReadBack(common_in_shard=False)
    values = {
        "seen": collections.Counter("aab"),
        "more": [{"none": collections.defaultdict(list)}],
        "kept": collections.OrderedDict(a=1),
    }
    with pytest.warns(ClassNotKeptWarning) as told:
        judge.check("state", values, {})
    said = [str(each.message) for each in told]
    assert len(said) == 2
    assert "['seen'] is a collections.Counter, and a restore gives a plain dict" in said[0]
    assert "['more'][0]['none'] is a collections.defaultdict" in said[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        judge.check("state", values, {})


def test_I12_a_value_that_the_loader_does_not_take_is_refused() -> None:
    """Catches: a save of values that no start can load."""
    values = {"losses": collections.deque([1.0])}
    with pytest.raises(SaveRefused, match=r"\['losses'\], of type collections.deque,.*list\(x\)"):
        ReadBack(common_in_shard=False).check("state", values, values)


def _layers(rank: int, count: int, **more: Any) -> dict[str, Any]:
    def one(number: int) -> dict[str, Any]:
        return {"w": ShardedTensor.from_rank_offsets(f"{rank}.{number}", torch.ones(1)), **more}

    return {"model": {"layers": [one(number) for number in range(count)]}}


def _merge(*states: dict[str, Any]) -> None:
    drivers = [StateDriver(DriverOptions(rank)) for rank in range(len(states))]
    drafts = zip(drivers, states, strict=True)
    drivers[0].merge([driver.draft({"state": state}).summary for driver, state in drafts])


def test_I12_lists_of_other_lengths_with_plain_values_in_them_are_refused() -> None:
    """Catches: a checkpoint that no start can load: one rank's list of plain values is merged with
    each rank's list of sharded ones, by position."""
    words = "a list of 3 places on rank 1 and a list of 2 places on rank 0.*a list, a dict"
    with pytest.raises(SaveRefused, match=words) as found:
        _merge(_layers(0, 2, n=1), _layers(1, 3, n=1))
    assert (found.value.part, found.value.key) == ("state", "['model']['layers']")
    with pytest.raises(SaveRefused, match="3 places on rank 1"):
        _merge(_layers(0, 2, n=1), _layers(1, 3))


def _shard(key: str = "q") -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.ones(1))


@pytest.mark.parametrize(
    ("first", "other", "words"),
    [
        (5, _shard(), "is a sharded value on rank 1 and a plain value on rank 0"),
        ({}, _shard(), "is a sharded value on rank 1 and a dict on rank 0"),
        (collections.OrderedDict(), _shard(), "is a sharded value on rank 1 and a dict"),
        ([], [_shard()], "is a list of 1 places on rank 1 and a plain value on rank 0"),
        ({"lr": 1}, _shard(), "is a sharded value on rank 1 and a dict on rank 0"),
        ({"lr": 1}, [_shard()], "is a list of 1 places on rank 1 and a dict on rank 0"),
        (5, {"w": _shard()}, "is a dict on rank 1 and a plain value on rank 0"),
        (5, LocalNonpersistentObject(6), "is a value that is not saved on rank 1"),
    ],
)
def test_I12_a_place_of_another_kind_is_refused(first: Any, other: Any, words: str) -> None:
    """Catches: a plain value on the first rank where another one has a sharded value: a checkpoint
    that no start can load."""
    with pytest.raises(SaveRefused, match=words) as found:
        _merge({"a": {"q": first}}, {"a": {"q": other}})
    facts = found.value.part, found.value.key, found.value.facts["ranks"]
    assert facts == ("state", "['a']['q']", (1,))


def test_I12_a_plain_value_that_comes_later_is_refused() -> None:
    """Catches: places that are looked at only as a plan is made, and not when it is used again."""
    ranks = [StateDriver(DriverOptions(0)), StateDriver(DriverOptions(1))]
    for more in ({}, {"q": 5}):
        states = ({"w": _shard("w"), **more}, {"q": _shard()})
        drafts = [driver.draft({"state": s}) for driver, s in zip(ranks, states, strict=True)]
        if more:
            with pytest.raises(SaveRefused, match="a plain value on rank 0"):
                ranks[0].merge([draft.summary for draft in drafts])
        else:
            ranks[0].merge([draft.summary for draft in drafts])
            for driver in ranks:
                driver.accept()


def test_places_that_can_be_loaded_are_not_refused() -> None:
    """Catches: a refusal of the layers of pipeline stages, of which each rank has its own; of plain
    values beside sharded ones, or of those of another rank, which are not kept."""
    _merge({"q": _shard()}, {"q": 5})
    _merge({"q": {"lr": 1}}, {"q": {"w": _shard()}})
    _merge({"q": {"lr": 1, "w": _shard("w")}}, {"q": {"w": LocalNonpersistentObject(1)}})
    _merge(_layers(0, 2), _layers(1, 3))
    _merge(_layers(0, 2, n=1), _layers(1, 2, n=2))
    _merge(_layers(0, 2), _layers(1, 3, n=1))
    _merge(_layers(0, 2, n=1), {"w": ShardedTensor.from_rank_offsets("w", torch.ones(1))})


def test_a_value_is_named_where_it_stands() -> None:
    """Catches: a place that leads nowhere, now that places are put together when they are told."""
    odd = {"runs": [{"a": 1}, {"best": [1.0, collections.deque()]}], (1, 2): "x"}
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(1)), **odd}
    with pytest.raises(SaveRefused, match=r"\['runs'\]\[1\]\['best'\]\[1\]") as caught:
        ReadBack(common_in_shard=False).check("state", state, odd)
    assert "(1, 2)" not in str(caught.value)


@pytest.mark.skipif(keeps_common_in_shard(), reason="its loader takes any class")
def test_I12_a_temporary_directory_that_cannot_be_used_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches: a full or missing temporary directory that is told as the fault of a value."""
    values = {"losses": collections.deque([1.0])}
    judge = ReadBack(common_in_shard=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(StorageError, match="temporary directory.*TMPDIR") as missing:
        judge.check("state", values, values)
    assert missing.value.errno_name == "ENOENT"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch, pytest.raises(StorageError, match="No space left"):
        patch.setattr(Path, "write_bytes", Raises(full))
        judge.check("state", values, values)
    with pytest.raises(SaveRefused, match="collections.deque"):
        judge.check("state", values, values)


class Raises:
    """Stands for a function that fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, *arguments: Any) -> None:
        raise self.error

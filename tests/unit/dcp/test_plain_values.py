"""Digests of plain values: equal for equal values, whatever their pickles look like."""

from __future__ import annotations

import copy
import pickle
import random
from argparse import Namespace
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from enum import Enum
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch

from ckptfsm.dcp.plain_values import digests_of


class Kind(Enum):
    A = 1
    B = 2


@dataclass
class Held:
    number: int
    inner: Any = None


def of(value: Any) -> dict[str, int]:
    return digests_of({"a": value})


def cycle(number: int) -> list[Any]:
    found: list[Any] = [number]
    found.append(found)
    return found


FORMS = [
    torch.Tensor.to_sparse,
    torch.Tensor.to_sparse_csr,
    torch.Tensor.to_sparse_csc,
    partial(torch.Tensor.to_sparse_bsr, blocksize=(1, 1)),
    partial(torch.Tensor.to_sparse_bsc, blocksize=(1, 1)),
    torch.Tensor.to_mkldnn,
    partial(torch.quantize_per_tensor, scale=1.0, zero_point=0, dtype=torch.qint8),
]

VALUES: list[Any] = [
    None,
    5,
    1.5,
    "text \udcff",
    b"bytes",
    [1, [2, (3,)]],
    {1, "b", None},
    Kind.A,
    Held(1, [Held(2)]),
    OrderedDict(a=1),
    defaultdict(list, {1: [2]}),
    partial(max, 1),
    torch.bfloat16,
    torch.relu,
    random.Random(1).getstate(),
    np.arange(3),
    np.float32(2.5),
    torch.arange(6).reshape(2, 3),
    torch.tensor(2.5, dtype=torch.bfloat16),
    torch.ones(3, dtype=torch.complex64).conj(),
    torch.empty(0),
    torch.nn.Parameter(torch.ones(2)),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_copy_has_the_same_digest(value):
    """Catches: a false warning about values that are equal, but not the same objects."""
    twin = copy.deepcopy(value) if isinstance(value, torch.Tensor) else _read_back(value)
    assert of(twin) == of(value)


def _read_back(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def test_shared_objects_order_and_strides_make_no_difference():
    """Catches: a digest of the pickle, which names an object that is met again, and keeps orders."""
    name = "".join(["ab", "c"])
    shared, apart = [name, name], ["abc", "".join(["a", "bc"])]
    assert pickle.dumps(shared) != pickle.dumps(apart) and of(shared) == of(apart)
    assert digests_of({"x": 1, "y": 2}) == digests_of({"y": 2, "x": 1})
    assert of([{"x": 1, "y": 2}]) == of([{"y": 2, "x": 1}])
    numbers = torch.arange(6.0).reshape(2, 3)
    assert of(numbers.t().contiguous().t()) == of(numbers) == of(torch.arange(7.0)[:6].view(2, 3))
    assert of(cycle(1)) == of(cycle(1)) != of(cycle(2))
    assert all(of(make(torch.eye(2))) == of(make(torch.eye(3)[:2, :2])) for make in FORMS)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (1, 2),
        (1, 1.0),
        ("1", b"1"),
        ([1, 2], [2, 1]),
        ([1.0], [1.0, 1.0]),
        (Kind.A, Kind.B),
        (Held(1, [Held(2)]), Held(1, [Held(3)])),
        (np.arange(3), np.arange(3)[::-1]),
        (torch.arange(3), torch.arange(1, 4)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.tensor(1.0), torch.tensor(2.0)),
        *((make(torch.eye(2)), make(2 * torch.eye(2))) for make in FORMS),
        (FORMS[0](torch.eye(2)), FORMS[1](torch.eye(2))),
        (random.Random(1).getstate(), random.Random(2).getstate()),
    ],
)
def test_other_values_have_another_digest(one, two):
    """Catches: a difference that is kept in silence."""
    assert of(one) != of(two)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({1: 0, "1": 0}, {1: 5, "1": 0}),
        ({1: 0, "1": 5}, {1: 5, "1": 0}),
        ({1: 0}, {"1": 0}),
        ({"opt": {"lr": 0}, "opt.lr": 0}, {"opt": {"lr": 5}, "opt.lr": 0}),
        ({"opt": {"lr": 0}}, {"opt.lr": 0}),
    ],
)
def test_values_of_one_name_are_all_compared(one, two):
    """Catches: a value that hides behind another one whose names read the same; an order that
    counts."""
    for names in (one, dict(reversed(one.items()))):
        assert digests_of(names) == digests_of(one) != digests_of(two)


def test_keys_are_names_on_the_way_to_a_value():
    """Catches: a warning that names nothing, or each tensor of an optimizer; containers without a
    value, which megatron-core leaves where only sharded values were."""
    found = digests_of(
        {
            "loader": {"position": 1},
            "optimizer": {"state": {0: {"step": 1, "more": {}}}, "groups": [1]},
            "model": {"layers": {}},
            "args": Namespace(lr=1.0, rank=3, local_rank=1),
        }
    )
    assert sorted(found) == ["args.lr", "loader.position", "optimizer.groups", "optimizer.state.0"]


def test_a_value_that_cannot_be_pickled_is_left_to_the_writer():
    """Catches: a save that is refused because its values cannot be compared."""
    assert of(Lock()) == of(Lock())
    assert of([Lock(), 1])
    assert of(torch.zeros(2, device="meta")) == of(torch.zeros(2, device="meta"))


def test_arrays_are_compared_by_their_values() -> None:
    """Catches: an array that differs by the order of its bytes in memory alone, or not by its values."""
    array = np.arange(6.0).reshape(2, 3)
    assert of(array) == of(np.asfortranarray(array)) == of(array[:])
    others = [array + 1, array.reshape(3, 2), array.astype(np.float32)]
    assert all(of(other) != of(array) for other in others)

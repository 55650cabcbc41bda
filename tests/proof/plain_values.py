"""The property of plain values (I12): what a save accepts comes back equal, here and in a new process.

Values are of the kinds that trainers have in their states, those included that no loader takes. All that
are accepted one by one are saved in one state, as plain values or as objects.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import decimal
import hashlib
import itertools
import logging
import math
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import given, note
from hypothesis import strategies as st

_TESTS = Path(__file__).parents[1]
_NOTE = "restored"
Window = collections.namedtuple("Window", "first last")


@dataclasses.dataclass
class Progress:
    """A trainer's own class."""

    epoch: int = 3


def _numbers() -> Any:
    import numpy as np

    floats = st.floats(allow_nan=False, width=32)
    return st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.just(1 << 3000),
        floats,
        st.complex_numbers(allow_nan=False),
        floats.map(np.float64),
        floats.map(np.float32),
        st.integers(0, 99).map(np.int64),
        st.booleans().map(np.bool_),
    )


def _others() -> Any:
    import numpy as np
    import torch

    arrays = st.sampled_from(("uint8", "uint32", "int64", "float32", "float64", "bool", "U3"))
    tensors = st.sampled_from((torch.float32, torch.bfloat16, torch.int64, torch.bool))
    return st.one_of(
        st.text(max_size=5),
        st.binary(max_size=5),
        st.binary(max_size=5).map(bytearray),
        arrays.map(lambda kind: np.ones(2).astype(kind)),
        st.just(np.random.RandomState(1).get_state()),
        st.just(random.Random(1).getstate()),
        tensors.map(lambda kind: torch.arange(4).reshape(2, 2).to(kind).t()),
        st.just(torch.nn.Parameter(torch.ones(2))),
        st.just(torch.eye(2).to_sparse()),
        st.just(torch.empty(2, device="meta")),
        st.just(torch.Generator()),
        st.sampled_from((torch.float16, torch.device("cpu"), torch.Size([2]), torch.strided)),
        st.datetimes(),
        st.timedeltas(),
        st.just(decimal.Decimal("1.5")),
        st.just(pathlib.PosixPath("a/b")),
        st.just(argparse.Namespace(lr=0.5, seed=1)),
        st.just(argparse.Namespace(lr=np.float64(0.5))),
        st.just(SimpleNamespace(lr=0.5)),
        st.just(Progress()),
        st.just(Window(1, 2)),
        st.sampled_from((len, math.sqrt, Progress, lambda: 1)),
        st.just(range(3)),
        st.just(slice(1, 2)),
    )


def _within(values: Any) -> Any:
    keys = st.one_of(st.text(max_size=3), st.integers(0, 9), st.tuples(st.integers(0, 9)))
    few = st.lists(values, max_size=3)
    return st.one_of(
        few,
        few.map(tuple),
        few.map(lambda some: collections.deque(some, maxlen=9)),
        st.dictionaries(keys, values, max_size=3),
        st.dictionaries(keys, values, max_size=3).map(collections.OrderedDict),
        st.dictionaries(keys, values, max_size=3).map(
            lambda some: collections.defaultdict(int, some)
        ),
        st.sets(st.integers(0, 9), max_size=3),
        st.frozensets(st.integers(0, 9), max_size=3),
        st.text(max_size=3).map(collections.Counter),
    )


def values() -> Any:
    """Values of a trainer's state."""
    return st.recursive(st.one_of(_numbers(), _others()), _within, max_leaves=5)


def same(one: Any, other: Any) -> bool:
    """True if two values are equal, with their types; a dict of any kind is one that was loaded."""
    import numpy as np
    import torch

    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype is other.dtype
            and torch.equal(one.to_dense(), other.to_dense())
        )
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, torch.Generator):
        return same(one.get_state(), other.get_state())
    if isinstance(one, dict):
        return isinstance(other, dict) and same(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple, collections.deque)):
        plain = isinstance(one, torch.Size) and type(other) is tuple  # which is equal
        return (
            (plain or type(one) is type(other))
            and len(one) == len(other)
            and all(same(a, b) for a, b in zip(one, other, strict=True))
        )
    if hasattr(one, "__dict__") and not callable(one):
        return type(one) is type(other) and same(vars(one), vars(other))
    return type(one) is type(other) and bool(one == other)


def state_of(plain: list[Any], objects: list[Any]) -> dict[str, Any]:
    """A state with plain values and with objects."""
    import torch
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.ones(2)),
        "plain": {f"p{n}": each for n, each in enumerate(plain)},
        "objects": {
            f"o{n}": ShardedObject(f"o{n}", each, (1,), (0,)) for n, each in enumerate(objects)
        },
    }


def is_accepted(driver: Any, state: Any) -> bool:
    from ckptfsm.core.errors import SaveRefused

    try:
        driver.draft({"state": state})
    except SaveRefused as refused:
        note(str(refused))
        return False
    return True


def loaded(root: str, plain: int, objects: int) -> list[Any]:
    """The values of the newest checkpoint of a root, plain ones first."""
    from ckptfsm import CheckpointManager

    with CheckpointManager(root, engine="fork") as ckpts:
        restored = ckpts.restore(state_of([None] * plain, [None] * objects))
    assert restored is not None
    state = restored.state
    return [
        *(state["plain"][f"p{n}"] for n in range(plain)),
        *(state["objects"][f"o{n}"] for n in range(objects)),
    ]


def digest_of(some: list[Any]) -> str:
    """The digest of the values as text, without addresses in memory."""
    return hashlib.sha256(re.sub("0x[0-9a-f]+", "", repr(some)).encode()).hexdigest()


def check_plain_values(settings: Any) -> None:
    """Save what is accepted, and restore it in this process; then all of it in a new process."""
    from ckptfsm.dcp.driver import StateDriver
    from ckptfsm.dcp.state_format import DriverOptions
    from ckptfsm.megatron.compat import process_group

    logging.getLogger("ckptfsm").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as place:
        roots = (f"{place}/{number}" for number in itertools.count())

        @settings
        @given(st.lists(values(), min_size=8, max_size=24))
        def property_of(some: list[Any]) -> None:
            driver = StateDriver(DriverOptions(0))
            with process_group():
                plain = [each for each in some if is_accepted(driver, state_of([each], []))]
                objects = [each for each in some if is_accepted(driver, state_of([], [each]))]
            _save_and_restore(next(roots), plain, objects)

        property_of()
        new = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "proof.plain_values", place],
            env={**os.environ, "PYTHONPATH": str(_TESTS)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert new.returncode == 0, f"I12: in a new process: {new.stderr[-2000:]}"


def _save_and_restore(root: str, plain: list[Any], objects: list[Any]) -> None:
    from ckptfsm import CheckpointManager

    with CheckpointManager(root, engine="fork") as ckpts:
        ckpts.save(1, state_of(plain, objects)).wait()
    found = loaded(root, len(plain), len(objects))
    for one, other in zip([*plain, *objects], found, strict=True):
        assert same(one, other), f"I12: {one!r} came back as {other!r}"
    (Path(root) / _NOTE).write_text(f"{len(plain)} {len(objects)} {digest_of(found)}")


def main() -> None:
    """Restore every root below a directory, and compare it with what its writer has restored."""
    for root in Path(sys.argv[1]).iterdir():
        plain, objects, digest = (root / _NOTE).read_text().split()
        assert digest_of(loaded(str(root), int(plain), int(objects))) == digest, root


if __name__ == "__main__":
    main()

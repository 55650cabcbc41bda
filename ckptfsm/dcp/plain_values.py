"""Digests of the plain values of a state, by which ranks compare what they give.

The first rank of a part writes its plain values for all ranks, so they have to be the same. They are
compared in a normal form: two values that are equal have one digest, also if they share objects, or
have keys in another order. The pickles of such values differ.
"""

from __future__ import annotations

import copyreg
from argparse import Namespace
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, cast

import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor

_LEVELS = 3  # of names in a key: more would make a key of each tensor of an optimizer
_PLACES = ("rank", "local_rank")  # of a trainer's arguments: they say which process this is
_SCALARS = (type(None), bool, int, float, complex, str, bytes)


def digests_of(values: Any, most_bytes: int | None = None) -> dict[str, int]:
    """The digest of each value of a nested dict, by its names with dots between them.

    Local, and changes nothing. A value that cannot be pickled is compared by its type alone. Tensors
    of more than ``most_bytes``, or on a device, are compared by their form, if that is given.
    """
    form = _NormalForm(most_bytes)
    found: dict[str, int] = {}
    for keys, value in _named(values, (), _LEVELS):
        name = ".".join(map(str, keys))
        whole = f"{form.digest(keys)} {form.digest(value)}".encode()
        # a sum, because values of one name come in any order: {1: x, "1": y}
        found[name] = (found.get(name, 0) + xxhash.xxh3_64_intdigest(whole)) % 2**64
    return found


def _named(value: Any, keys: tuple[Any, ...], levels: int) -> Iterator[tuple[Any, Any]]:
    inner = _inner(value)
    if inner is None or (levels == 0 and inner):
        yield keys, value
        return
    for key, each in inner.items():
        yield from _named(each, (*keys, key), levels - 1)


def _inner(value: Any) -> Mapping[Any, Any] | None:
    """The named values inside; None if ``value`` is one itself. A container without any is none."""
    if type(value) is Namespace:
        return {name: each for name, each in vars(value).items() if name not in _PLACES}
    return value if isinstance(value, dict) else None


class _NormalForm:
    """Digests of values of any type. Objects are taken apart as pickle does it."""

    def __init__(self, most_bytes: int | None) -> None:
        self._most_bytes = most_bytes
        self._known: dict[int, bytes] = {}
        self._kept: list[Any] = []  # so that no number of an object in ``_known`` is used again

    def digest(self, value: Any) -> int:
        try:
            form = self._of(value)
        except Exception:  # whoever writes the value says what is wrong with it
            form = _name_of(type(value))
        return xxhash.xxh3_64_intdigest(form)

    def _of(self, value: Any) -> bytes:
        kind = type(value)
        if kind in (bytes, bytearray):
            return kind.__name__.encode() + xxhash.xxh3_128_digest(value)
        if kind in _SCALARS:
            return f"{kind.__name__} {value!r}".encode("utf-8", "surrogatepass")
        known = self._known.get(id(value))
        if known is None:
            self._known[id(value)] = b"inside itself"
            self._kept.append(value)
            known = self._known[id(value)] = xxhash.xxh3_128_digest(self._made(value))
        return known

    def _made(self, value: Any) -> bytes:
        kind = type(value)
        if kind is dict or kind is Namespace:
            return b"dict" + self._pairs((_inner(value) or {}).items())
        if kind in (list, tuple):
            return _joined(kind.__name__.encode(), [self._of(each) for each in value])
        if kind in (set, frozenset):
            return _joined(b"set", sorted(self._of(each) for each in value))
        if isinstance(value, torch.Tensor):
            return _tensor(value) if self._is_read(value) else _form_of(value)
        if kind is np.ndarray and not value.dtype.hasobject:
            return _array(value)
        if isinstance(value, (type, FunctionType, BuiltinFunctionType, ModuleType)):
            return _name_of(value)
        return self._taken_apart(value)

    def _is_read(self, tensor: torch.Tensor) -> bool:
        most = self._most_bytes
        return most is None or (
            tensor.device.type == "cpu" and tensor.numel() * tensor.itemsize <= most
        )

    def _pairs(self, items: Any) -> bytes:
        return _joined(b"", sorted(_joined(b"", [self._of(k), self._of(v)]) for k, v in items))

    def _taken_apart(self, value: Any) -> bytes:
        reduce = copyreg.dispatch_table.get(type(value))
        found = reduce(value) if reduce is not None else value.__reduce_ex__(4)
        if isinstance(found, str):
            return f"{_name_of(type(value))!r} {found}".encode()
        make, arguments, state, items, pairs = (*found, None, None, None)[:5]
        return _joined(
            b"object",
            [
                self._of(make),
                self._of(arguments),
                self._of(state),
                self._of(list(items or ())),
                self._pairs(pairs or ()),
            ],
        )


def _joined(kind: bytes, forms: list[bytes]) -> bytes:
    return b"%s(%s)" % (kind, b"".join(b"%d:%s" % (len(form), form) for form in forms))


_INSIDE = {
    torch.sparse_coo: ("indices", "values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
    torch._mkldnn: ("to_dense",),  # type: ignore[attr-defined]
}
"""Methods of tensors whose values are not their bytes, by layout. They give the values."""


def _tensor(value: torch.Tensor) -> bytes:
    """The type, the shape and the values of a tensor; without these if they are not in its memory."""
    form = _form_of(value)
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return form
    plain = value.detach()
    if plain.layout in _INSIDE:
        plain = plain.coalesce() if plain.layout is torch.sparse_coo else plain
        inside = [_tensor(getattr(plain, name)()) for name in _INSIDE[plain.layout]]
        return _joined(form + str(plain.layout).encode(), inside)
    if plain.is_quantized:
        return _joined(form, [_tensor(plain.int_repr()), _tensor(plain.dequantize())])
    if value.numel() == 1:  # an optimizer has many of them
        return form + repr(value.item()).encode()
    plain = plain.resolve_conj().resolve_neg().cpu().contiguous()
    return form + xxhash.xxh3_128_digest(cast(Any, plain.reshape(-1).view(torch.uint8).numpy()))


def _form_of(value: torch.Tensor) -> bytes:
    form = f"tensor {value.dtype} {tuple(value.shape)} "
    if isinstance(value, DTensor) and not all(each.is_replicate() for each in value.placements):
        form += f"at {value.device_mesh.get_coordinate()} "  # each rank has other values
    return form.encode()


def _array(value: np.ndarray) -> bytes:
    """The type, the shape and the bytes of an array, in the order of its places."""
    form = f"array {value.dtype.descr} {value.shape} ".encode()
    plain = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return form + xxhash.xxh3_128_digest(cast(Any, plain))


def _name_of(named: Any) -> bytes:
    return f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', named)}".encode()

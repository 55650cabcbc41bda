"""Parts that are one file of ``torch.save``, whose data the writer reads behind the training.

Torch pickles the object with ``skip_data`` and says which storage each record is of. So literals and
the tensors' memory make up the file, byte for byte as ``torch.save`` would write it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from ckptfsm.adapters.notices import say
from ckptfsm.core.errors import ConfigError, RestoreFailed, SaveRefused, describe
from ckptfsm.core.formats import FILE
from ckptfsm.core.images import SMALL_BYTES, Copied, Memory, image_of
from ckptfsm.core.layout import join
from ckptfsm.core.parts import Planned
from ckptfsm.core.ports import Finalizer
from ckptfsm.dcp.blobs import DATA, Template, Templates, template_of
from ckptfsm.dcp.images import Bucket, Held, counts_steps, data_of, to_host
from ckptfsm.dcp.plain_values import digests_of
from ckptfsm.dcp.read_back import PathInState, StateReadBack, reason_of
from ckptfsm.dcp.state_format import Staging
from ckptfsm.writers.image import ImagePart
from ckptfsm.writers.plain_files import PlainFile

log = logging.getLogger("ckptfsm")


@dataclass(frozen=True, slots=True)
class TorchFile(PlainFile):
    """A part that is the file of ``torch.save(obj, name)``. Its name is the part's: ``model.pt``.

    ``obj`` is anything that ``torch.save`` takes. The first rank that gives the part writes it. For a
    file of each rank, give each a name of its own, and None on the other ranks. ``restore`` takes
    ``TorchFile(None)`` in its place, and returns what ``torch.load`` gives.

    ``weights_only`` and ``map_location`` are those of ``torch.load``. A save refuses an object that
    could not be loaded again with this ``weights_only``: give False if you trust the file.
    """

    obj: Any
    weights_only: bool | None = None
    map_location: Any = "cpu"

    def __reduce__(self) -> tuple[Any, ...]:
        raise ConfigError("a TorchFile is a part, and has no place in a state: give it in parts=")


@dataclass(slots=True)
class _Storage:
    """A storage that has a record, and the tensors that were pickled on the way to it."""

    storage: torch.UntypedStorage
    tensors: list[torch.Tensor] = field(default_factory=list)

    @property
    def whole(self) -> torch.Tensor | None:
        """A flat view of all of it, whose changes torch counts as those of a tensor of the trainer.

        None if no tensor has such a view.
        """
        size = self.storage.nbytes()
        for tensor in self.tensors:
            if _is_of(tensor, self.storage) and size % tensor.itemsize == 0:
                return tensor.detach().as_strided((size // tensor.itemsize,), (1,), 0)
        return None

    def data(self, name: str, held: Held) -> Memory | Copied:
        """Its data as a piece of the file ``name``."""
        whole = self.whole
        if whole is None:  # such as a storage without a tensor: torch counts no change of it
            return Copied(self.copied())
        slot = held.device.slot_for(whole) if held.device is not None else None
        host = to_host(whole) if slot is None else slot
        called = f"{name}: a tensor of {whole.dtype} with the shape {list(self.tensors[0].shape)}"
        data = data_of(called, whole, host, held, copying=slot is not None)
        read_later = data.mutable and not data.early
        for each in self.tensors:
            if read_later or isinstance(each, DTensor) or counts_steps(each):
                held.watch(called, each, whole)
        return data

    def copied(self) -> bytes:
        size = self.storage.nbytes()
        host = self.storage.cpu()
        return ctypes.string_at(host.data_ptr(), size)


def _has_shape(tensor: torch.Tensor) -> bool:
    """True for a tensor that can be asked for its shape. One of local shards consists of others."""
    if hasattr(tensor, "local_shards"):
        return False
    lazy = torch.nn.parameter.is_lazy(tensor)
    return tensor.layout is torch.strided and not tensor.is_nested and not lazy


def _is_of(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """True for a tensor whose values are bytes of ``storage``."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.untyped_storage()._cdata == storage._cdata
    )


@dataclass(slots=True)
class _Numbering:
    """Learns from torch which storage has which record."""

    storages: dict[str, _Storage] = field(default_factory=dict)
    _tensors: list[torch.Tensor] = field(default_factory=list)

    def pickling(self, pickled: contextlib.ExitStack) -> Any:
        """A module that stands for ``pickle`` in ``torch.save``, which writes no data meanwhile.

        ``pickled`` ends that. It begins only behind the pickle: an object may call ``torch.save``
        for its own bytes.
        """
        attributes = {"numbering": self, "pickled": pickled}
        return SimpleNamespace(
            Pickler=type("Pickler", (_NumberingPickler,), attributes), __name__="pickle"
        )

    def met(self, tensor: torch.Tensor) -> None:
        self._tensors.append(tensor)

    def numbered(self, storage: Any, number: str) -> None:
        untyped = storage._untyped_storage if hasattr(storage, "_untyped_storage") else storage
        found = self.storages.setdefault(number, _Storage(untyped))
        found.tensors += self._tensors
        self._tensors = []

    def forget(self) -> None:
        """Let go of the state: the pickler's class lives until the next collection of garbage."""
        self.storages, self._tensors = {}, []


class _NumberingPickler(pickle.Pickler):
    """The pickler of ``torch.save``, and tells a ``numbering`` of what it meets."""

    numbering: _Numbering
    pickled: contextlib.ExitStack
    torchs_id: Callable[..., Any]

    def __init_subclass__(cls) -> None:
        torchs = cls.__dict__.get("persistent_id")  # numbers the storages
        if torchs is not None:
            # A plain function: with any other callable, the pickler would refer to itself, and live on.
            cls.torchs_id, cls.persistent_id = torchs, _numbered  # type: ignore[assignment, method-assign]

    def dump(self, value: Any) -> None:
        super().dump(value)
        self.pickled.enter_context(torch.serialization.skip_data())

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and _has_shape(value):
            self.numbering.met(value)
        return NotImplemented


def _numbered(self: _NumberingPickler, value: Any) -> Any:
    found = self.torchs_id(value)
    if found is not None:
        self.numbering.numbered(value, found[2])
    return found


@dataclass(slots=True)
class TorchFilePlan:
    """A planned file, see ``PartPlan``."""

    part: str
    template: Template
    storages: list[_Storage] = field(default_factory=list)
    obj: Any = None

    summary = None
    in_place = False

    @property
    def expected_bytes(self) -> int:
        return self.template.size

    def digests(self) -> Mapping[str, int]:
        """Those of the plain values and small tensors. Of the others, only the form is compared."""
        return digests_of(self.obj, SMALL_BYTES)

    def buckets(self, rank: int, planned: Planned) -> Sequence[Bucket]:
        """The tensors that an accelerator's copies may be made of. They belong to no item of DCP."""
        wholes = (each.whole for each in self.storages)
        return [[(cast(WriteItem, None), whole) for whole in wholes if whole is not None]]

    def stage(self, staging: Staging) -> ImagePart:
        spec, held = staging.spec, staging.held
        data = [each.data(spec.name, held) for each in self.storages]
        image = image_of(join(spec.directory, spec.name), self.template.pieces(data))
        owner = tuple(held.copies)
        return ImagePart(spec.name, spec.directory, (image,), owner=owner, copying=held.device)

    def let_go(self) -> None:
        self.storages, self.obj = [], None

    def finalizers(self) -> list[Finalizer]:
        return []


class TorchFiles:
    """The format of a ``TorchFile``, see ``SavedFormat``."""

    format = FILE

    def __init__(self, templates: Templates) -> None:
        self._templates = templates
        self._read_back = StateReadBack(_no_misfit)

    def takes(self, value: Any) -> bool:
        return isinstance(value, TorchFile)

    def directory(self, value: Any, usual: str) -> str:
        return ""

    def plan(self, part: str, value: TorchFile) -> TorchFilePlan:
        if value.weights_only is not False:  # else any class may be loaded
            leaf = (PathInState(None, "obj", "{}"), value.obj)
            self._read_back.check_leaves(part, [leaf], value.obj, _load_by_default)
        self._templates.look()
        if self._templates.trusts(TorchFile, _probe):
            try:
                return _planned(part, value.obj)
            except Exception as error:  # no template of this object, or torch cannot save it at all
                why = describe(error)
                said = f"part {part!r} is copied by torch.save, which takes longer: {why}"
                say(log.info, "torch_file_copied", said, reason=why)
        try:
            with _saved(part, value.obj) as file:
                return TorchFilePlan(part, Template(file.read(), ()), obj=value.obj)
        except Exception as error:  # whatever a class raises when it is pickled
            raise SaveRefused(
                f"part {part!r}: torch.save cannot save its object: {describe(error)}", part=part
            ) from error


def _no_misfit(value: Any) -> str:
    """See ``read_back.misfit``: the file of a rank may have this rank's part of a tensor."""
    return ""


def _load_by_default(file: IO[bytes]) -> Any:
    return torch.load(file, map_location="cpu")


def load_torch_file(name: str, value: TorchFile, directory: str) -> Any:
    """What ``torch.load`` gives of a part's file. Raises ``RestoreFailed`` if it refuses the file."""
    path = Path(directory, name)
    try:
        return torch.load(path, map_location=value.map_location, weights_only=value.weights_only)
    except Exception as error:  # whatever a class raises when it is loaded
        way = _WAY_OF_ANY
        if isinstance(error, pickle.UnpicklingError) and value.weights_only is not False:
            way = _WAY_OF_CLASS
        raise RestoreFailed(
            f"part {name!r}: torch.load cannot load its file, as {reason_of(error)}: {way}. Nothing was "
            "changed",
            part=name,
            file=str(path),
        ) from error


_WAY_OF_ANY = f'for its bytes, give b"" in the place of the {TorchFile.__name__}'
_WAY_OF_CLASS = (
    "if you trust the file, give TorchFile(None, weights_only=False), or call "
    f"torch.serialization.add_safe_globals first; {_WAY_OF_ANY}"
)


def _planned(name: str, value: Any) -> TorchFilePlan:
    """A file from its template. Raises anything if torch surprises."""
    numbering = _Numbering()
    try:
        with (
            contextlib.ExitStack() as pickled,
            _saved(name, value, numbering.pickling(pickled)) as file,
        ):
            template = template_of(file)
        storages = [numbering.storages[each.name.removeprefix(DATA)] for each in template.records]
    finally:
        numbering.forget()
    for each, record in zip(storages, template.records, strict=True):
        if each.storage.nbytes() != record.size or each.storage.device.type == "meta":
            raise ValueError(f"record {record.name} has {record.size} bytes of {each.storage}")
    return TorchFilePlan(name, template, storages, value)


def _probe() -> None:
    """Compare template and ``torch.save`` for a small object. Raises ``ValueError`` if they differ."""
    whole = torch.arange(6, dtype=torch.float32)
    value = {
        "whole": whole,
        "view": whole[2:4],
        "other": torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
        "empty": torch.empty(0),
        "plain": [1, "two"],
    }
    plan = _planned("probe.pt", value)
    with _saved("probe.pt", value) as file:
        if plan.template.filled([each.copied() for each in plan.storages]) != file.read():
            raise ValueError("the template of an object is not what torch.save writes")


@contextlib.contextmanager
def _saved(name: str, value: Any, pickling: Any = pickle) -> Iterator[IO[bytes]]:
    """The file of ``torch.save(value, name)``, in memory: torch names its records after the file."""
    with (
        os.fdopen(os.memfd_create("ckptfsm", os.MFD_CLOEXEC), "rb") as file,
        tempfile.TemporaryDirectory(prefix="ckptfsm-") as place,
    ):
        path = Path(place, name)
        path.symlink_to(f"/proc/self/fd/{file.fileno()}")
        torch.save(value, path, pickle_module=pickling)
        yield file

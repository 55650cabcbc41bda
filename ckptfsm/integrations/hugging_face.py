"""A job that exports each checkpoint for Hugging Face: ``ckptfsm.integrations.hugging_face:export``.

A part in DCP's format is read without a process group, one tensor at a time, and becomes safetensors
files. A part of Megatron-Bridge is exported by Bridge's own code. The directory gets its name by one
rename, when everything in it is durable.

An error ends the process with a line that names file or part and what to do: the line is the reason of
the job's attempt.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ckptfsm.adapters.posix_storage import PosixStorage, opened_storage
from ckptfsm.core.documents import FileName, Manifest, first_problem
from ckptfsm.core.errors import (
    CkptFsmError,
    ConfigError,
    DamagedRoot,
    NoRoom,
    PlaceInUse,
    RestoreFailed,
    StepNotFoundError,
    describe,
)
from ckptfsm.core.formats import Format, stock_format
from ckptfsm.core.layout import JOURNAL, join
from ckptfsm.core.ports import Storage
from ckptfsm.core.units import bytes_text
from ckptfsm.dcp.loading import METADATA, read_tensor, stored_in
from ckptfsm.dcp.safetensors import NamedTensor, has_name, write_model
from ckptfsm.disk.durable import (
    TEMPORARY,
    content_is,
    fsync_tree_dirs,
    fsync_tree_files,
    lookup,
    move,
    walk_files,
    write_new,
)
from ckptfsm.disk.inspection import Commit, check_digests, check_sizes, read_commit
from ckptfsm.disk.trash import remove_empty, remove_marker

VARIABLE = "CKPTFSM_HF_"
MARK = "ckptfsm.json"
"""In an export: the checkpoint that it is of, and the settings."""
_LOCK = ".ckptfsm-export.lock"
_UNFINISHED = f"{TEMPORARY}export"
_CONFIG = "config.json"
_RUN_CONFIG = "run_config.yaml"  # of Megatron-Bridge
_BESIDE = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")  # never weights


class HuggingFaceSettings(BaseModel):
    """What is exported, and where to. Each is a variable of the job: ``to`` is ``CKPTFSM_HF_TO``.

    - ``to``: the directory that gets ``step_0000100``. Each run needs one of its own.
    - ``model``: a directory with ``config.json``. It is copied, as are the files of the tokenizer.
    - ``part``: the part with the model; may be left out if no other part has tensors. Or a directory in
      the checkpoint that DCP wrote, such as Accelerate's ``pytorch_model_fsdp_0``.
    - ``prefix``: what the names of the model's tensors begin with, and is left out of them.
    - ``dtype``: of all values of 16 bits and more that are floats; by default each keeps its own.
    - ``file_mb``: megabytes of a file. A larger tensor has a file of its own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    to: Annotated[str, Field(min_length=1)]
    model: Annotated[str, Field(min_length=1)]
    part: FileName | Literal[""] = ""
    prefix: str = "model."
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    file_mb: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 5000.0


def export(path: str, step: int, metrics: Mapping[str, float]) -> None:
    """Export the checkpoint at ``path`` into ``step_0000100`` below ``CKPTFSM_HF_TO``.

    The command of a ``Job``, whose environment has the settings. The process ends with status 1 and the
    reason unless the export is there.
    """
    try:
        said = export_checkpoint(Path(path), step, settings_of(os.environ))
    except CkptFsmError as error:
        sys.exit(f"{error}")
    except OSError as error:
        sys.exit(describe(error))
    sys.stdout.write(f"{said}\n")


def settings_of(environment: Mapping[str, str]) -> HuggingFaceSettings:
    """The settings in the variables. Raises ``ConfigError``, also for one that does not exist."""
    given = {
        name.removeprefix(VARIABLE).lower(): value
        for name, value in environment.items()
        if name.startswith(VARIABLE)
    }
    try:
        return HuggingFaceSettings.model_validate(given)
    except ValidationError as error:
        said = f"the variables {VARIABLE}*: {first_problem(error)}"
        raise ConfigError(said, key="environment") from error


def export_checkpoint(path: Path, step: int, settings: HuggingFaceSettings) -> str:
    """Export a published directory. Returns what was done, also if it had been done before.

    Raises ``ConfigError`` for settings that do not fit the checkpoint, ``NoRoom``, and ``OSError``.
    ``PlaceInUse``: the name has the export of another checkpoint, or another process exports.
    ``DamagedRoot``: a file is not as it was written. ``RestoreFailed``: a tensor cannot be read.
    ``StepNotFoundError``: the checkpoint has left meanwhile.
    """
    beside = _files_beside(Path(settings.model))
    _refuse_roots(settings.to)
    with ExitStack() as stack:
        root = stack.enter_context(opened_storage(path.parent))
        place = PosixStorage(settings.to)
        stack.callback(place.close_root)
        stack.enter_context(_alone(place))
        commit = read_commit(root, path.name)
        part = _part_of(path, commit.manifest if commit else None, settings.part)
        identity = _identity(root, part, commit)
        name, mark = f"step_{step:07d}", _mark(step, commit, identity, settings)
        if lookup(place, name) is not None:
            if content_is(place, f"{name}/{MARK}", mark):
                return f"{place.root}/{name} is there already"
            raise PlaceInUse(
                f"{place.root}/{name} is the export of another checkpoint, or with other settings: "
                f"move it away, or name another directory in {VARIABLE}TO",
                place=place.root,
                object=name,
            )
        with _finished_as(place, name) as directory:
            if part.format.common:
                _by_bridge(part, root, commit, place, directory, settings)
            else:
                _by_dcp(part, root, commit, place, directory, settings)
            for file in beside:
                if lookup(place, f"{directory}/{file.name}") is None:  # Bridge writes its own
                    write_new(place, f"{directory}/{file.name}", file.read_bytes())
            write_new(place, f"{directory}/{MARK}", mark)
            if _identity(root, part, read_commit(root, path.name)) != identity:
                said = f"step {step} is no longer at {path}: it was saved again, or taken away"
                raise StepNotFoundError(said, step=step, file=str(path))
        return f"exported to {place.root}/{name}"


# ------------------------------------------------------------------------------- from where, and to


@dataclass(frozen=True, slots=True)
class ExportedPart:
    """A part on disk: ``inner`` is its directory relative to that of the step."""

    name: str
    step_path: Path
    inner: str
    format: Format

    @property
    def directory(self) -> Path:
        return self.step_path / self.inner


def _part_of(path: Path, manifest: Manifest | None, wanted: str) -> ExportedPart:
    specs = [part.spec() for part in manifest.parts] if manifest else []
    sharded = {each.name: each for each in specs if each.format.sharded}
    if not wanted and len(sharded) == 1:
        [wanted] = sharded
    spec = sharded.get(wanted)
    inner = spec.directory if spec else wanted
    metadata = path / inner / METADATA
    if metadata.is_file() and (wanted or not sharded):
        found = spec.format if spec else stock_format(os.listdir(metadata.parent))
        return ExportedPart(wanted or path.name, path, inner, found)
    there = ", ".join(f"{each.name!r} ({each.kind})" for each in specs) or "no manifest"
    said = f"no part {wanted!r} with tensors" if wanted else f"{len(sharded)} parts with tensors"
    raise ConfigError(
        f"{path} has {said}; it has {there}: name the part, or the directory in it that has a "
        f"{METADATA}, in {VARIABLE}PART",
        key=f"{VARIABLE}PART",
        part=wanted,
        file=str(metadata),
    )


def _files_beside(model: Path) -> list[Path]:
    """``config.json``, and the other small files that a loader looks for. Links are followed."""
    if not (model / _CONFIG).is_file():
        raise ConfigError(
            f"there is no {_CONFIG} in {model}: name a directory to which the model's configuration "
            f"was saved, in {VARIABLE}MODEL",
            key=f"{VARIABLE}MODEL",
            file=str(model / _CONFIG),
        )
    return [
        file
        for file in sorted(model.iterdir())
        if file.suffix in _BESIDE and not file.name.endswith(".index.json")
        if file.name != MARK and file.is_file()
    ]


def _refuse_roots(to: str) -> None:
    there = Path(os.path.realpath(to))
    for directory in (there, *there.parents):
        if (directory / JOURNAL).exists():
            raise ConfigError(
                f"{to} lies in {directory}, the root of a job: name another directory in {VARIABLE}TO",
                key=f"{VARIABLE}TO",
                file=to,
            )


def _mark(step: int, commit: Commit | None, identity: str, settings: HuggingFaceSettings) -> bytes:
    attempt = str(commit.manifest.of) if commit is not None else ""
    said = {"step": step, "attempt": attempt, "checkpoint": identity}
    said["settings"] = settings.model_dump(exclude={"to"})
    return json.dumps(said).encode()


def _identity(root: Storage, part: ExportedPart, commit: Commit | None) -> str:
    """What tells this checkpoint from others: of an adopted one, the digest of all its files."""
    if commit is not None:
        return commit.crc
    directory = join(part.step_path.name, part.inner)
    names = sorted(name for name, _ in walk_files(root, directory))
    digests = (root.digest(f"{directory}/{name}") for name in names)
    return sha256(repr([*zip(names, digests, strict=True)]).encode()).hexdigest()


@contextmanager
def _alone(place: PosixStorage) -> Iterator[None]:
    """Be the only process that exports into a directory, and remove what a killed one left there."""
    lock = place.try_lock(_LOCK)
    if lock is None:
        said = f"another process exports into {place.root}: call again when it has ended"
        raise PlaceInUse(said, place=place.root, object=_LOCK)
    try:
        for name in place.listdir(""):
            if name.startswith("step_") and name.endswith(_UNFINISHED):
                _remove(place, name)
        yield
    finally:
        place.unlock(lock)


@contextmanager
def _finished_as(place: Storage, name: str) -> Iterator[str]:
    """A new directory, which gets ``name`` once the block has ended and all in it is durable."""
    directory = f"{name}{_UNFINISHED}"
    place.mkdir(directory)
    try:
        yield directory
        fsync_tree_dirs(place, directory)
        move(place, directory, name)
    except BaseException:  # the space is free again before the next attempt
        _remove(place, directory)
        raise


def _remove(place: Storage, directory: str) -> None:
    if lookup(place, directory) is None:
        return
    for name, _ in walk_files(place, directory):
        remove_marker(place, f"{directory}/{name}")
    remove_empty(place, directory)


# ------------------------------------------------------------------------------------- DCP's format


def _by_dcp(
    part: ExportedPart,
    root: Storage,
    commit: Commit | None,
    place: Storage,
    directory: str,
    settings: HuggingFaceSettings,
) -> None:
    metadata = stored_in(part.name, str(part.directory))
    tensors = _tensors_of(part.name, metadata, settings)
    needed, free = sum(each.bytes for each in tensors), place.free_bytes()
    if needed > free:
        raise NoRoom(
            f"{place.root} has {bytes_text(free)} free, and the export needs {bytes_text(needed)}",
            bytes_needed=needed,
            bytes_free=free,
            file=place.root,
        )
    keys = {each.key for each in tensors}
    places = (metadata.storage_data or {}).items()
    files = {info.relative_path for index, info in places if index.fqn in keys}
    _verify(part, root, commit, {join(part.inner, name) for name in (METADATA, *files)})
    read = partial(_read, part, metadata)
    write_model(place, directory, tensors, read, settings.file_mb * 1e6)


def _read(part: ExportedPart, metadata: Metadata, tensor: NamedTensor) -> torch.Tensor:
    return read_tensor(part.name, str(part.directory), metadata, tensor.key)


def _tensors_of(
    part: str, metadata: Metadata, settings: HuggingFaceSettings
) -> Sequence[NamedTensor]:
    """The tensors with the prefix, under their new names. Raises ``ConfigError`` if there is none."""
    prefix = settings.prefix.rstrip(".") + "." if settings.prefix else ""
    to = getattr(torch, settings.dtype) if settings.dtype else None
    stored = {
        key: about
        for key, about in metadata.state_dict_metadata.items()
        if isinstance(about, TensorStorageMetadata)
    }
    found = []
    for key, about in stored.items():
        if key.startswith(prefix) and key != prefix:
            dtype = about.properties.dtype
            if to is not None and dtype.is_floating_point and dtype.itemsize > 1:
                dtype = to
            if not has_name(dtype):
                said = f"part {part!r}: {key!r} is of {dtype}, which no safetensors file can have"
                raise ConfigError(f"{said}: choose another {VARIABLE}PREFIX", part=part, key=key)
            found.append(NamedTensor(key.removeprefix(prefix), key, tuple(about.size), dtype))
    if not found:
        first = ", ".join(sorted({key.partition(".")[0] for key in stored})[:8])
        raise ConfigError(
            f"part {part!r} has no tensor whose name begins with {prefix!r}; the names begin with: "
            f"{first}. Set {VARIABLE}PREFIX",
            part=part,
            key=f"{VARIABLE}PREFIX",
        )
    return found


def _verify(
    part: ExportedPart, root: Storage, commit: Commit | None, files: Collection[str] | None = None
) -> None:
    """Compare files, by default all, with what was written. Raises ``DamagedRoot``."""
    listed = commit.manifest.files if commit is not None else ()
    entries = [entry for entry in listed if files is None or entry.name in files]
    directory = part.step_path.name
    said = check_sizes(root, directory, entries) or check_digests(root, directory, entries)
    if said:
        said = f"part {part.name!r}: {said}"
        raise DamagedRoot(said, part=part.name, file=str(part.step_path))


# --------------------------------------------------------------------------------- Megatron-Bridge


def _by_bridge(
    part: ExportedPart,
    root: Storage,
    commit: Commit | None,
    place: Storage,
    directory: str,
    settings: HuggingFaceSettings,
) -> None:
    """Let Bridge export a part of Megatron's. It loads the whole model into host memory."""
    if not (part.directory / _RUN_CONFIG).is_file():
        raise ConfigError(
            f"part {part.name!r} is in Megatron's format, and there is no {_RUN_CONFIG} of "
            "Megatron-Bridge, which has the model's configuration: convert it with the tool of your "
            "trainer, in a job with that command",
            part=part.name,
            file=str(part.directory / _RUN_CONFIG),
        )
    given = settings.model_fields_set & {"prefix", "dtype", "file_mb"}
    if given:
        said = f"Megatron-Bridge chooses names, types and files itself: leave out {sorted(given)}"
        raise ConfigError(said, key=f"{VARIABLE}{min(given).upper()}", part=part.name)
    try:
        from megatron.bridge import AutoBridge
        from transformers import AutoConfig
    except ImportError as error:
        raise ConfigError(
            f"part {part.name!r} is of Megatron-Bridge, which cannot be imported: {describe(error)}: "
            "install megatron-bridge where the trainer runs",
            part=part.name,
        ) from error
    _verify(part, root, commit)
    try:
        bridge = AutoBridge.from_hf_config(AutoConfig.from_pretrained(settings.model))
        bridge.export_ckpt(part.directory, place.absolute(directory), show_progress=False)
    except (Exception, CheckpointException) as error:
        raise RestoreFailed(
            f"part {part.name!r}: Megatron-Bridge cannot export it: {describe(error)}. {VARIABLE}MODEL "
            "must have the configuration of this model. The job sees no accelerator unless its "
            "environment sets CUDA_VISIBLE_DEVICES",
            part=part.name,
            file=str(part.directory),
        ) from error
    fsync_tree_files(place, directory)

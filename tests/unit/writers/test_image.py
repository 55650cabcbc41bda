"""Images: every byte of a file from its pieces, its checksums, and errors of memory and disk."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import queue
import threading
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfsm.adapters.memory import OwnMemory
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.images import (
    BlobTail,
    Chunk,
    ChunkSource,
    Copied,
    Image,
    Literal,
    Memory,
    Patch,
    Piece,
    SerializationId,
    Slice,
    image_of,
)
from ckptfsm.core.layout import receipt_name, staging_dir
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import DIRECT_ALIGNMENT, RankJob
from ckptfsm.disk.durable import lookup, make_dirs
from ckptfsm.testing.faults import FaultStorage, crash_at, fail_at
from ckptfsm.testing.simfs import ProcessDead, SimDisk, SimStorage
from ckptfsm.writers import image as images
from ckptfsm.writers import prefetch
from ckptfsm.writers.image import ImagePart, InlineChunks, write_image
from ckptfsm.writers.prefetch import Buffers, Prefetch
from ckptfsm.writers.rank_writer import write_rank

OF = AttemptId(5, 1, 1)
LOCATION = staging_dir(OF)

PATCH = Patch(((2, 1), (8, 1)), SerializationId(20, b"1" * 20, (14,), (7, None)))
TAIL = bytes(range(70))


class Trainer:
    """Memory with known content, by address. ``read`` counts; ``gone``: addresses that fail."""

    def __init__(self, *contents: bytes) -> None:
        self.buffers = [ctypes.create_string_buffer(c, max(1, len(c))) for c in contents]
        self.pieces = [
            Memory(ctypes.addressof(buffer), len(content))
            for buffer, content in zip(self.buffers, contents, strict=True)
        ]
        self.gone: set[int] = set()
        self.reads = 0

    def read(self, address: int, into: memoryview) -> None:
        self.reads += 1
        if any(
            p.address <= address < p.address + p.size for p in self.pieces if p.address in self.gone
        ):
            raise OSError(errno.EFAULT, "no such memory")
        OwnMemory().read(address, into)


def reading(source: ChunkSource, *files: Image) -> ImagePart:
    """A part of these files, read from ``source``."""
    part = ImagePart("state", "", files)
    part.read_from(source)
    return part


def expected(pieces: Sequence[Piece], contents: Sequence[bytes]) -> bytes:
    """The bytes of a file, put together without chunks."""
    found, crcs, waiting = b"", [], list(contents)
    for piece in pieces:
        if isinstance(piece, Memory):
            data = waiting.pop(0)
            crcs.append(zlib.crc32(data))
            found += data
        elif isinstance(piece, BlobTail):
            found += piece.patch.applied(piece.data, crcs)
        else:
            found += piece.data
    return found


@pytest.fixture(params=["real", "simulated"])
def storage(request: pytest.FixtureRequest, tmp_path: Path):
    if request.param == "simulated":
        yield SimStorage(SimDisk(), "p1")
        return
    made = PosixStorage(tmp_path)
    yield made
    made.close_root()


def some_file(trainer: Trainer) -> Image:
    first, second = trainer.pieces
    return image_of(
        "f.distcp",
        [
            Literal(b"head"),
            first,
            BlobTail(TAIL, PATCH),
            Literal(b"x" * 5000),
            second,
            BlobTail(TAIL, PATCH),
        ],
    )


@pytest.mark.parametrize("size", [1, images.CHUNK_BYTES - 10, images.CHUNK_BYTES + 3])
def test_a_file_has_the_bytes_of_its_pieces(storage, size):
    """Catches: a tail on the edge of two chunks; a checksum of the wrong memory; a padded end."""
    contents = (bytes(range(256)) * (size // 256 + 1))[:size], b"second" * 1000
    trainer = Trainer(*contents)
    image = some_file(trainer)
    entry = write_image(storage, "", image, InlineChunks(trainer))
    wanted = expected(image.pieces, contents)
    assert storage.read("f.distcp", 1 << 30) == wanted
    assert (entry.name, entry.bytes) == ("f.distcp", len(wanted))
    assert entry.digest == storage.digest("f.distcp")


@given(
    contents=st.lists(st.binary(min_size=1, max_size=9000), min_size=1, max_size=6),
    cuts=st.integers(1, 4),
)
def test_any_pieces_in_any_chunks(contents, cuts):
    """Catches: a slice that begins or ends in the wrong place, at any edge of a chunk."""
    trainer = Trainer(*contents)
    pieces: list[Piece] = []
    for memory in trainer.pieces:
        pieces += [Literal(b"h" * cuts), memory, BlobTail(TAIL, PATCH)]
    image = image_of("f", pieces)
    disk = SimStorage(SimDisk(), "p1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "CHUNK_BYTES", cuts * DIRECT_ALIGNMENT)
        entry = write_image(disk, "", image, InlineChunks(trainer))
    assert disk.read("f", 1 << 30) == expected(pieces, contents)
    assert entry.digest == disk.digest("f")


def test_an_empty_file_is_a_file(storage):
    """Catches: an image without pieces that makes no file, or cannot be allocated."""
    entry = write_image(storage, "", image_of("empty", []), InlineChunks(Trainer()))
    assert (entry.bytes, storage.read("empty", 10)) == (0, b"")
    assert entry.digest == storage.digest("empty")


def test_every_write_is_aligned(storage):
    """Catches: a write that a file system refuses past the page cache."""
    trainer = Trainer(b"a" * 100, b"b" * (images.CHUNK_BYTES + 1))
    seen: list[tuple[int, int]] = []
    inner = storage.pwrite

    def pwrite(handle: int, data: memoryview, offset: int) -> int:
        seen.append((len(data), offset))
        return inner(handle, data, offset)

    storage.pwrite = pwrite
    write_image(storage, "", some_file(trainer), InlineChunks(trainer))
    assert [n % DIRECT_ALIGNMENT for pair in seen for n in pair] == [0] * 4


def test_a_short_write_is_no_end(storage):
    """Catches: a file with a hole where the disk took less than it was given."""
    trainer = Trainer(b"a" * 100_000, b"b" * 50)
    inner = storage.pwrite
    storage.pwrite = lambda handle, data, offset: inner(handle, data[:DIRECT_ALIGNMENT], offset)
    image = some_file(trainer)
    write_image(storage, "", image, InlineChunks(trainer))
    assert storage.read("f.distcp", 1 << 30) == expected(image.pieces, [b"a" * 100_000, b"b" * 50])


@pytest.mark.parametrize(
    "call", ["open_exclusive", "allocate", "pwrite", "truncate", "fsync", "close"]
)
def test_F5_F6_an_error_of_the_disk_is_raised(call):
    """Catches: a file that counts although the disk refused a call."""
    trainer = Trainer(b"a" * 100, b"b")
    disk = SimStorage(SimDisk(), "p1")
    calls = FaultStorage(disk)
    write_image(calls, "", some_file(trainer), InlineChunks(trainer))
    index = [name for name, _ in calls.calls].index(call)
    disk = SimStorage(SimDisk(), "p1")
    failing = FaultStorage(disk, before=fail_at(index, errno.ENOSPC))
    with pytest.raises(OSError, match=r"28|ENOSPC|space"):
        write_image(failing, "", some_file(trainer), InlineChunks(trainer))


def some_buffers(count: int) -> Buffers:
    made = Buffers()
    made.allow(count * images.CHUNK_BYTES)
    return made


def test_buffers_are_made_as_they_are_needed_and_kept():
    """Catches: memory of the size of the state for a disk that is fast enough, or anew each time."""
    buffers = some_buffers(3)
    first = buffers.take()
    assert buffers.size == images.CHUNK_BYTES
    first.give_back()
    taken = [buffers.take() for _ in range(3)]
    assert len({ctypes.addressof(ctypes.c_char.from_buffer(each.view)) for each in taken}) == 3
    assert buffers.size == 3 * images.CHUNK_BYTES
    assert buffers._fresh() is None
    taken[0].give_back()
    assert buffers.take().view is taken[0].view
    buffers.allow(2 * images.CHUNK_BYTES)  # the next job
    taken[2].give_back()  # late, of the job before
    assert buffers.size == 2 * images.CHUNK_BYTES
    assert buffers._free.qsize() == 2
    assert buffers._fresh() is None


def test_reads_go_on_with_the_buffers_that_there_are(monkeypatch):
    """Catches: a save that fails because its host has no memory for more than it needs."""
    buffers = some_buffers(3)
    first = buffers.take()

    def refuse(address: int, size: int) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(prefetch, "take_now", refuse)
    threading.Timer(0.05, first.give_back).start()
    assert buffers.take().view is first.view
    with pytest.raises(OSError, match="no memory"):
        some_buffers(1).take()


def prefetched(trainer: Trainer, parts: list[list[Image]], buffers: int, threads: int = 2):
    taken = threading.Event()
    source = Prefetch(parts, trainer, some_buffers(buffers), taken.set, threads=threads)
    return source, taken


def test_a_concurrent_source_gives_the_same_file(tmp_path):
    """Catches: chunks of one file in the wrong order, or buffers that are given back too early."""
    size = 3 * images.CHUNK_BYTES + 17
    contents = bytes(range(251)) * (size // 251), b"z" * size
    trainer = Trainer(*contents)
    parts = [[image_of(f"{i}", [p, BlobTail(TAIL, PATCH)]) for i, p in enumerate(trainer.pieces)]]
    source, taken = prefetched(trainer, parts, buffers=2)
    part = reading(source, *parts[0])
    storage = PosixStorage(tmp_path)
    source.start()
    written = part.write(storage, "")
    assert taken.wait(10)
    for image, content, entry in zip(parts[0], contents, written.files, strict=True):
        assert (tmp_path / image.name).read_bytes() == expected(image.pieces, [content])
        assert entry.digest == storage.digest(image.name)
    storage.close_root()


def test_buffers_for_all_take_the_memory_at_once():
    """Catches: an eager save that waits for the disk."""
    trainer = Trainer(b"a" * 100, b"b" * 100)
    parts = [[image_of("0", [trainer.pieces[0]])], [image_of("1", [trainer.pieces[1]])]]
    source, taken = prefetched(trainer, parts, buffers=2)
    source.start()
    assert taken.wait(10)  # no chunk was asked for


def test_few_buffers_take_the_memory_with_the_last_chunk():
    """Catches: a gate that opens early."""
    trainer = Trainer(b"a" * 100, b"b" * 100)
    images_ = [image_of(str(i), [piece]) for i, piece in enumerate(trainer.pieces)]
    source, taken = prefetched(trainer, [[images_[0]], [images_[1]]], buffers=1)
    source.start()
    first = source.take(images_[0], [])
    assert bytes(first.view[:100]) == b"a" * 100
    assert (trainer.reads, taken.is_set()) == (1, False)  # the only buffer is in use
    first.give_back()
    second = source.take(images_[1], [])
    assert bytes(second.view[:100]) == b"b" * 100
    assert taken.wait(10)


@pytest.mark.parametrize("buffers", [1, 2])
def test_memory_that_cannot_be_read_fails_every_file(tmp_path, buffers):
    """Catches: a hang, or a file of zeros, when an address is gone; a gate that opens all the same."""
    trainer = Trainer(b"a" * 100, b"b" * 100)
    trainer.gone.add(trainer.pieces[1].address)
    parts = [[image_of(str(i), [piece]) for i, piece in enumerate(trainer.pieces)]]
    source, taken = prefetched(trainer, parts, buffers=buffers)
    storage = PosixStorage(tmp_path)
    source.start()
    with pytest.raises(OSError, match="no such memory"):
        reading(source, *parts[0]).write(storage, "")
    if buffers == 2:  # with one, a read may wait for it until its process ends
        with pytest.raises(OSError, match="no such memory"):
            source.join()
    assert not taken.is_set()
    storage.close_root()


class Slow:
    """Memory that is read when the test lets it; ``error`` is raised then."""

    def __init__(self, error: Exception | None = None) -> None:
        self.go, self.error = threading.Event(), error

    def read(self, address: int, into: memoryview) -> None:
        assert self.go.wait(10)
        if self.error is not None:
            raise self.error


def test_the_reads_have_ended_when_a_source_is_joined():
    """Catches: threads that read for a job which is over, into the buffers of the next."""
    memory, calls = Slow(), []
    parts = [[image_of("0", [Memory(0, 5)])]]
    buffers = some_buffers(1)
    source = Prefetch(parts, memory, buffers, lambda: calls.append("taken"), threads=1)
    source.start()
    joined = threading.Thread(target=lambda: (source.join(), calls.append("joined")))
    joined.start()
    memory.go.set()
    joined.join(10)
    assert calls == ["taken", "joined"]


def test_an_error_of_a_read_is_raised_though_no_file_waits_for_it():
    """Catches: a job whose parts are left out, and that is done with a state nobody could read."""
    memory = Slow(OSError(errno.EFAULT, "no such memory"))
    buffers = some_buffers(1)
    source = Prefetch([[image_of("0", [Memory(0, 5)])]], memory, buffers, str, threads=1)
    source.start()
    memory.go.set()
    with pytest.raises(OSError, match="no such memory"):
        source.join()


@pytest.mark.parametrize("buffers", [1, 2])
def test_a_thread_that_cannot_be_started_is_no_hang(monkeypatch, buffers):
    """Catches: a gate that waits until the writer's deadline, where the writer's
    process has no memory for another thread."""
    trainer = Trainer(b"a", b"b")
    files = [image_of(str(i), [piece]) for i, piece in enumerate(trainer.pieces)]
    source, taken = prefetched(trainer, [files], buffers=buffers)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name != "ckptfsm-prefetch":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    source.start()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        source.join()
    for image in files:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            source.take(image, ())
    assert not taken.is_set()


@pytest.mark.parametrize("changed", [False, True])
def test_a_second_reading_finds_a_change(changed):
    """Catches: a change that torch does not count, in a checkpoint that is taken for good."""
    trainer, calls = Trainer(b"a" * 100, b"b" * (2 * images.CHUNK_BYTES)), []
    image = image_of(
        "0", [Literal(b"x"), trainer.pieces[0], BlobTail(TAIL, PATCH), trainer.pieces[1]]
    )
    buffers = some_buffers(3)  # all are full

    class Changing:
        reads = 0

        def read(self, address: int, into: memoryview) -> None:
            trainer.read(address, into)
            self.reads += 1
            if changed and self.reads == 3:
                ctypes.memset(trainer.pieces[1].address + images.CHUNK_BYTES, 0, 1)

    source = Prefetch(
        [[image]], Changing(), buffers, lambda: calls.append(1), threads=1, twice=True
    )
    source.start()
    if changed:
        with pytest.raises(ValueError, match="changed before the writer had read it"):
            source.join()
    else:
        source.join()
    assert calls == ([] if changed else [1])


def fails_in_time(root, files, source, expected):
    """Write the files, which fails, on a thread that must end."""
    storage, errors = PosixStorage(root), []

    def write() -> None:
        try:
            reading(source, *files).write(storage, "")
        except expected as error:
            errors.append(error)

    source.start()
    writing = threading.Thread(target=write, daemon=True)
    writing.start()
    writing.join(20)
    assert not writing.is_alive(), "a file waits for a buffer"
    assert len(errors) == 1
    source.join()
    storage.close_root()


@pytest.mark.parametrize("count", [2, 4])
def test_an_error_of_one_file_ends_the_others(tmp_path, count):
    """Catches: files of a part that wait for buffers which the failed one holds, until the deadline."""
    trainer = Trainer(*[b"a" * (3 * images.CHUNK_BYTES)] * count)
    files = [image_of(str(i), [piece]) for i, piece in enumerate(trainer.pieces)]
    (tmp_path / "0").write_bytes(b"in the way")
    source, _ = prefetched(trainer, [files], buffers=2)
    fails_in_time(tmp_path, files, source, FileExistsError)


class Stolen(queue.SimpleQueue):
    """Chunks of a file whose thread takes each one right after another thread has seen it."""

    def empty(self) -> bool:
        found = super().empty()
        if not found:
            super().get()
        return found

    def get(self, block: bool = True, timeout: float | None = None):
        assert not block or not super().empty(), "waits for a chunk that another thread took"
        return super().get(block, timeout)


def test_files_that_fail_together_do_not_wait_for_each_others_chunks():
    """Catches: a full disk that fails two files at once, and whose save hangs until
    the writer's deadline."""
    image = image_of("0", [Literal(b"a" * images.CHUNK_BYTES)])
    source, taken = prefetched(Trainer(), [[image]], buffers=1)
    source._filled["0"] = Stolen()
    source.start()
    assert taken.wait(10)
    source.cancel([image], OSError(errno.ENOSPC, "full"))
    with pytest.raises(OSError, match="full"):
        source.take(image, ())


def test_a_thread_of_a_file_that_cannot_be_started_is_no_hang(tmp_path, monkeypatch):
    """Catches: a file that waits until the writer's deadline for buffers of another
    one, which has no thread."""
    trainer = Trainer(*[b"a" * (3 * images.CHUNK_BYTES)] * 2)
    files = [image_of(str(i), [piece]) for i, piece in enumerate(trainer.pieces)]
    source, _ = prefetched(trainer, [files], buffers=2)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "ckptfsm-file_1":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    fails_in_time(tmp_path, files, source, RuntimeError)


def test_a_file_that_cannot_be_allocated_is_closed(tmp_path):
    """Catches: a process without free descriptors after a thousand saves on a full disk."""
    real = PosixStorage(tmp_path)
    full = FaultStorage(real, before=lambda i, call, path: _raise() if call == "allocate" else None)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(3):
        with pytest.raises(OSError, match="No space"):
            write_image(full, "", image_of(str(number), [Literal(b"x")]), InlineChunks(Trainer()))
    assert len(os.listdir("/proc/self/fd")) == before
    real.close_root()


def test_a_part_that_is_left_out_does_not_starve_the_next(tmp_path):
    """Catches: buffers of an optional part that failed, which a later part waits for in vain."""
    size = 3 * images.CHUNK_BYTES
    trainer = Trainer(b"a" * size, b"b" * size)
    first, second = (image_of(str(i), [piece]) for i, piece in enumerate(trainer.pieces))
    (tmp_path / "0").write_bytes(b"in the way")
    source, taken = prefetched(trainer, [[first], [second]], buffers=1)
    storage = PosixStorage(tmp_path)
    source.start()
    with pytest.raises(FileExistsError):
        reading(source, first).write(storage, "")
    part = reading(source, second)
    writing = threading.Thread(target=part.write, args=(storage, ""), daemon=True)
    writing.start()
    writing.join(10)
    assert not writing.is_alive(), "the next part waits for a buffer"
    assert (tmp_path / "1").read_bytes() == b"b" * size
    assert taken.wait(10)
    storage.close_root()


def test_a_full_disk_ends_a_concurrent_write(tmp_path):
    """Catches: a hang of the threads behind the first error; an error that is lost."""
    size = 6 * images.CHUNK_BYTES
    trainer = Trainer(b"a" * size)
    parts = [[image_of("0", trainer.pieces)]]
    source, _ = prefetched(trainer, parts, buffers=2)
    real = PosixStorage(tmp_path)
    full = FaultStorage(real, before=lambda i, call, path: _raise() if call == "pwrite" else None)
    source.start()
    with pytest.raises(OSError, match="No space"):
        reading(source, *parts[0]).write(full, "")
    real.close_root()


@pytest.mark.parametrize("before", [3, images.CHUNK_BYTES - 9])
def test_copied_data_has_its_checksum(before):
    """Catches: a small tensor's blob with the checksum of no data, or of the one before it."""
    storage, trainer = SimStorage(SimDisk(), "p1"), Trainer(b"x" * before)
    small = bytes(range(100))
    pieces = [*trainer.pieces, BlobTail(TAIL, PATCH), Copied(small), BlobTail(TAIL, PATCH)]
    entry = write_image(storage, "", image_of("f", pieces), InlineChunks(trainer))
    tails = [PATCH.applied(TAIL, [zlib.crc32(data)]) for data in (b"x" * before, small)]
    wanted = b"x" * before + tails[0] + small + tails[1]
    assert storage.read("f", 1 << 30) == wanted
    assert entry.digest == storage.digest("f")


class Returned:
    """A concurrent source with a buffer for each chunk, which notes the buffers given back."""

    concurrent = True

    def __init__(self) -> None:
        self.back: list[int] = []

    def take(self, image: Image, slices: Sequence[Slice]) -> Chunk:
        view = memoryview(bytearray(images.CHUNK_BYTES))
        return Chunk(view, partial(self.back.append, slices[0].start // images.CHUNK_BYTES))

    def cancel(self, images: Sequence[Image], error: BaseException) -> None: ...


def test_a_buffer_is_not_filled_again_before_it_was_written():
    """Catches: a slow disk that writes the next chunk in the place of this one."""
    source, early = Returned(), []
    storage = SimStorage(SimDisk(), "p1")
    inner = storage.pwrite

    def look(handle: int, data: memoryview, offset: int) -> int:
        early.append(offset // images.CHUNK_BYTES in source.back)
        return inner(handle, data, offset)

    storage.pwrite = look
    write_image(storage, "", image_of("0", [Memory(0, 4 * images.CHUNK_BYTES)]), source)
    assert early == [False] * 4
    assert sorted(source.back) == [0, 1, 2, 3]


def test_F7_a_written_file_survives_a_loss_of_power():
    """Catches: a receipt for a file that is allocated, has its size, and reads as zeros."""
    disk = SimDisk()
    storage = SimStorage(disk, "p1")
    trainer = Trainer(b"a" * 10_000, b"b" * 10)
    image = some_file(trainer)
    write_image(storage, "", image, InlineChunks(trainer))
    storage.fsync_dir("")
    disk.crash("all_lost")
    wanted = expected(image.pieces, [b"a" * 10_000, b"b" * 10])
    assert SimStorage(disk, "p2").read("f.distcp", 1 << 30) == wanted


def write_job(storage, trainer: Trainer) -> None:
    image = replace(some_file(trainer), name="sub/f")
    planned = image_of("planned/p", [Literal(b"planned")])
    part = ImagePart("state", "sub", (image, planned), made=("planned",))
    write_rank(storage, RankJob(OF, 0, 1, LOCATION, (part,)), InlineChunks(trainer))


def prepared() -> SimDisk:
    disk = SimDisk()
    make_dirs(SimStorage(disk, "setup"), LOCATION)
    disk.kill("setup")
    return disk


@pytest.mark.parametrize("fate", ["all_lost", "all_kept"])
def test_I3_power_loss_at_any_call_leaves_no_receipt_without_file(fate):
    """Catches: a receipt that is durable before the bytes, the cut, or the names of its file."""
    trainer = Trainer(b"a" * 9000, b"b" * 10)
    whole = expected(some_file(trainer).pieces, [b"a" * 9000, b"b" * 10])
    counted = FaultStorage(SimStorage(prepared(), "p1"))
    write_job(counted, trainer)
    with_receipt = 0
    for call in range(len(counted.calls) + 1):
        disk = prepared()
        storage = FaultStorage(SimStorage(disk, "p1"), before=crash_at(call))
        with contextlib.suppress(ProcessDead):
            write_job(storage, trainer)
        disk.crash(fate)
        after = SimStorage(disk, "p2")
        if lookup(after, f"{LOCATION}/{receipt_name('state', 0)}") is not None:
            with_receipt += 1
            assert after.read(f"{LOCATION}/sub/f", 1 << 30) == whole
            assert after.read(f"{LOCATION}/planned/p", 100) == b"planned"
    assert 1 <= with_receipt < len(counted.calls) / 2


def _raise() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_slices_say_where_their_bytes_lie():
    """Catches: an offset that counts from the wrong start."""
    pieces = [Literal(b"ab"), Literal(b"c" * images.CHUNK_BYTES)]
    first, second = image_of("f", pieces).chunks()
    assert first[:2] == (0, images.CHUNK_BYTES)
    assert first[2] == [Slice(pieces[0], 0, 0, 2), Slice(pieces[1], 2, 0, images.CHUNK_BYTES - 2)]
    assert second == (images.CHUNK_BYTES, 2, [Slice(pieces[1], 0, images.CHUNK_BYTES - 2, 2)])

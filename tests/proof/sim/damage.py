"""Damage by people and sick machines to a root between two jobs: F17 to F21, F16, F30.

Rules: whatever is damaged on purpose is told to the ``Watch``; another valid checkpoint is always left,
so that a fall-back exists. Damage that a restart must refuse is undone by ``Site`` before the end.
"""

from __future__ import annotations

import hashlib
import json
import random
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace

from ckptfsm.adapters.posix_storage import digest_of
from ckptfsm.core.documents import Manifest, decode, encode_sealed
from ckptfsm.disk.journal import decode_line
from ckptfsm.testing.invariants import TRACKER
from proof.sim.faults import draw_rate
from proof.sim.site import Site

_STRAY = "iter_0900000"


Meddler = Callable[[Site], None]


def draw_meddling(choose: random.Random) -> dict[Meddler, float]:
    """The damage by people and machines in one run, and how likely each is between two jobs."""
    chances: dict[Meddler, float] = {
        tear_tracker: 0.15,
        edit_tracker: 0.2,
        damage_step: 0.5,  # mostly there is no other one to fall back to
        tear_journal: 0.1,
        lose_tail: 0.1,
        lose_journal: 0.1,
        write_after_seal: 0.1,
        plant_stray: 0.2,
    }
    return {meddler: draw_rate(choose, chance) for meddler, chance in chances.items()}


def meddle(site: Site, rates: Mapping[Meddler, float]) -> None:
    """Do something to the root, or several things, or nothing."""
    for meddler, rate in rates.items():
        if site.chance(rate):
            meddler(site)


def _steps(site: Site) -> list[int]:
    """The sound published steps, by name; in place, only what has its manifest is published."""
    disk = site.world.disk
    names = [n for n in disk.listed("") if n.startswith("iter_") and n != _STRAY]
    steps = [int(n[5:]) for n in names if disk.find(f"{n}/.ckptfsm/manifest.json") is not None]
    return [step for step in steps if step not in site.watch.outside()]


def tear_tracker(site: Site) -> None:
    """F18.

    A stock trainer's word while a rollback is unfinished is refused: its writer may have saved.
    """
    if site.world.disk.find(TRACKER) is not None and site.watch.floor() is not None:
        site.count("F18")
        word = site.world.random.choice((b"", b"12x", b"\0\0\0", b"release", b"-5", b"9" * 30))
        models = site.watch.models  # the newest epoch may have no journal yet
        model = models.get(max(models, default=0))
        going_back = model is not None and model.rolling_back
        _write_tracker(site, b"" if going_back and word == b"release" else word)


def edit_tracker(site: Site) -> None:
    """F17, F19: a hand-edited tracker, at an older step or one that is not there.

    Only where the journal knows all steps: without it only the tracker tells which of them to
    resume.
    """
    steps = _steps(site)
    model = site.watch.models.get(site.watch.newest_epoch)
    if model is None or not set(steps) <= model.steps("tracked"):
        return
    if site.watch.floor() is not None and steps:
        step = site.world.random.choice((*steps, max(steps) + 70))
        if step not in steps:
            site.count("F19")
        if model.steps("prunable"):
            site.count("F17")
        _write_tracker(site, b"%d\n" % step)


def _write_tracker(site: Site, data: bytes) -> None:
    site.world.note("SOMEBODY", "tracker", repr(data))
    site.world.disk.overwrite(TRACKER, data)
    site.watch.meddled = True


def damage_step(site: Site) -> None:
    """F19, F21: one checkpoint is gutted, flipped, truncated, given a shard too many, or removed.

    Or another run's comes to its name, whole, with an attempt of the same name.
    """
    steps, choose, disk = _steps(site), site.world.random, site.world.disk
    floor = site.watch.floor()
    if len(steps) < 2 or floor is None:
        return
    step = choose.choice([s for s in steps if s != min(steps)])
    directory = f"iter_{step:07d}"
    shard = f"{directory}/__0_0.distcp"
    data = disk.content(disk.find(shard))
    how = choose.choice(("flip", "truncate", "missing", "extra", "gone", "manifest", "replaced"))
    model = site.watch.models.get(site.watch.newest_epoch)
    if how == "replaced" and (model is None or step not in model.steps("tracked")):
        how = "manifest"  # the journal may not know its manifest
    if data is None:
        how = "gone"
    site.count("F19" if how == "gone" else "F21")
    site.world.note("SOMEBODY", "damages", directory, how)
    site.watch.damaged.add(step)
    match how:
        case "flip" if data is not None:
            place = choose.randrange(len(data))
            disk.overwrite(shard, data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        case "truncate" if data is not None:
            disk.overwrite(shard, data[: choose.randrange(len(data))])
        case "missing":
            disk.uproot(shard)
        case "extra":
            disk.overwrite(f"{directory}/__9_0.distcp", b"more")
        case "manifest":
            disk.overwrite(f"{directory}/.ckptfsm/manifest.json", b"{")
        case "replaced" if data is not None:
            site.replaced.add(step)
            _replace(site, directory, "__0_0.distcp", data)
        case _:
            disk.uproot(directory)


def _replace(site: Site, directory: str, shard: str, data: bytes) -> None:
    """Change a shard and its digest in the manifest, as the checkpoint of another run has it."""
    disk, path = site.world.disk, f"{directory}/.ckptfsm/manifest.json"
    body = data[:-64].replace(b'.0"}', b'.?"}')  # the end of rank 0's token: a restore would tell
    theirs = body + hashlib.sha256(body).hexdigest().encode()
    manifest = decode(Manifest, disk.content(disk.find(path)) or b"", path)
    files = tuple(
        replace(entry, digest=digest_of(theirs)) if entry.name == shard else entry
        for entry in manifest.files
    )
    disk.overwrite(f"{directory}/{shard}", theirs)
    disk.overwrite(path, encode_sealed(manifest.model_copy(update={"files": files})))


def _segments(site: Site) -> list[str]:
    found = site.world.disk.listed(".ckptfsm/journal")
    return [f".ckptfsm/journal/{name}" for name in found if name.endswith(".ndjson")]


def tear_journal(site: Site) -> None:
    """F20: a torn record at the end of the newest segment."""
    segments = _segments(site)
    if segments:
        disk = site.world.disk
        data = disk.content(disk.find(segments[-1])) or b""
        end = len(data.rstrip(b"\n")) + 1
        if end > 1:
            site.count("F20")
            site.world.note("SOMEBODY", "tears", segments[-1])
            disk.overwrite(segments[-1], data[:end] + b'{"crc":"0000' + data[end + 12 :])


def lose_tail(site: Site) -> None:
    """F20: a disk that lost the last records; what they were about must be told from the disk."""
    segments = _segments(site)
    if not segments or site.watch.floor() is None:
        return
    disk, choose = site.world.disk, site.world.random
    data = disk.content(disk.find(segments[-1])) or b""
    lines = data.rstrip(b"\n").split(b"\n")
    lost = min(1 + choose.randrange(4), len(lines) - 1)
    kept = b"".join(line + b"\n" for line in lines[: len(lines) - lost])
    steps = {_step_in(line) for line in lines[len(lines) - lost :]}
    if lost < 1 or steps - {None} >= set(_steps(site)):
        return  # another one is to be left
    if steps & site.replaced:
        return  # only the journal tells another run's checkpoint
    if b"rollback" in data and disk.content(disk.find(TRACKER)) == b"release":
        return  # see tear_tracker: the lost records may have completed the rollback
    site.count("F20")
    site.world.note("SOMEBODY", "loses the tail", segments[-1], str(lost))
    site.watch.damaged |= {step for step in steps if step is not None}
    disk.overwrite(segments[-1], kept + b"\n" * (len(data) - len(kept)))


def _step_in(line: bytes) -> int | None:
    """The step that a record is about; None where it is about none, or torn."""
    try:
        step: int | None = json.loads(line)["record"].get("step")
    except ValueError:
        return None
    return step


def lose_journal(site: Site) -> None:
    """F26: the private directory is gone, as after a copy of the steps: they are adopted.

    Not where a person changed the tracker: without a journal it tells which of them to resume.
    """
    disk, watch = site.world.disk, site.watch
    if watch.floor() is None or watch.damaged or watch.meddled or disk.find(".ckptfsm") is None:
        return
    site.count("F26")
    site.world.note("SOMEBODY", "removes", ".ckptfsm")
    disk.uproot(".ckptfsm")
    site.watch.began_anew()


def spoil_journal(site: Site) -> Callable[[], None] | None:
    """F20, F34: damage that must be refused, with nothing changed. Returns what undoes it."""
    segments = _segments(site)
    disk, choose = site.world.disk, site.world.random
    path = segments[-1] if segments else ""
    data = disk.content(disk.find(path)) or b""
    lines = data.rstrip(b"\n").split(b"\n")
    if len(lines) < 3 or b'"record":' not in lines[0]:  # a power loss tore its very first write
        return None
    if not any(map(decode_line, lines[1:])):
        return None  # torn after it, the first record is the last
    if choose.random() < 0.5:
        site.count("F20")
        place = choose.randrange(1, len(lines[0]))
        spoiled = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
    else:
        site.count("F34")
        record = lines[0][lines[0].index(b'"record":') + 9 : -1]
        record = record.replace(b'"schema_version":1', b'"schema_version":2', 1)
        line = b'{"crc":"%08x","record":%s}' % (zlib.crc32(record), record)
        spoiled = line + data[len(lines[0]) :]
    site.world.note("SOMEBODY", "spoils", path)
    disk.overwrite(path, spoiled)
    return lambda: disk.overwrite(path, data)


def write_after_seal(site: Site) -> None:
    """F20: a zombie's bytes in a segment that is sealed."""
    segments = _segments(site)
    if len(segments) > 1:
        disk = site.world.disk
        data = disk.content(disk.find(segments[0])) or b""
        end = len(data.rstrip(b"\n")) + 1
        site.count("F20")
        site.world.note("SOMEBODY", "writes after the seal", segments[0])
        disk.overwrite(segments[0], data[:end] + b"zombie\n" + data[end + 7 :])


def plant_stray(site: Site) -> None:
    """F16, F30: a link, a mount or a stranger's file at a name of ours."""
    disk = site.world.disk
    if site.watch.floor() is None or disk.find(_STRAY) is not None:
        return
    site.world.note("SOMEBODY", "plants", _STRAY)
    site.watch.strays.add(int(_STRAY[5:]))
    how = site.world.random.randrange(3)
    site.count("F16" if how < 2 else "F30")
    if how == 0:
        disk.plant_symlink(_STRAY, "/etc")
    elif how == 1:
        disk.plant_mount(_STRAY)
    else:
        disk.plant_file(_STRAY, b"not a directory")

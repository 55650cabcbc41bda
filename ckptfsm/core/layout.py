"""Names on disk, relative to the root. Pure.

A name is accepted only if building it again gives the same text. So ``iter_5``, ``iter_+0000005`` or a
step of a thousand digits is not taken for a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from ckptfsm.core.parts import MAX_STEP, AttemptId

TRACKER = "latest_checkpointed_iteration.txt"
TRACKER_BYTES = 256  # bytes read at most: a step has 16 digits
PRIVATE = ".ckptfsm"
BEGUN = "begun-"
GONE = "gone-"  # prefix of names in the trash that may be deleted
LOCK = f"{PRIVATE}/lock"
EPOCHS = f"{PRIVATE}/epochs"
TAKING = "take-"  # prefix of an epoch's name while it is being taken
JOURNAL = f"{PRIVATE}/journal"
STAGING = f"{PRIVATE}/staging"
PINS = f"{PRIVATE}/pins"
READERS = f"{PRIVATE}/readers"
OWN = "@"  # begins the nonce of a lease of this library's own processes, and of no other
INBOX = f"{PRIVATE}/inbox"  # operator requests to the owner; made with the first one
ANSWERS = f"{PRIVATE}/answers"
JOBS = f"{PRIVATE}/jobs"  # states of the jobs of on_tracked; made with the first one
FETCHING = f"{PRIVATE}/fetching"  # checkpoints that are being fetched; made with the first one
RUN = f"{PRIVATE}/run.json"  # of a root that is copied, and of the place that has its copies
ROLLED_BACK = f"{PRIVATE}/rolled-back.json"  # of a place: the copies that a rollback left behind
TRASH = f"{PRIVATE}/trash"
QUARANTINE = f"{PRIVATE}/quarantine"
DIRECTORIES = (PRIVATE, EPOCHS, JOURNAL, STAGING, PINS, READERS, TRASH, QUARANTINE)

MANIFEST = f"{PRIVATE}/manifest.json"  # inside a step's directory
CLAIM = f"{PRIVATE}/claim.json"  # inside a step's directory in a place for copies
RECEIPTS = f"{PRIVATE}/receipts"
PLANNED = f"{PRIVATE}/planned"

_WHOLE = ".whole"
_ATTEMPT = re.compile(r"(\d{1,16})\.e(\d{1,9})\.a(\d{1,9})\Z")
_EPOCH = re.compile(r"epoch-(\d{6,9})\Z")
_REQUEST = re.compile(r"([0-9a-f]{32})\.json\Z")
JOB_NAME = r"[a-z0-9][a-z0-9_-]{0,39}"
_SEGMENT = re.compile(r"(\d{6,9})\.ndjson\Z")


LayoutName = Literal["megatron", "verl", "titan", "hf", "accelerate"]


@dataclass(frozen=True, slots=True)
class Layout:
    """The naming of step directories in a trainer: all other names are the same for every trainer.

    ``tree`` is the name of the torch_dist directories inside a step's directory; "" if there are none,
    and the directory itself is the checkpoint. ``by_tracker``: the trainer resumes from the step that a
    tracker names, and not simply from the newest directory. ``last`` is a file that the trainer's own
    code writes after model and optimizer, if its files have several formats; "" elsewhere.
    """

    name: LayoutName
    prefix: str
    digits: int
    tree: str
    by_tracker: bool = True
    last: str = ""

    def published_name(self, step: int) -> str:
        """``iter_0000100`` or ``global_step_100``: the name a stock reader looks for."""
        return f"{self.prefix}{step:0{self.digits}d}"

    def parse_published(self, name: str) -> int | None:
        """The step of a published name, or None."""
        digits = name.removeprefix(self.prefix)
        if digits == name or not digits.isascii() or not digits.isdigit() or len(digits) > 16:
            return None
        step = int(digits)
        return step if step <= MAX_STEP and self.published_name(step) == name else None

    def is_published(self, name: str) -> bool:
        """True for the published name of a step."""
        return self.parse_published(name) is not None

    def working_dir(self, of: AttemptId, in_place: bool) -> str:
        """The directory an attempt is written in: staging, or its name if the trainer fixed the path."""
        return self.published_name(of.step) if in_place else staging_dir(of)


MEGATRON = Layout("megatron", "iter_", 7, "")
VERL = Layout("verl", "global_step_", 1, "dist_ckpt")
TITAN = Layout("titan", "step-", 1, "", by_tracker=False)
HF = Layout("hf", "checkpoint-", 1, "", by_tracker=False, last="trainer_state.json")
ACCELERATE = Layout(
    "accelerate", "checkpoint_", 1, "", by_tracker=False, last="random_states_0.pkl"
)
LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {layout.name: layout for layout in (MEGATRON, VERL, TITAN, HF, ACCELERATE)}
)


def parse_attempt(name: str) -> AttemptId | None:
    """The attempt of a staging, trash or quarantine name, or None."""
    found = _ATTEMPT.match(name)
    if not found:
        return None
    of = AttemptId(int(found[1]), int(found[2]), int(found[3]))
    return of if of.step <= MAX_STEP and str(of) == name else None


def parse_aside(name: str) -> AttemptId | None:
    """The attempt whose directory was set aside as ``name``; a second directory of it got a number."""
    first, _, number = name.rpartition(".")
    if number.isascii() and number.isdigit() and (of := parse_attempt(first)):
        return of
    return parse_attempt(name)


def staging_dir(of: AttemptId) -> str:
    return f"{STAGING}/{of}"


def trash_dir(of: AttemptId) -> str:
    return f"{TRASH}/{of}"


def fetching_dir(of: AttemptId) -> str:
    return f"{FETCHING}/{of}"


def fetched_mark(of: AttemptId) -> str:
    """An empty file: this attempt was fetched whole, so a start adopts it as the root's own."""
    return f"{FETCHING}/{of}{_WHOLE}"


def parse_fetched(name: str) -> AttemptId | None:
    """The attempt of a mark of a fetch, or None."""
    return parse_attempt(name.removesuffix(_WHOLE)) if name.endswith(_WHOLE) else None


def begun_name(of: AttemptId) -> str:
    """An empty directory inside a directory in place: its name is the attempt that began there."""
    return f"{PRIVATE}/{BEGUN}{of}"


def gone_dir(of: AttemptId) -> str:
    """The trash name of files that may be deleted: ``parse_aside`` does not read it as an attempt."""
    return f"{TRASH}/{GONE}{of}"


def left_out_name(of: AttemptId) -> str:
    """The name in trash or quarantine of a left-out part: ``parse_aside`` reads no attempt from it."""
    return f"part-{of}"


def is_deletable(name: str) -> bool:
    """True for a trash name that may be deleted: discarded files, and parts that were left out."""
    return name.startswith((GONE, "part-"))


def quarantine_dir(of: AttemptId) -> str:
    return f"{QUARANTINE}/{of}"


def receipt_name(part: str, rank: int) -> str:
    """The receipt of a rank for a part, relative to the step's directory."""
    return f"{RECEIPTS}/{part}/{rank}.json"


def planned_name(part: str) -> str:
    """The planned metadata of a part, from which a restart writes ``.metadata``."""
    return f"{PLANNED}/{part}.bin"


def join(*pieces: str) -> str:
    """Relative path of the non-empty pieces."""
    return "/".join(p for p in pieces if p)


def epoch_name(epoch: int) -> str:
    return f"epoch-{epoch:06d}"


def parse_epoch(name: str) -> int | None:
    found = _EPOCH.match(name)
    return int(found[1]) if found and epoch_name(int(found[1])) == name else None


def segment_name(epoch: int) -> str:
    return f"{epoch:06d}.ndjson"


def parse_segment(name: str) -> int | None:
    found = _SEGMENT.match(name)
    return int(found[1]) if found and segment_name(int(found[1])) == name else None


def pin_name(step: int) -> str:
    return f"{PINS}/{step}.json"


def parse_pin(name: str) -> int | None:
    digits = name.removesuffix(".json")
    ok = digits != name and digits.isascii() and digits.isdigit() and len(digits) <= 16
    return int(digits) if ok and str(int(digits)) == digits and int(digits) <= MAX_STEP else None


def parse_reader(name: str) -> int | None:
    """The step of a reader's lease ``<step>.<nonce>.json``, or None."""
    return parse_pin(name.split(".", 1)[0] + ".json") if name.endswith(".json") else None


def request_name(nonce: str) -> str:
    """An operator request to the owner of the root."""
    return f"{INBOX}/{nonce}.json"


def answer_name(nonce: str) -> str:
    """The owner's answer to a request."""
    return f"{ANSWERS}/{nonce}.json"


def parse_request(name: str) -> str | None:
    """The nonce of a request's or an answer's name, or None."""
    found = _REQUEST.match(name)
    return found[1] if found else None


def job_name(of: AttemptId, job: str) -> str:
    """The state of a job for a checkpoint."""
    return f"{JOBS}/{of}.{job}.json"


def parse_job(name: str) -> tuple[AttemptId, str] | None:
    """The attempt and the job of a state's name, or None."""
    first, dot, job = name.removesuffix(".json").rpartition(".")
    of = parse_attempt(first)
    ok = name.endswith(".json") and dot and re.fullmatch(JOB_NAME, job)
    return (of, job) if ok and of is not None else None


def tracker_text(step: int) -> bytes:
    """The tracker's content as we write it: trainers end theirs without a newline (decision 7)."""
    return b"%d\n" % step


def parse_tracker(text: bytes) -> int | str | None:
    """The tracker's content: a step, ``"release"``, or None when it is neither."""
    try:
        word = text.decode("ascii").strip(" \t\r\n")  # str.strip takes control characters too
    except UnicodeDecodeError:
        return None
    if word == "release":
        return word
    if not word.isdigit() or len(word) > 16 or int(word) > MAX_STEP:
        return None
    return int(word)

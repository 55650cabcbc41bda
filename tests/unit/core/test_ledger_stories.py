"""Readable golden scenarios, run against the production ledger and recovery.

A file in ``scenarios/`` is a story: a line that begins with ``>`` is something that happens. The
indented lines after it are the reaction of the library: rejections, decisions of a restart, the
commands it asks for, and last the table of all checkpoints. Comments begin with ``#``. Run this
module with ``CKPTFSM_UPDATE_GOLDEN=1`` to rewrite the indented lines, and read the diff.

    save STEP xRANKS [PART[:RANK,...]]...      forked RANK [of=ATTEMPT] [world=N]
    shard PART RANK [of=...] [world=N]         published | tracker_written
    failed REASON                              writer_gone RANK of=ATTEMPT | cleaned of=ATTEMPT
    retire POLICY=N...                         removed STEP | reprieved STEP
    pin STEP... | read STEP...                 rollback STEP
    restart tracker=STEP|torn|missing [STEP=manifest|stock|damaged|unexplained]...
            [staging=ATTEMPT] [resume=strict|fallback|fresh]
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ckptfsm.core import events as m
from ckptfsm.core.documents import CheckpointRecord, checkpoint_of, checkpoint_record, encode
from ckptfsm.core.errors import CkptFsmError
from ckptfsm.core.evidence import Evidence, PublishedEvidence, StagingEvidence, TrackerEvidence
from ckptfsm.core.ledger import Ledger, Rejected
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import AttemptId, PartSpec
from ckptfsm.core.recovery import plan
from ckptfsm.core.retention import describe_tracked, parse_policy

FILES = sorted((Path(__file__).parent / "ledger_stories").glob("*.txt"))
UPDATE = os.environ.get("CKPTFSM_UPDATE_GOLDEN") == "1"


class Story:
    """Plays one scenario and says what came of every line."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.epoch, self.attempts = 1, 0
        self.out: list[str] = []

    def play(self, line: str) -> list[str]:
        self.out = []
        word, *arguments = line.split()
        plain = [a for a in arguments if "=" not in a]
        named = dict(a.split("=", 1) for a in arguments if "=" in a)
        try:
            getattr(self, f"do_{word}")(*plain, **{"named": named} if named else {})
        except CkptFsmError as error:
            self.out.append(f"{type(error).__name__}: {error.message}")
        return [*self.out, self.table()]

    def table(self) -> str:
        rows = []
        for c in self.ledger.in_state(*State):
            note = ""
            if c.state in (State.REQUESTED, State.FORKED):
                forks, shards = len(c.writers), len(c.expected)
                note = f" (forks {len(c.forked)}/{forks}, shards {len(c.reported)}/{shards})"
            elif c.state is State.FAILED:
                note = f" ({c.reason}, writers gone {len(c.gone)}/{len(c.writers)})"
            elif c.state is State.QUARANTINED:
                note = f" ({c.reason})"
            rows.append(f"{c.id} {c.state.value}{note}")
        return "= " + ("; ".join(rows) or "nothing")

    # ------------------------------------------------------------------------------ helpers

    def post(self, event: m.Event) -> None:
        self.ledger, _, command = self.ledger.post(event)
        if command is not None:
            self.out.append(f"do {type(command).__name__}({command.of})")

    def report(self, event: m.Event) -> None:
        outcome = self.ledger.report(event)
        if isinstance(outcome, Rejected):
            self.out.append(f"rejected: {outcome.why}")
            return
        self.ledger, _, command = outcome
        if command is not None:
            self.out.append(f"do {type(command).__name__}({command.of})")

    def attempt(self, named: dict[str, str] | None) -> AttemptId:
        if named and "of" in named:
            return AttemptId(*(int(n) for n in re.findall(r"\d+", named["of"])))
        return self.ledger.in_flight().id

    def world(self, of: AttemptId, named: dict[str, str] | None) -> int:
        if named and "world" in named:
            return int(named["world"])
        living = self.ledger.checkpoints.get(of)
        return living.world_size if living else 2

    def tracked(self, step: str, state: State) -> AttemptId:
        return next(c.id for c in self.ledger.in_state(state) if c.step == int(step))

    # ------------------------------------------------------------------------------- events

    def do_save(self, step: str, ranks: str, *parts: str) -> None:
        specs = []
        for part in parts or ("state",):
            name, _, only = part.partition(":")
            some = tuple(int(r) for r in only.split(",")) if only else None
            specs.append(PartSpec(name, "file" if some else "torch_dist", ranks=some))
        of = AttemptId(int(step), self.epoch, self.attempts + 1)
        event = m.SaveRequested(of, tuple(specs), int(ranks.removeprefix("x")))
        self.ledger.refuse(event)
        self.attempts += 1
        self.post(event)

    def do_forked(self, rank: str, named: dict[str, str] | None = None) -> None:
        of = self.attempt(named)
        self.report(m.WriterForked(of, int(rank), self.world(of, named)))

    def do_shard(self, part: str, rank: str, named: dict[str, str] | None = None) -> None:
        of = self.attempt(named)
        self.report(m.ShardReported(of, part, int(rank), self.world(of, named), 1))

    def do_published(self) -> None:
        of = self.attempt(None)
        self.post(m.PublishedOnDisk(of))
        self.post(m.Published(of))

    def do_tracker_written(self) -> None:
        self.post(m.TrackerWritten(self.attempt(None)))

    def do_failed(self, reason: str) -> None:
        self.report(m.Failed(self.attempt(None), reason))

    def do_writer_gone(self, rank: str, named: dict[str, str]) -> None:
        self.report(m.WriterGone(self.attempt(named), int(rank)))

    def do_cleaned(self, named: dict[str, str]) -> None:
        self.post(m.Cleaned(self.attempt(named)))

    def do_retire(self, named: dict[str, str]) -> None:
        policy = parse_policy({name: int(value) for name, value in named.items()})
        for offer in self.ledger.prunable(policy.preserve(describe_tracked(self.ledger))):
            self.post(offer)

    def do_removed(self, step: str) -> None:
        self.post(m.Removed(self.tracked(step, State.PRUNABLE)))

    def do_reprieved(self, step: str) -> None:
        self.post(m.Reprieved(self.tracked(step, State.PRUNABLE), "pin"))

    def do_pin(self, *steps: str) -> None:
        self.ledger = self.ledger.protected([int(s) for s in steps], self.ledger.readers)

    def do_read(self, *steps: str) -> None:
        self.ledger = self.ledger.protected(self.ledger.pins, [int(s) for s in steps])

    def do_rollback(self, step: str) -> None:
        for c in reversed(self.ledger.in_state(State.TRACKED)):
            if c.step > int(step):
                self.post(m.Withdrawn(c.id, "rollback"))

    def do_restart(self, named: dict[str, str]) -> None:
        """A new epoch: memory is gone, the ledger is made from its records."""
        self.epoch, self.attempts = self.epoch + 1, 0
        records = [encode(checkpoint_record(c)) for c in self.ledger.in_state(*State)]
        self.ledger = Ledger()
        for record in records:
            c = checkpoint_of(CheckpointRecord.model_validate_json(record))
            self.ledger = self.ledger.restore(c)
        found = plan(self.ledger, self.evidence(named), self.epoch, named.pop("resume", "fallback"))
        for decision in found.decisions:
            self.out.append(f"{decision.subject}: {decision.result}, {decision.why}")
            for action in decision.actions:
                if isinstance(action, m.Command):
                    self.out.append(f"do {type(action).__name__}({action.of})")
                else:
                    self.post(action)
        self.out += [f"warning: {w}" for w in found.warnings]

    def evidence(self, named: dict[str, str]) -> Evidence:
        word = named["tracker"]
        tracker = TrackerEvidence("step", int(word)) if word.isdigit() else TrackerEvidence(word)
        staging = {}
        if "staging" in named:
            staging[self.attempt({"of": named["staging"]})] = StagingEvidence(True)
        published = {}
        for name, kind in named.items():
            if name.isdigit():
                step = int(name)
                own = (c.id for c in self.ledger.in_state(*State) if c.step == step)
                of = next(own, None) if kind in ("manifest", "damaged") else None
                detail = "" if kind in ("manifest", "stock") else f"it is {kind}"
                published[step] = PublishedEvidence(step, kind, of, detail=detail)
        return Evidence(tracker, published, staging)


def render(text: str) -> str:
    """The scenario with its indented lines as they come out now."""
    story, rendered = Story(), []
    for line in text.splitlines():
        if line.startswith("    "):
            continue
        rendered.append(line)
        if line.startswith("> "):
            rendered += [f"    {said}" for said in story.play(line[2:])]
    return "\n".join(rendered) + "\n"


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_scenario(file):
    """Catches: any change of behaviour, as a diff that a person can read."""
    golden = file.read_text()
    actual = render(golden)
    if UPDATE:
        file.write_text(actual)
    else:
        assert actual == golden


def test_there_are_scenarios_and_they_are_short():
    """Catches: an empty directory that passes; a story that is not read to its end."""
    assert len(FILES) >= 6
    for file in FILES:
        lines = file.read_text().splitlines()
        assert len(lines) < 40 and lines[0].startswith("# "), file
        assert [line for line in lines if line.startswith("    ")], f"{file} was never rendered"


def test_a_wrong_golden_line_is_noticed():
    """Catches: a runner that compares a file with itself."""
    text = FILES[0].read_text()
    assert render(text.replace("tracked", "lost")) != text.replace("tracked", "lost")

"""Commands that change a root: pins, metrics, pruning, rollback, and the lease of a reader.

A root with a living owner is changed by that owner: the command puts a request into its inbox, and
waits for the answer. Without one, the command opens the root as any owner does. Both ways use the same
methods.
"""

from __future__ import annotations

import os
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from ckptfsm.adapters.clock import SystemClock
from ckptfsm.adapters.identity import this_process
from ckptfsm.adapters.posix_storage import opened_storage
from ckptfsm.cli.reading import HERE, REFUSED, Place, Root, Step, opened, step_or_root
from ckptfsm.cli.terminal import put, say_error
from ckptfsm.coordinator.coordinator import Coordinator, CoordinatorOptions
from ckptfsm.coordinator.operator_requests import carry_out, prune_step
from ckptfsm.core.documents import Answered, Asked, RequestKind, first_problem
from ckptfsm.core.errors import (
    ConfigError,
    DamagedRoot,
    NotPermitted,
    OutcomeUnknown,
    RootBusy,
    SaveRefused,
    StepNotFoundError,
)
from ckptfsm.core.evidence import Ownership
from ckptfsm.core.layout import ANSWERS, INBOX, PRIVATE, Layout
from ckptfsm.core.lifecycle import Checkpoint, State
from ckptfsm.core.ports import Storage
from ckptfsm.core.recorded_metrics import check_metrics
from ckptfsm.core.requests import RecoveryReport
from ckptfsm.core.retention import AnyOf, EveryNSteps, LatestN, Policy, describe_tracked, policy_of
from ckptfsm.disk.durable import lookup
from ckptfsm.disk.inbox import read_answer, send, take_back
from ckptfsm.disk.overview import Overview, look, owner_of
from ckptfsm.disk.reader_lease import ReaderLease
from ckptfsm.disk.verification import verify_step
from ckptfsm.views.timeline import clean

_LOOK_S = 0.2
_LATE_S = 5.0  # the owner is at a request that it has taken
_RENEW_S = 2.0  # the job's reader_timeout_s is not on disk, and may be short
_TAKEN = "the owner took the request and has not answered: see ckptfsm log"
Wait = Annotated[
    float, typer.Option(help="Seconds to wait for the answer of a living owner.", min=0.0)
]


OwnerEnded = Annotated[
    bool, typer.Option("--owner-ended", help="The owner, on another host, has ended for certain.")
]


def add_to(app: typer.Typer) -> None:
    app.command(epilog="Example: ckptfsm pin 40 --reason 'for the paper' -r runs/demo")(pin)
    app.command(epilog="Example: ckptfsm unpin 40 -r runs/demo")(unpin)
    app.command(epilog="Example: ckptfsm prune --dry-run --keep-latest 3 -r runs/demo")(prune)
    app.command(epilog="Example: ckptfsm rollback 35 -r runs/demo")(rollback)
    app.command(epilog="Example: ckptfsm lease 40 --ttl 3600 -r runs/demo")(lease)
    app.command("record-metrics", epilog="Example: ckptfsm record-metrics 40 val=2.1 -r runs/demo")(
        record_metrics
    )


def pin(
    step: Step,
    place: Place = None,
    reason: Annotated[str, typer.Option(help="The reason, which ls and explain show.")] = "",
    root: Root = HERE,
    wait: Wait = 60.0,
) -> None:
    """Keep a checkpoint from pruning until it is unpinned."""
    ask(place or root, wait, partial(Asked, errand="pin", step=step, reason=reason))


def unpin(step: Step, place: Place = None, root: Root = HERE, wait: Wait = 60.0) -> None:
    """End a pin. Retention decides anew."""
    ask(place or root, wait, partial(Asked, errand="unpin", step=step))


def rollback(
    step: Step,
    place: Place = None,
    root: Root = HERE,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    wait: Wait = 60.0,
) -> None:
    """Make a step the latest again. Later steps go to quarantine, where nothing deletes them.

    A job that runs goes on from its memory: end it first, or start it again afterwards.
    """
    root = place or root
    with opened(root) as storage:
        overview = look(storage)
    moved = overview.ledger.in_state(State.FINALIZED, State.TRACKED, State.PRUNABLE)
    later = {c.step for c in moved if c.step > step}
    put([f"steps that go to quarantine: {', '.join(map(str, sorted(later))) or 'none'}"])
    if not yes and not typer.confirm(f"Make step {step} the latest?"):
        raise typer.Exit(REFUSED)
    ask(root, wait, partial(Asked, errand="rollback", step=step))


def prune(
    ctx: typer.Context,
    what: Annotated[str, typer.Argument(metavar="[STEP]", help="Only this step.")] = "",
    place: Place = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell, and change nothing.")] = False,
    apply: Annotated[bool, typer.Option("--apply", help="Delete.")] = False,
    keep_latest: Annotated[int | None, typer.Option(help="Keep so many of the newest.")] = None,
    keep_every: Annotated[int | None, typer.Option(help="Keep multiples of it.")] = None,
    root: Root = HERE,
    wait: Wait = 60.0,
) -> None:
    """Delete checkpoints that retention no longer keeps. The latest, pinned and leased ones stay.

    A living owner uses the policy of its trainer. Without one, give --keep-latest or --keep-every.
    --dry-run alone uses the policy that the last owner has recorded.
    """
    if dry_run is apply:
        raise typer.BadParameter("give --dry-run or --apply")
    step, root = step_or_root(ctx, what, place or root)
    with opened(root) as storage:
        overview = look(storage)
    policies = _policies(keep_latest, keep_every)
    if overview.owner.may_live:
        if policies:
            raise ConfigError("the living owner uses the policy of its trainer", root=overview.root)
        errand: RequestKind = "prune" if step is None else "prune_step"
        ask(root, wait, partial(Asked, errand=errand, step=step, dry=dry_run))
    elif step is not None:
        _prune_named(root, overview, step, dry=dry_run)
    elif policies:
        _prune_by(root, overview, AnyOf(tuple(policies)), dry=dry_run)
    elif dry_run and (recorded := policy_of(overview.history.retention)) is not None:
        _prune_by(root, overview, recorded, dry=True)
    else:
        raise ConfigError("no owner lives: give --keep-latest or --keep-every", root=overview.root)


def _policies(keep_latest: int | None, keep_every: int | None) -> list[Policy]:
    found: list[Policy] = []
    if keep_latest is not None:
        found.append(LatestN(keep_latest))
    if keep_every is not None:
        found.append(EveryNSteps(keep_every))
    return found


def _prune_named(root: Path, overview: Overview, step: int, *, dry: bool) -> None:
    checkpoint = overview.ledger.at(step)
    if checkpoint is None:
        raise StepNotFoundError(f"there is no checkpoint of step {step}", step=step)
    kept_by = overview.ledger.superseded(checkpoint, ()).kept_by
    said = f"step {step} is kept by: {', '.join(kept_by)}"
    if kept_by and not dry:
        raise SaveRefused(said, step=step, kept_by=kept_by)
    if kept_by:
        put([said])
    else:
        _prune_without_owner(root, overview, [step], dry=dry)


def _prune_by(root: Path, overview: Overview, policy: Policy, *, dry: bool) -> None:
    preserved = policy.preserve(describe_tracked(overview.ledger))
    steps = [offer.of.step for offer in overview.ledger.to_prune(preserved)]
    _prune_without_owner(root, overview, steps, dry=dry)


def _prune_without_owner(
    root: Path, overview: Overview, steps: Sequence[int], *, dry: bool
) -> None:
    if dry or not steps:
        named = ", ".join(map(str, steps))
        put([f"would prune: {named}" if steps else "nothing to prune: everything is kept"])
        return
    good = _verified_latest(root, overview)
    with owned(root) as (coordinator, _):
        held = coordinator.locate(None)
        # Recovery may have moved something: then nobody has read the latest, and delete refuses.
        same = coordinator.ledger.latest() == good
        coordinator.release(held.lease if held else "", good.step if same else None)
        for step in steps:  # each is judged again
            put([prune_step(coordinator, step)])


def _verified_latest(root: Path, overview: Overview) -> Checkpoint:
    """The latest checkpoint, read. Raises ``DamagedRoot`` if it is damaged: the older ones may be
    needed then."""
    latest = overview.ledger.latest()
    assert latest is not None, "without a latest checkpoint nothing is prunable"
    with opened(root) as storage:
        verdict = verify_step(storage, overview.layout, latest)
    if not verdict.good:
        said = f"nothing is pruned, because the latest is damaged: {verdict.problems[0]}"
        raise DamagedRoot(said, step=latest.step, file=overview.root)
    return latest


def lease(
    step: Step,
    place: Place = None,
    ttl: Annotated[float, typer.Option(help="Seconds to hold the lease.", min=0.0)] = 3600.0,
    root: Root = HERE,
) -> None:
    """Hold a reader lease on a checkpoint while this command runs, and print the path to read.

    Exit status 1 if the lease is lost: the step was pruned or rolled back meanwhile.
    """
    root = place or root
    with opened(root) as storage:
        layout = look(storage).layout.name
    end = time.monotonic() + ttl
    with ReaderLease(root, step, layout=layout) as held:
        put([held.path])
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _RENEW_S))
            try:
                held.renew()
            except StepNotFoundError as error:
                said = (
                    f"the lease is lost: {error.message} any more, and what was read may be partial"
                )
                say_error(StepNotFoundError(said, **error.facts))
                raise typer.Exit(1) from error


def record_metrics(
    step: Step,
    values: Annotated[
        list[str], typer.Argument(metavar="NAME=VALUE...", help="Metrics, each a finite number.")
    ],
    root: Root = HERE,
    wait: Wait = 60.0,
) -> None:
    """Add metrics to a checkpoint after its save. Retention decides anew."""
    metrics = _metrics_of(values)
    ask(root, wait, partial(Asked, errand="record_metrics", step=step, metrics=metrics))


def _metrics_of(values: list[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for text in values:
        name, equals, number = text.rpartition("=")
        if not equals or name in found:
            raise typer.BadParameter(f"give NAME=VALUE, each name once: {clean(text)}")
        try:
            found[name] = float(number)
        except ValueError:
            raise typer.BadParameter(f"not a number: {clean(text)}") from None
    return check_metrics(found)


@contextmanager
def owned(
    root: Path, *, ended: bool = False, layout: Layout | None = None
) -> Iterator[tuple[Coordinator, RecoveryReport]]:
    """Open a root with recovery, and close it in order. Retention keeps everything meanwhile.

    ``ended``: a person knows that an owner on another host has ended. Where the disk has no locks, a
    living one would be fenced. ``layout``: that of a root to be made in an empty directory.

    Raises ``RootBusy`` if the owner lives, or may live on another host, and ``ConfigError`` if only a
    trainer can complete a save.
    """
    with opened(root) as storage:
        owner = owner_of(storage)
        if owner.ownership is Ownership.ELSEWHERE and not ended:
            raise RootBusy(
                f"{owner}: if it has ended for certain, give --owner-ended",
                root=storage.root,
                host=owner.host,
                pid=owner.pid,
            )
        coordinator = Coordinator(
            storage,
            clock=SystemClock(),
            identity=this_process(),
            options=CoordinatorOptions(
                layout=layout or look(storage).layout, root_wait_s=0.0, records_policy=False
            ),
            finishers={},
            provenance={},
        )
        report = coordinator.open()
        try:
            yield coordinator, report
        finally:
            coordinator.close()


def ask(root: Path, wait_s: float, request: Callable[..., Asked]) -> None:
    """Have a request, complete but for ``nonce``, ``epoch`` and ``by``, carried out by an owner."""
    by = f"pid {os.getpid()} on {this_process().host}"
    with opened(root) as storage:
        overview = look(storage)
    try:
        epoch = max(overview.owner.epoch, 1)
        asked = request(nonce=uuid.uuid4().hex, epoch=epoch, by=by)
    except ValidationError as error:
        raise ConfigError(first_problem(error)) from error
    if overview.owner.may_live:
        answered = _answer_of_owner(root, overview, asked, wait_s)
        if answered is not None:
            put([clean(answered.words)])
            if answered.kind:
                raise typer.Exit(REFUSED)
            return
        if asked.errand == "prune":  # by the policy of the trainer, which has left
            raise ConfigError(
                "the owner left: give --keep-latest or --keep-every", root=overview.root
            )
    with owned(root) as (coordinator, _):
        put([clean(carry_out(coordinator, asked))])


def _answer_of_owner(
    root: Path, overview: Overview, asked: Asked, wait_s: float
) -> Answered | None:
    """The owner's answer; None if it gave the root back or ended, and had not taken the request."""
    with opened_storage(root) as storage:
        try:
            send(storage, asked)
            answered = _awaited(storage, overview, asked, wait_s)
        except BaseException as error:  # a Ctrl-C: nothing may be done after it
            if not take_back(storage, asked.nonce) and isinstance(error, KeyboardInterrupt):
                say_error(OutcomeUnknown(_TAKEN))
            raise
        if answered is not None:
            return answered
        if take_back(storage, asked.nonce):
            if not owner_of(storage).may_live:  # it closed meanwhile, say
                return None
            _refuse_closed_to_owner(storage)
            raise RootBusy(
                f"no answer, and the request was taken back: {owner_of(storage)}",
                root=overview.root,
            )
        if (answered := _awaited(storage, overview, asked, _LATE_S)) is not None:
            return answered
        raise OutcomeUnknown(_TAKEN)


def _refuse_closed_to_owner(storage: Storage) -> None:
    """Raise ``NotPermitted`` if the user of the root may not write where requests and answers lie.

    A person made these directories, with a umask or a group that keeps that user out.
    """
    private = Path(storage.absolute(PRIVATE)).stat()
    for directory in filter(partial(lookup, storage), (INBOX, ANSWERS)):
        place = storage.absolute(directory)
        found = Path(place).stat()
        shared = found.st_gid == private.st_gid and found.st_mode & stat.S_IWGRP
        if found.st_uid != private.st_uid and not shared:
            repair = f"chgrp {private.st_gid} {place} && chmod g+w {place}"
            said = f"no answer: {place} is user {found.st_uid}'s, and keeps the owner out: {repair}"
            raise NotPermitted(said, file=place, call="request", user=private.st_uid)


def _awaited(storage: Storage, overview: Overview, asked: Asked, wait_s: float) -> Answered | None:
    """The owner's answer. None if none came in time, or if the root has another owner by now."""
    end = time.monotonic() + wait_s
    while (answered := read_answer(storage, asked.nonce)) is None:
        if time.monotonic() >= end or owner_of(storage) != overview.owner:
            return read_answer(storage, asked.nonce)
        time.sleep(_LOOK_S)
    return answered

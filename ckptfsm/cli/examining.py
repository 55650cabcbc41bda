"""``ckptfsm doctor``, and ``ckptfsm runbook``: what to do about a finding, where no repository is."""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from ckptfsm.cli.changing import OwnerEnded, owned
from ckptfsm.cli.reading import HERE, REFUSED, RUNBOOK, Json, Place, Root, opened, url_of
from ckptfsm.cli.terminal import put, put_json
from ckptfsm.core.errors import ConfigError, JournalCorrupt, NewerSchema, RootBusy, describe
from ckptfsm.core.findings import Finding, Severity, examine
from ckptfsm.core.ports import Storage
from ckptfsm.disk.overview import look, owner_of
from ckptfsm.disk.situation import collect
from ckptfsm.views.timeline import clean

_SECOND_LOOK_S = 1.0
_PAGES = Path(__file__).resolve().parents[1] / "runbook"  # in a checkout, a link to docs/runbook
_SECTION = re.compile(r"^## (.*)\n(?:(?!## ).*\n)*", re.M)
_CODE = typer.Argument(help="The code of a finding; without it, where to begin.")
_TO_READ = "to read the contents: ckptfsm verify --all"


def add_to(app: typer.Typer) -> None:
    app.command(epilog="Example: ckptfsm doctor -r runs/demo")(doctor)
    app.command(epilog="Example: ckptfsm runbook disk-full")(runbook)


def doctor(
    place: Place = None,
    root: Root = HERE,
    fix: Annotated[bool, typer.Option("--fix", help="Repair what a start would repair.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --fix: do not ask.")] = False,
    json: Json = False,
    owner_ended: OwnerEnded = False,
) -> None:
    """Find damage, and tell the way out. Exit status 1 if a start cannot repair something.

    --fix opens the root as a start does, and closes it. No complete checkpoint is deleted. Exit status 3
    if that is refused, as beside a living owner.
    """
    root = place or root
    refused = 0
    if url := url_of(root):
        raise ConfigError(
            f"{url} has copies, and is no root: ckptfsm ls {url}, ckptfsm verify {url}. If it was "
            "downloaded to be a root, start the job with it",
            root=url,
        )
    with opened(root) as storage:
        found = findings_of(storage)
        repairs = any(each.severity is not Severity.NOTE for each in found)
        # An owner elsewhere is a note, and keeps every command out until somebody says that it ended.
        if fix and (repairs or (found and owner_ended)):
            put(lines_of(found))
            if not yes and not typer.confirm("Open the root and repair it as a start would?"):
                raise typer.Exit(_status_of(found))
            refused = _fix(root, owner_ended)
            found = findings_of(storage)
    if json:
        put_json([{**asdict(each), "severity": each.severity.value} for each in found])
    else:
        put(lines_of(found))
        if found:
            put([f"by names and sizes; {_TO_READ}"])
        if found and not root.samefile("."):
            put([clean(f"all commands work as printed in the root: cd {quote(str(root))}")])
    raise typer.Exit(_status_of(found) or refused)


def _status_of(found: list[Finding]) -> int:
    return 1 if any(each.severity is Severity.BROKEN for each in found) else 0


def findings_of(storage: Storage) -> list[Finding]:
    """The findings about a root. If an owner may live, it is looked at twice: moves are no damage."""
    found = _once(storage)
    if not found or not owner_of(storage).may_live:
        return found
    time.sleep(_SECOND_LOOK_S)
    seen = {(each.code, each.step) for each in found}  # numbers in the words may differ
    return [each for each in _once(storage) if (each.code, each.step) in seen]


def _once(storage: Storage) -> list[Finding]:
    try:
        return examine(collect(storage, look(storage)))
    except JournalCorrupt as error:
        remedy = "stop the job, copy the root, then: mv .ckptfsm/journal ../old-journal"
        return [Finding("journal-damaged", Severity.BROKEN, error.summary(), remedy)]
    except NewerSchema as error:
        remedy = "use the version of ckptfsm that wrote it, or a newer one"
        return [Finding("written-by-newer-version", Severity.BROKEN, error.summary(), remedy)]


def lines_of(found: list[Finding]) -> list[str]:
    """The findings as lines, safe to print on a terminal."""
    if not found:
        return [f"nothing is wrong ({_TO_READ})"]
    lines = []
    for each in found:
        lines.append(f"{each.severity.value}: {each.words}")
        if each.remedy:
            lines.append(f"    do: {each.remedy}")
        lines.append(f"    see: {RUNBOOK}{each.code}")
    return [clean(line) for line in lines]


def _fix(root: Root, owner_ended: bool) -> int:
    """Open a root as a start does, and close it: recovery repairs, and journals its moves.

    Returns the exit status of a refusal, or 0.
    """
    try:
        with owned(root, ended=owner_ended) as (_, report):
            pass
    except (RootBusy, ConfigError) as error:  # ConfigError: a save needs torch to be completed
        put([clean(f"nothing was done: {describe(error)}")])
        return REFUSED
    done = [f"{each.subject}: {each.result}, because: {each.why}" for each in report.decisions]
    subjects = tuple(f"{each.subject} " for each in report.decisions)
    done += [each for each in report.warnings if not each.startswith(subjects)]
    step = report.latest_step
    latest = "no checkpoint is tracked" if step is None else f"latest: {step}"
    put(clean(line) for line in ("repaired:", *(f"- {line}" for line in done), latest))
    return 0


def runbook(code: Annotated[str | None, _CODE] = None) -> None:
    """Print about a finding: what it means, what is lost, what to do."""
    pages = {page.stem: page.read_text(encoding="utf-8") for page in sorted(_PAGES.glob("*.md"))}
    first = pages.pop("README")
    known = {found[1]: found[0] for page in pages.values() for found in _SECTION.finditer(page)}
    if code is not None and code not in known:
        raise ConfigError(f"nothing about {clean(code)!r}; there are: {', '.join(sorted(known))}")
    put((first if code is None else known[code].rstrip()).splitlines())

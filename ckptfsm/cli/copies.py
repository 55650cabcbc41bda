"""What ``ckptfsm ls`` and ``ckptfsm verify`` tell of a place with copies."""

from __future__ import annotations

from functools import partial

import typer

from ckptfsm.cli.bar import progress_bar
from ckptfsm.cli.terminal import put, put_json
from ckptfsm.core.units import bytes_text
from ckptfsm.places.fetching import CopyFound, choose, copies_in, named_in, problems_of
from ckptfsm.places.place import place_at
from ckptfsm.views.timeline import clean


def list_copies(url: str, *, as_data: bool) -> None:
    """Print the copies in a place, the latest first, then what is not committed."""
    place = place_at(url)
    copies, named = copies_in(place), named_in(place)
    rows = [_row(copy, named) for copy in copies]
    if as_data:
        put_json({"place": place.where, "copies": rows})
        return
    put([clean(f"{place.where}: copies"), ""])
    put([clean(_line(row)) for row in rows] or ["no copies"])


def _row(copy: CopyFound, named: object) -> dict[str, object]:
    manifest = copy.manifest
    return {
        "step": copy.step,
        "state": "copied" if manifest is not None else copy.problem,
        "attempt": str(manifest.of) if manifest is not None else None,
        "files": len(manifest.files) if manifest is not None else None,
        "bytes": sum(entry.bytes for entry in manifest.files) if manifest is not None else None,
        "written_at": manifest.written_at if manifest is not None else None,
        "tracker": copy.step == named,
        "left_behind": copy.left_behind,
    }


def _line(row: dict[str, object]) -> str:
    size, told = row["bytes"], [f"{row['step']:>10}", row["state"]]
    if isinstance(size, int):
        told += [bytes_text(size), row["attempt"], row["written_at"]]
    told += ["tracker"] if row["tracker"] else []
    told += ["left behind by a rollback"] if row["left_behind"] else []
    return "  ".join(map(str, told))


def verify_copies(url: str, step: int | None, *, everything_there: bool, as_data: bool) -> None:
    """Read the latest copy, that of ``step``, or every committed one, and compare the digests."""
    place = place_at(url)
    copies = copies_in(place)
    if everything_there:
        chosen = [copy for copy in copies if copy.data is not None]
    else:
        chosen = [choose(place, copies, step)]
    verdicts = []
    for copy in chosen:
        with progress_bar() as bar:
            files = copy.manifest.files if copy.manifest is not None else ()
            task = bar.add_task(copy.name, total=sum(entry.bytes for entry in files))
            problems = problems_of(place, copy, partial(bar.advance, task))
        verdicts.append({"step": copy.step, "good": not problems, "problems": problems})
        if not as_data:
            put(
                [
                    clean(
                        f"step {copy.step}: {'DAMAGED' if problems else f'good, {len(files)} files'}"
                    )
                ]
            )
            put([clean(f"  {problem}") for problem in problems])
    if as_data:
        put_json(verdicts)
    if not all(verdict["good"] for verdict in verdicts):
        raise typer.Exit(1)

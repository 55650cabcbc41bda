"""``ckptfsm runbook``: the pages for the person who is called at night, where no repository is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptfsm.cli.terminal import put
from ckptfsm.core.errors import ConfigError
from ckptfsm.views.timeline import clean

_PAGES = Path(__file__).resolve().parents[1] / "runbook"  # in a checkout, a link to docs/runbook
_FIRST = "README"


def add_to(app: typer.Typer) -> None:
    app.command(epilog="Example: ckptfsm runbook disk-full")(runbook)


def runbook(
    code: Annotated[
        str, typer.Argument(help="The code of a finding; without it, where to begin.")
    ] = (_FIRST),
) -> None:
    """Print the page of a finding: what it means, how to look, what to do."""
    known = sorted(page.stem for page in _PAGES.glob("*.md") if page.stem != _FIRST)
    if code not in (_FIRST, *known):
        raise ConfigError(f"no page {clean(code)!r}; there are: {', '.join(known)}")
    put((_PAGES / f"{code}.md").read_text(encoding="utf-8").splitlines())

"""``ckptfsm runbook``: what to do about a finding, for the night, where no repository is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from ckptfsm.cli.terminal import put
from ckptfsm.core.errors import ConfigError
from ckptfsm.views.timeline import clean

_PAGES = Path(__file__).resolve().parents[1] / "runbook"  # in a checkout, a link to docs/runbook
_SECTION = re.compile(r"^## (.*)\n(?:(?!## ).*\n)*", re.M)
_CODE = typer.Argument(help="The code of a finding; without it, where to begin.")


def add_to(app: typer.Typer) -> None:
    app.command(epilog="Example: ckptfsm runbook disk-full")(runbook)


def runbook(code: Annotated[str | None, _CODE] = None) -> None:
    """Print about a finding: what it means, what is lost, what to do."""
    pages = {page.stem: page.read_text(encoding="utf-8") for page in sorted(_PAGES.glob("*.md"))}
    first = pages.pop("README")
    known = {found[1]: found[0] for page in pages.values() for found in _SECTION.finditer(page)}
    if code is not None and code not in known:
        raise ConfigError(f"nothing about {clean(code)!r}; there are: {', '.join(sorted(known))}")
    put((first if code is None else known[code].rstrip()).splitlines())

"""The lives of a root's checkpoints, for people: read from the journal, as a table, as a picture.

This package decides nothing and writes nothing to the root.
"""

from __future__ import annotations

from ckptfsm.views.picture import render_html
from ckptfsm.views.reading import Entry, Life, Run, read_lives
from ckptfsm.views.table import render_table
from ckptfsm.views.timeline import describe_end, format_bytes

__all__ = [
    "Entry",
    "Life",
    "Run",
    "describe_end",
    "format_bytes",
    "read_lives",
    "render_html",
    "render_table",
]

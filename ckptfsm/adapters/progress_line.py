"""A line on a terminal that is drawn again and again, with rich.

The cursor rests at the start of the line: output of the trainer goes over it. Nothing of the terminal is
changed, so that a process that is killed leaves no hidden cursor behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.control import Control

_MOST_COLUMNS = 120


class ProgressLine:
    """A line that shows one text at a time. Its calls raise ``OSError`` if the terminal is gone.

    rich is imported when a line is opened: not every trainer has it.
    """

    def __init__(self, console: Console) -> None:
        self._console = console

    @property
    def width(self) -> int:
        """Columns of the terminal, as it is now."""
        return min(self._console.width, _MOST_COLUMNS)

    def draw(self, text: str) -> None:
        """Show ``text`` instead of the last one."""
        with self._console:  # in one write
            self._replace(text, end="")
            self._console.control(_control(erase=False))

    def end(self, text: str) -> None:
        """Show the last text, and go to the next line."""
        with self._console:
            self._replace(text, end="\n")

    def _replace(self, text: str, end: str) -> None:
        from rich.text import Text

        self._console.control(_control(erase=True))
        shown = Text(text)
        shown.highlight_regex(r"#+", "green")
        shown.highlight_regex(r"\.{6,}", "dim")
        self._console.print(shown, end=end, overflow="ignore", no_wrap=True, crop=False)


def _control(*, erase: bool) -> Control:
    """Go to the start of the line, and erase it."""
    from rich.control import Control
    from rich.segment import ControlType

    begin = ControlType.CARRIAGE_RETURN
    return Control(begin, (ControlType.ERASE_IN_LINE, 2)) if erase else Control(begin)


def open_line() -> ProgressLine | None:
    """A line on standard error; None without rich, and where that is no terminal with a cursor."""
    try:
        from rich.console import Console
    except ImportError:  # installed without what it depends on: training goes on
        return None
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    if not console.file.isatty() or not console.is_terminal or console.is_dumb_terminal:
        return None
    return ProgressLine(console)

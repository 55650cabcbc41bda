"""The command line, called in this process: its exit status and its output."""

from __future__ import annotations

from ckptfsm.cli import main


def ran(capsys, *arguments: object) -> tuple[int, str, str]:
    """The exit status, standard output and standard error of a command."""
    status = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return status, out, err


def said(capsys, *arguments: object) -> str:
    """The output of a command that succeeds."""
    status, out, err = ran(capsys, *arguments)
    assert (status, err) == (0, ""), (status, err)
    return out

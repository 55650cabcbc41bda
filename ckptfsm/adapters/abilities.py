"""Abilities that a file system may lack, and its name as the kernel tells it."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptfsm.core.errors import ConfigError

# The answers of file systems that cannot do a call at all. EACCES, EIO or ENOSPC may pass.
_REFUSALS = frozenset(
    {
        errno.EPERM,
        errno.ENOSYS,
        errno.EOPNOTSUPP,
        errno.ENOLCK,
        errno.EINVAL,
        errno.ENOTTY,
        errno.EMLINK,
        errno.EXDEV,
    }
)
_ESCAPE = re.compile(rb"\\([0-7]{3})")  # of a blank, say


@contextmanager
def required(ability: str, root: str) -> Iterator[None]:
    """A block with calls that need ``ability`` below ``root``.

    Raises ``ConfigError`` in the place of an ``OSError`` that says that the file system lacks it.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        name = errno.errorcode[error.errno]
        found = file_system_of(root)
        raise ConfigError(
            f"{found} at {root} has no {ability} ({name}: {os.strerror(error.errno)}), and checkpoints "
            "cannot be kept safely without: use another file system, or another mount option",
            reason="file_system",
            root=root,
            ability=ability,
            errno_name=name,
            file_system=found,
        ) from error


def file_system_of(path: str) -> str:
    """The type of the file system that holds ``path``, such as ``fuse.s3fs``."""
    try:
        table = Path("/proc/self/mountinfo").read_bytes()
    except OSError:  # hidden in some containers
        return "the file system"
    here, best, found = os.fsencode(path), -1, b"the file system"
    for line in table.splitlines():
        fields = line.split(b" ")
        point = _ESCAPE.sub(lambda octal: bytes([int(octal[1], 8)]), fields[4])
        inside = here == point or here.startswith(point.rstrip(b"/") + b"/")
        if inside and len(point) >= best:  # a later mount covers an earlier one
            best, found = len(point), fields[fields.index(b"-") + 1]
    return found.decode("ascii", "backslashreplace")

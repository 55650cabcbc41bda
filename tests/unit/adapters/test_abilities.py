"""The name of a file system, and errors that say that it lacks an ability."""

from __future__ import annotations

import errno
import os

import pytest

from ckptfsm.adapters.abilities import file_system_of, required
from ckptfsm.core.errors import ConfigError


def test_a_file_system_is_named_by_its_type() -> None:
    """Catches: the type of another mount, such as that of the root directory."""
    assert file_system_of("/proc/self/fd") == "proc"
    assert file_system_of("/sys") == "sysfs"
    assert file_system_of("/") == file_system_of("/no/such/directory")


def test_a_mount_point_with_a_blank_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a mount point in octal escapes that no path matches; a mount that another one covers."""
    table = b"".join(
        b"1 0 0:%d / %s rw - %s none rw\n" % row
        for row in enumerate_rows((b"/", b"ext4"), (b"/a\\040b", b"nfs4"), (b"/a\\040b", b"lustre"))
    )
    monkeypatch.setattr("pathlib.Path.read_bytes", lambda path: table)
    assert file_system_of("/a b/run") == "lustre"
    assert file_system_of("/a bc") == "ext4"


def enumerate_rows(*rows: tuple[bytes, bytes]) -> list[tuple[int, bytes, bytes]]:
    return [(number, *row) for number, row in enumerate(rows)]


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EACCES])
def test_an_error_that_may_pass_is_no_lack(code: int) -> None:
    """Catches: the advice to use another file system, because a disk was full for a moment."""
    with pytest.raises(OSError) as caught, required("hard links", "/"):
        raise OSError(code, os.strerror(code))
    assert not isinstance(caught.value, ConfigError)
    assert caught.value.errno == code

"""Calls to the kernel that help, and that no save needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import refused_calls


@pytest.mark.parametrize("code", ["EPERM", "ENOSYS"])
def test_a_seccomp_profile_fails_no_save(tmp_path, code):
    """Catches: a refused ``setpriority``, ``madvise`` or ``fallocate`` that fails every save; a
    ``writer_nice`` that has no effect, and is not told or told with each save."""
    if os.uname().machine not in refused_calls.NUMBERS:
        pytest.skip("the numbers of its system calls are not known here")
    command = [sys.executable, "-m", "refused_calls", str(tmp_path), code]
    here = Path(refused_calls.__file__).parent
    ended = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert [said.partition("(")[0] for said in found["reports"]] == ["ShardReported"] * 4
    assert found["events"] == ["nice_refused"] * 2, "once for each engine"

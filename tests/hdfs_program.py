"""A made-up ``hdfs`` program on a local directory, for tests: what ``hdfs dfs`` does, and says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PROGRAM = r"""#!/bin/bash
# hdfs://host/x is $MADE_UP_HDFS/x. HDFS_FAULT: what goes wrong.
shift
action=$1; shift
echo "2026-01-01 WARN util.NativeCodeLoader: Unable to load native-hadoop library" >&2
echo "$action" >> "$MADE_UP_HDFS.calls"
case "$HDFS_FAULT" in
  away) echo "${action#-}: Call From a/1 to host:8020 failed on connection exception:" \
             "java.net.ConnectException: Connection refused" >&2; exit 1;;
  hung) exec sleep 600;;
esac
here() { echo "$MADE_UP_HDFS${1#hdfs://host}"; }
fail() { echo "${action#-}: \`$1': $2" >&2; exit 1; }
absent() { [ -e "$(here "$1")" ] || fail "$1" "No such file or directory"; }
row='%M   3 a user domain users %s 2026-01-01 12:00 '
case "$action" in
  -mkdir) mkdir -p "$(here "$2")";;
  -ls) deep=1; [ "$1" = -R ] && { deep=9; shift; }
       absent "$1"; [ $deep = 1 ] && echo "Found some items"
       find "$(here "$1")" -mindepth 1 -maxdepth $deep -printf "$row$1/%P\n";;
  -cat) absent "$1"; [ -f "$(here "$1")" ] || fail "$1" "Is a directory"
        if [ "$HDFS_FAULT" = cut ]; then head -c 5 "$(here "$1")"; fail "$1" "Could not obtain block"
        fi; cat "$(here "$1")";;
  -put) [ -d "$(dirname "$(here "$2")")" ] || fail "$2" "No such file or directory: \`$2'"
        [ -e "$(here "$2")" ] && fail "$2" "File exists"
        cat > "$(here "$2")._COPYING_" && mv "$(here "$2")._COPYING_" "$(here "$2")";;
  -mv) absent "$1"; [ -f "$(here "$2")" ] && fail "$2" "File exists"; mv "$(here "$1")" "$(here "$2")";;
  -rm) shift 2; for each; do rm -f "$(here "$each")"; done;;
  -rmdir) shift; for each; do absent "$each"; rmdir --ignore-fail-on-non-empty "$(here "$each")"; done;;
  *) fail "$action" "Unknown command";;
esac
"""


def install_hdfs(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the program into PATH. Returns the directory that is ``hdfs://host``."""
    (place / "bin").mkdir(parents=True)
    program = place / "bin/hdfs"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    (place / "namenode").mkdir()
    monkeypatch.setenv("PATH", f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("MADE_UP_HDFS", str(place / "namenode"))
    return place / "namenode"


def calls_of_hdfs(namenode: Path) -> list[str]:
    """The commands that were called."""
    return Path(f"{namenode}.calls").read_text().split()

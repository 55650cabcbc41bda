"""``ckptfsm ls`` and ``ckptfsm verify`` of a place, which need no root."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runs import ran, said
from copying import Counted, Killed, carry, new_place, root_with

from ckptfsm.cli.reading import url_of


@pytest.fixture
def shown(tmp_path, url, place) -> str:
    """The URL of a place with the steps 10 and 20, and the beginning of 30."""
    storage = root_with(tmp_path / "root", 10, 20, 30)
    carry(place, storage, 10)
    carry(place, storage, 20)
    with pytest.raises(Killed):
        carry(Counted(place, 6), storage, 30)
    storage.close_root()
    return url if "://" in url else f"file://{url}"


def test_ls_tells_what_is_copied_and_what_is_not(shown, capsys):
    """Catches: half a copy that is listed as one, a tracker that is not shown."""
    lines = said(capsys, "ls", shown).splitlines()[2:]
    assert [line.split()[:2] for line in lines] == [
        ["20", "copied"],
        ["10", "copied"],
        ["30", "not"],
    ]
    assert lines[0].endswith("tracker") and "20.e1.a2" in lines[0]
    found = json.loads(said(capsys, "ls", shown, "--json"))["copies"]
    assert [row["bytes"] is None for row in found] == [False, False, True]


def test_verify_reads_every_object_and_compares(shown, place, capsys):
    """Catches: a verdict by size alone, a damaged copy that ends with status 0."""
    assert said(capsys, "verify", shown) == "step 20: good, 5 files\n"
    name = "iter_0000010/__1_0.distcp"
    data = place.read(name)
    place.put(name, iter([data[:-1] + b"?"]), len(data), place.digest(name))
    said(capsys, "verify", shown)
    status, out, _ = ran(capsys, "verify", shown, "--all")
    assert (status, out.splitlines()) == (
        1,
        [
            "step 20: good, 5 files",
            "step 10: DAMAGED",
            "  __1_0.distcp has another content than was written",
        ],
    )
    place.remove(name)
    status, out, _ = ran(capsys, "verify", "10", shown, "--json")
    assert (status, json.loads(out)[0]["problems"]) == (1, ["__1_0.distcp is missing"])
    assert ran(capsys, "verify", "30", shown)[0] == 2, "it was only begun"


def test_a_place_that_is_not_there_is_told(tmp_path, capsys):
    """Catches: an empty list for a place that was not reached."""
    for command in ("ls", "verify"):
        status, _, err = ran(capsys, command, f"file://{tmp_path}/missing")
        assert (status, "mounted on this host" in err) == (1, True)


def test_a_directory_with_copies_is_not_taken_for_a_root(tmp_path, capsys):
    """Catches: advice to repair a place, which would make a root of it."""
    place = tmp_path / "place"
    storage = root_with(tmp_path / "root", 10)
    carry(new_place(place), storage, 10)
    storage.close_root()
    assert said(capsys, "ls", place) == said(capsys, "ls", f"file://{place}")
    assert said(capsys, "verify", place) == "step 10: good, 5 files\n"
    status, _, err = ran(capsys, "doctor", place, "--fix", "--yes")
    assert (status, "is no root" in err) == (2, True)
    assert "iter_0000010" in said(capsys, "tree", tmp_path / "root"), "a root that is copied is one"
    assert "nothing is wrong" in said(capsys, "doctor", tmp_path / "root")


def test_a_url_survives_as_a_path(tmp_path, monkeypatch):
    """Catches: a slash that is lost, a directory that is taken for a URL."""
    for url in ("s3://bucket/a/b", "gs://b", "file:///mnt/run"):
        assert url_of(Path(url)) == url
    assert url_of(Path("runs/demo")) == url_of(Path("/data/s3")) == ""
    monkeypatch.chdir(tmp_path)
    Path("s3:/b").mkdir(parents=True)
    assert url_of(Path("s3://b")) == ""

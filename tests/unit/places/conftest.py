"""Places for the tests: a directory, and where their packages are installed, servers on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from ckptfsm.places.place import CopyPlace, place_at

KINDS: list[object] = ["directory"]
if find_spec("obstore") and find_spec("moto"):
    from s3_servers import Azurite, Moto, lacks_azurite

    why = lacks_azurite()
    KINDS += ["moto", pytest.param("azurite", marks=pytest.mark.skipif(bool(why), reason=why))]


@pytest.fixture(scope="session")
def moto(tmp_path_factory) -> Iterator[object]:
    with Moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def azurite(tmp_path_factory) -> Iterator[object]:
    with Azurite(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture(params=KINDS)
def url(request, tmp_path: Path, monkeypatch) -> str:
    """A place that has nothing yet."""
    if request.param == "directory":
        return str(tmp_path / "place")
    server = request.getfixturevalue(request.param)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server.new_bucket() + "/runs/gpt"


@pytest.fixture
def place(url: str) -> CopyPlace:
    return place_at(url, create=True)

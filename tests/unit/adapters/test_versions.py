"""Which packages are asked for, and the messages about versions that are too old, broken or
untried."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path

import pytest

from ckptfsm.adapters.versions import OLDEST, TRIED, judge, require, series_of
from ckptfsm.core.errors import ConfigError, UntriedVersionWarning

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!;~ ]", each)[0] for each in requirements}


def test_a_plain_install_brings_no_torch():
    """Catches: a download of 3 GB for a user who wants the life cycle or the command line."""
    of_the_command_line = {"typer", "rich"}
    assert names(PROJECT["dependencies"]) == {
        *("pydantic", "transitions", "xxhash", "tomli"),
        *of_the_command_line,
    }


def test_no_extra_holds_back_a_trainers_packages():
    """Catches: an install that takes a trainer's newer torch, megatron-core, Ray or verl away."""
    extras = PROJECT["optional-dependencies"]
    assert {"megatron", "ray", "verl", "nvrx", "testing", "test"} <= set(extras)
    for requirement in (each for extra in extras.values() for each in extra):
        versions = requirement.partition(";")[0]
        assert not re.search(r"(?<![<>=!~])<|==(?!.*\*)|~=", versions), requirement


def test_versions_installed_for_the_tests_were_tried():
    """Catches: a pin that moves on while the list of tried versions does not."""
    pinned = re.findall(
        r"^(torch|megatron-core)==(\S+?);", (ROOT / "constraints.txt").read_text(), re.M
    )
    assert len(pinned) == 4
    for name, version in pinned:
        assert version in TRIED[name], (name, version)


@pytest.mark.parametrize("name", TRIED)
def test_tried_versions_are_taken_silently(name: str):
    """Catches: a warning for everybody; and one for each patch of a release that was tried."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for version in TRIED[name]:
            judge(name, version)
            judge(name, f"{version}+cu130")
            judge(name, ".".join([*version.split(".")[:2], "99rc1"]))
        judge(name, "of a source tree")


@pytest.mark.parametrize("name", TRIED)
def test_an_untried_version_is_taken_with_a_warning(name: str):
    """Catches: the newest release refused; or taken without a word of the versions that were tried."""
    with pytest.warns(UntriedVersionWarning, match=f"{name} 99.1.0 was never tried") as seen:
        judge(name, "99.1.0")
    assert all(version in str(seen[0].message) for version in TRIED[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is for people: no program ends for it
        with pytest.warns(UntriedVersionWarning):
            judge(name, "99.1.0")


@pytest.mark.parametrize("name", OLDEST)
def test_a_version_that_cannot_work_is_refused(name: str):
    """Catches: an AttributeError out of a save instead of the version to install."""
    assert all(series_of(version) >= OLDEST[name] for version in TRIED[name])
    oldest = ".".join(map(str, OLDEST[name]))
    with pytest.raises(ConfigError, match=f"{name} 0.1.0 is too old: install {oldest} or newer"):
        judge(name, "0.1.0")


@pytest.mark.megatron
@pytest.mark.parametrize("version", ["unknown", None, "core_r0.19.0"])
def test_a_version_that_is_no_number_is_judged_by_its_functions(
    version: str | None, monkeypatch: pytest.MonkeyPatch
):
    """Catches: a TypeError, or an older megatron-core that writes what it cannot read."""
    core = pytest.importorskip("megatron.core")
    from ckptfsm.megatron.torch_dist import keeps_common_in_shard

    wanted = keeps_common_in_shard()
    monkeypatch.setattr(core, "__version__", version)
    assert keeps_common_in_shard() is wanted


@pytest.fixture
def ray_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Stands before any package called ``ray``; its content is the test's."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    yield tmp_path / "ray.py"
    sys.modules.pop("ray", None)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("raise ModuleNotFoundError('No module named x', name='x')", r"ckptfsm\[ray\]"),
        ("import pytest.nothing", "pytest .* is there and incomplete: install it anew"),
        ("assert False, 'Minimum required is 0.6.0'", "ray .* cannot be imported: .*0.6.0"),
        ("__version__ = '1.0.0'", "ray 1.0.0 is too old: install 2.40"),
    ],
)
def test_a_package_that_cannot_be_used_is_named(ray_of_ours: Path, content: str, said: str):
    """Catches: a traceback of another package's import, without the package to install."""
    ray_of_ours.write_text(content)
    with pytest.raises(ConfigError, match=said):
        require("ray", extra="ray")

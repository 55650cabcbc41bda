"""The configuration: the values that it takes, those that it refuses, and its messages."""

from __future__ import annotations

import math
import signal
import time
from pathlib import Path

import pytest

from ckptfsm.core.config import (
    CheckpointConfig,
    Settings,
    config_of,
    load_config,
    make_config,
    save_again,
)
from ckptfsm.core.errors import ConfigError
from ckptfsm.core.retention import (
    BestN,
    KeepAll,
    LatestN,
)


def test_defaults():
    """Catches: a default that deletes, that hides a failure, or that resumes from nothing."""
    config = make_config({})
    assert config == CheckpointConfig()
    assert config.retention == KeepAll()
    assert (config.on_failure, config.on_busy, config.resume) == ("raise", "wait", "fallback")
    assert (config.verify, config.takeover, config.sync) == ("digests", False, False)
    assert (config.preemption_signals, config.end_of_allocation) == ((), None)


def test_an_editor_knows_each_setting():
    """Catches: a setting that type checkers refuse as a keyword argument, or that is gone."""
    assert list(Settings.__annotations__) == list(CheckpointConfig.model_fields)


def test_kwargs_dict_and_toml_are_the_same(tmp_path: Path):
    """Catches: a key that one of the three ways reads differently."""
    path = tmp_path / "run.toml"
    path.write_text(
        "[trainer]\nlr = 0.1\n[ckptfsm]\nsave_interval_steps = 100\nsave_steps = [1, 2]\n"
        'on_failure = 3\npreemption_signals = ["SIGTERM"]\nverify = "sizes"\n'
        '[ckptfsm.retention]\nlatest_n = 2\nbest_n = { metric = "loss", n = 3 }\n'
    )
    direct = CheckpointConfig(
        save_interval_steps=100,
        save_steps=frozenset({1, 2}),
        on_failure=3,
        preemption_signals=("SIGTERM",),
        verify="sizes",
        retention=LatestN(2) | BestN("loss", 3),
    )
    values = {
        "save_interval_steps": 100,
        "save_steps": [1, 2],
        "on_failure": 3,
        "preemption_signals": ["SIGTERM"],
        "verify": "sizes",
        "retention": {"latest_n": 2, "best_n": {"metric": "loss", "n": 3}},
    }
    assert load_config(path) == make_config(values) == direct
    assert direct.saves_again == 3


def test_a_file_is_read_as_utf8_whatever_the_locale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Catches: the locale of a node, under which a name in the file is refused, or another name."""
    path = tmp_path / "run.toml"
    path.write_bytes('reshard_drops = ["grün"]\n'.encode())
    asked: list[str] = []
    read_text = Path.read_text

    def watched(self: Path, encoding: str | None = None) -> str:
        asked.append(str(encoding).lower())
        return read_text(self, encoding="utf-8")

    monkeypatch.setattr(Path, "read_text", watched)
    assert load_config(path).reshard_drops == ("grün",)
    assert asked == ["utf-8"]


def test_toml_without_a_table_is_the_whole_file(tmp_path: Path):
    """Catches: a configuration file of ours that is silently taken for empty."""
    path = tmp_path / "ckptfsm.toml"
    path.write_text("save_interval_s = 60\n")
    assert load_config(str(path)).save_interval_s == 60.0


@pytest.mark.parametrize("text", ["save_interval_steps = ", "\xff", "[ckptfsm]\nverify = 1\n"])
def test_a_broken_file_is_named(tmp_path: Path, text: str):
    """Catches: a parser's exception type, or an error that does not say which file."""
    path = tmp_path / "run.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError):
        load_config(path)


def test_a_missing_file_is_named(tmp_path: Path):
    """Catches: defaults in place of the configuration that was asked for."""
    with pytest.raises(ConfigError, match="nowhere.toml") as caught:
        load_config(tmp_path / "nowhere.toml")
    assert caught.value.file.endswith("nowhere.toml")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("save_intervall_steps", "save_interval_steps"),
        ("on_fail", "on_failure"),
        ("retentions", "retention"),
        ("save_interval", "save_interval_s"),
    ],
)
def test_an_unknown_key_names_the_nearest(key: str, meant: str):
    """Catches: a typing error that leaves a job without checkpoints."""
    with pytest.raises(ConfigError, match=rf"{key}.*did you mean '{meant}") as caught:
        make_config({key: 1})
    assert isinstance(caught.value, ValueError) and caught.value.key == key


@pytest.mark.parametrize("values", [{"on_fail": 1}, {"on_busy": "queue"}, {"retention": {}}])
def test_the_class_itself_raises_config_errors(values):
    """Catches: a ``CheckpointConfig(...)`` that raises pydantic's error and not the documented one."""
    with pytest.raises(ConfigError):
        CheckpointConfig(**values)


def test_a_key_near_nothing():
    """Catches: a suggestion that makes no sense."""
    with pytest.raises(ConfigError) as caught:
        make_config({"zzzzqqqq": 1})
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"save_interval_steps": 0},
        {"save_interval_steps": -5},
        {"save_interval_steps": 2.5},
        {"save_interval_s": 0},
        {"save_interval_s": -1.0},
        {"save_interval_s": math.nan},
        {"save_interval_s": math.inf},
        {"writer_timeout_s": 0},
        {"writer_timeout_s": math.inf},
        {"close_timeout_s": "soon"},
        {"on_failure": 0},
        {"on_failure": -1},
        {"on_failure": 10**6},
        {"on_failure": "ignore"},
        {"on_busy": "queue"},
        {"resume": "scratch"},
        {"verify": "sha256"},
        {"retention": {}},
        {"retention": 5},
        {"retention": {"latest_n": "2"}},
        {"retention": {"latest_n": True}},
        {"writer_files": 0},
        {"writer_files": 65},
        {"exchange_every": 0},
        {"poll_warning_steps": 0},
        {"save_steps": ["soon"]},
        {"save_steps": 5},
        {"effect_timeout_s": 600.0, "exchange_timeout_s": 600.0},
        {"effect_timeout_s": 700.0},
    ],
)
def test_nonsense_values_are_refused(values):
    """Catches: a value that would hang, spin, or never save."""
    with pytest.raises(ConfigError):
        make_config(values)


@pytest.mark.parametrize("name", ["SIGNOTHING", "sigterm", "15"])
def test_an_unknown_signal_is_refused(name: str):
    """Catches: a typing error that comes out only when the root is open, as a KeyError."""
    with pytest.raises(ConfigError):
        make_config({"preemption_signals": [name]})


@pytest.mark.parametrize(
    ("key", "one", "way"),
    [
        ("preemption_signals", "SIGTERM", "preemption_signals=('SIGTERM',)"),
        ("preemption_signals", signal.SIGTERM, "preemption_signals=('SIGTERM',)"),
        ("reshard_drops", "loader", "reshard_drops=('loader',)"),
        ("save_steps", 100, "save_steps=(100,)"),
    ],
)
def test_one_value_in_the_place_of_several_is_refused_with_the_right_one(key, one, way):
    """Catches: a person who is told of a tuple, and not how to write it."""
    with pytest.raises(ConfigError) as refused:
        make_config({key: one})
    assert way in str(refused.value)
    (value,) = (one.name if isinstance(one, signal.Signals) else one,)
    assert list(getattr(make_config({key: (value,)}), key)) == [value]


def test_an_end_is_a_time_or_a_function(tmp_path: Path):
    """Catches: a duration that is taken for a time, a number in TOML that is refused."""
    path = tmp_path / "run.toml"
    path.write_text("end_of_allocation = 1700000000\n")
    assert load_config(path).end_of_allocation == 1.7e9
    assert make_config({"end_of_allocation": time.time}).end_of_allocation is time.time
    with pytest.raises(ConfigError, match="Unix time in seconds, not 3600") as caught:
        make_config({"end_of_allocation": 3600})
    assert caught.value.key == "end_of_allocation"


def test_a_configuration_is_frozen():
    """Catches: a manager's rules that change while it uses them."""
    config = make_config({})
    with pytest.raises(ValueError):
        config.on_busy = "skip"


def test_who_needs_agreement():
    """Catches: needless idle exchanges, or timed saves that are never agreed."""
    assert not make_config({"save_interval_steps": 5}).needs_agreement
    assert make_config({"save_interval_s": 5}).needs_agreement
    assert make_config({"preemption_signals": ["SIGTERM"]}).needs_agreement
    assert make_config({"end_of_allocation": 1.7e9}).needs_agreement
    assert make_config({"on_failure": "warn"}).saves_again == 0


def test_save_again_as_a_call_and_as_text():
    """Catches: the two ways to write it that mean different things."""
    assert make_config({"on_failure": save_again(3)}).saves_again == 3
    assert make_config({"on_failure": "save_again(3)"}).saves_again == 3
    assert save_again(1) == 1, "the least is once"


@pytest.mark.parametrize("times", [0, -1, True, 1.5, "2"])
def test_save_again_of_nonsense(times: object):
    """Catches: a retry count of ``True`` that means one."""
    with pytest.raises(ConfigError):
        save_again(times)
    with pytest.raises(ConfigError):
        make_config({"on_failure": "save_again()"})


def test_a_call_takes_a_configuration_or_keyword_arguments():
    """Catches: settings beside a ready configuration that are silently dropped, or it for them."""
    ready = make_config({"on_busy": "skip"})
    assert config_of(ready, {}) is ready
    assert config_of(None, {"on_busy": "skip"}) == config_of({"on_busy": "skip"}, {}) == ready
    assert config_of(None, {}) == make_config({})
    for given in (ready, {"on_busy": "skip"}):
        with pytest.raises(ConfigError, match="either a config or keyword arguments"):
            config_of(given, {"sync": True})


def test_an_instance_validates_as_itself():
    """Catches: a ready configuration that is taken apart when it is passed on."""
    config = make_config({"on_busy": "skip"})
    assert CheckpointConfig.model_validate(config) is config

"""The metrics of a root, from its journal: the numbers of the latest save."""

from __future__ import annotations

from dataclasses import replace

from real_roots import real_root

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.metrics import IN_EXPORT
from ckptfsm.disk.overview import look
from ckptfsm.views.metrics import metrics_of
from ckptfsm.views.reading import read_lives

SECONDS = {"requested": 10, "forked": 12, "shards_written": 14, "finalized": 15, "tracked": 15.5}
NEW_YEAR = 4922899200.0  # 2126-01-01T00:00:00+00:00, after the opening of the root


def test_the_latest_save_has_its_times_and_its_rate(tmp_path):
    """Catches: a rate over the whole save, the time of being tracked among those of the save."""
    storage = PosixStorage(str(real_root(tmp_path, 10)))
    (life,) = read_lives(storage)
    at = {s: f"2126-01-01T00:00:{second:06.3f}+00:00" for s, second in SECONDS.items()}
    life = replace(life, entered=tuple(replace(e, at=at[e.state.value]) for e in life.entered))
    metrics = metrics_of(look(storage), [life], NEW_YEAR + 20, free_bytes=7)
    storage.close_root()
    found = {
        "/".join((metric.name, *labels.values())): value
        for metric in metrics
        for labels, value in metric.values
    }
    assert found["ckptfsm_latest_bytes"] == life.shard_bytes > 0
    assert found["ckptfsm_latest_bytes_per_second"] == life.shard_bytes / 4
    assert found["ckptfsm_latest_age_seconds"] == 4.5
    assert {n: v for n, v in found.items() if n.startswith("ckptfsm_latest_state")} == {
        "ckptfsm_latest_state_seconds/requested": 2,
        "ckptfsm_latest_state_seconds/forked": 2,
        "ckptfsm_latest_state_seconds/shards_written": 1,
        "ckptfsm_latest_state_seconds/finalized": 0.5,
    }
    assert {metric.name for metric in metrics} <= {family.name for family in IN_EXPORT}

"""Megatron-LM's real ``pretrain``, on two CPU ranks over gloo, with the drop-in and without.

Runs with the ``megatron.training`` of the megatron-core package (0.17 or newer), or with a clone of
NVIDIA/Megatron-LM that ``CKPTFSM_MEGATRON_LM`` names and that is first on ``PYTHONPATH``. Stock
code means: ``pretrain`` without ``install``. Every run must go through the very parameters that an
undisturbed run of stock code has: model, optimizer, learning rate, random state and data come back
bit for bit.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

CLONE = os.environ.get("CKPTFSM_MEGATRON_LM")
if not (CLONE or find_spec("megatron") and find_spec("megatron.training")):
    pytest.skip("megatron.training is not there, nor a clone of it", allow_module_level=True)

from cluster import (  # noqa: E402  of tests/megatron, which only run.py puts on the path
    Cluster,
    ForkServer,
    Gate,
    assert_complete,
    path_of,
    states_of,
    steps_on_disk,
    tracked_step,
)
from snapshots import files_of  # noqa: E402

pytestmark = pytest.mark.integration

JOB = Path(__file__).with_name("megatron_lm_job.py")
RAN = ("0.16", "0.17", "0.18", "0.19")
# Since 0.16 stock turns ``--async-save`` off if that stands alone.
ASYNC = "--async-save --use-persistent-ckpt-worker"
MCORE = f"{ASYNC} --async-strategy mcore"
NVRX = f"{ASYNC} --async-strategy nvrx"  # the default since 0.17
TRACKER = "latest_checkpointed_iteration.txt"
Ranks = list[dict[str, Any]]


class Trainer:
    """Runs ``pretrain`` on two ranks; each run is compared with the undisturbed one."""

    def __init__(self, cluster: Cluster, root: Path, undisturbed: dict[str, str]) -> None:
        self.cluster, self.root, self.undisturbed = cluster, root, undisturbed

    def start(self, flags: str, **options: Any) -> Any:
        return self.cluster.start(
            "megatron_lm_job.train", root=str(self.root), flags=flags, **options
        )

    def finish(self, job: Any) -> Ranks:
        ranks: Ranks = job.results()
        for rank in ranks:
            assert rank["digests"].items() <= self.undisturbed.items()
        return ranks

    def __call__(self, flags: str, *, begins: int, **options: Any) -> Ranks:
        """A run that begins from an iteration and ends well."""
        ranks = self.finish(self.start(flags, **options))
        for rank in ranks:
            assert (rank["error"], rank["exit"], rank["start"]) == (None, None, begins)
        return ranks

    def stock(self, flags: str, *, begins: int) -> None:
        self(flags, begins=begins, installed=False)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")  # compiling small functions takes minutes here
        server = ForkServer(JOB)
    yield server
    server.close()


@pytest.fixture
def cluster(server: ForkServer, tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(server, tmp_path / "jobs") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The parameters after each of 12 iterations of stock code."""
    place = tmp_path_factory.mktemp("undisturbed")
    with Cluster(server, place / "jobs") as cluster:
        [digests, others] = [
            rank["digests"]
            for rank in cluster.run(
                "megatron_lm_job.train",
                root=str(place / "root"),
                flags="--train-iters 12 --save-interval 100",
                installed=False,
            )
        ]
    assert digests == others
    assert len(set(digests.values())) == 13
    found: dict[str, str] = digests
    return found


@pytest.fixture
def version(cluster: Cluster) -> str:
    return str(cluster.run("megatron_lm_job.names", ranks=0)[0]["version"])


@pytest.fixture
def train(cluster: Cluster, tmp_path: Path, undisturbed: dict[str, str]) -> Trainer:
    return Trainer(cluster, tmp_path / "root", undisturbed)


def test_everything_that_is_replaced_is_there(cluster: Cluster) -> None:
    """Catches: a test of other code than the clone, a name that Megatron-LM does not have."""
    for rank in cluster.run("megatron_lm_job.names"):
        assert rank["missing"] == []
        assert rank["version"].rpartition(".")[0] in RAN, "what docs/megatron-lm.md says was run"
        for place in (rank["core"], rank["training"]):
            assert CLONE is None or Path(place).is_relative_to(Path(CLONE).absolute())


def test_the_tracker_moves_when_the_writers_are_done_and_retention_follows_it(
    train: Trainer, tmp_path: Path
) -> None:
    """Catches: a tracker that moves at the request, or while a writer writes; a checkpoint that is seen
    before it is complete; retention that is not ``--save-retain-interval``."""
    with closing(Gate(tmp_path / "paused")) as paused, closing(Gate(tmp_path / "on")) as on:
        job = train.start(
            f"--train-iters 10 {ASYNC} --save-retain-interval 4",
            gate=paused.path,
            gated_at=4,
            trained=on.path,
            trained_at=6,
        )
        paused.arrival(job)
        for _ in range(2):
            on.arrival(job)
        assert (tracked_step(train.root), steps_on_disk(train.root)) == (2, [2])
        paused.open()
        on.open(2)
        train.finish(job)
    assert tracked_step(train.root) == 10
    assert states_of(train.root) == {4: "tracked", 8: "tracked", 10: "tracked"}
    assert steps_on_disk(train.root) == [4, 8, 10]


@pytest.mark.parametrize("how", [MCORE, NVRX, "--async-save", ""])
def test_stock_code_resumes_from_our_steps(train: Trainer, how: str) -> None:
    """Catches: a checkpoint that stock code cannot load, or loads incompletely; a last save (7,
    after ``terminate``) that is lost. Also: a synchronous save that returns before it is
    tracked."""
    ranks = train(f"--train-iters 7 {how}", begins=0)
    if ASYNC not in how:
        assert [[rank["tracked"][step] for step in "246"] for rank in ranks] == [
            ["2", "4", "6"]
        ] * 2
    assert tracked_step(train.root) == 7
    for step in (2, 4, 6, 7):
        assert_complete(train.root, step)
    train.stock("--train-iters 10", begins=7)
    assert tracked_step(train.root) == 10
    [ours, stocks] = train.cluster.run(
        "megatron_lm_job.content_metadata", ranks=0, root=str(train.root), steps=[7, 10]
    )[0]
    assert ours == stocks is not None


@pytest.mark.parametrize("how", [MCORE, NVRX, ""])
def test_we_adopt_steps_of_stock_code_and_resume_from_them(train: Trainer, how: str) -> None:
    """Catches: a save directory that is not adopted. Also: a file of it, except the tracker,
    that is written anew, moved or deleted."""
    if how == NVRX and not find_spec("nvidia_resiliency_ext"):
        pytest.skip("stock code needs nvidia-resiliency-ext for this")
    train.stock(f"--train-iters 4 {how}", begins=0)
    before = files_of(train.root)
    train(f"--train-iters 8 {how} --save-retain-interval 4", begins=4)
    after = files_of(train.root)
    assert {name: after.get(name) for name in before} == before
    assert {Path(name).parts[0] for name in after.keys() - before.keys()} == {"iter_0000008"}
    assert states_of(train.root) == {2: "tracked", 4: "tracked", 8: "tracked"}
    assert tracked_step(train.root) == 8
    train("--train-iters 10", begins=8)


def assert_goes_on_from_2(train: Trainer, place: Path, flags: str) -> None:
    """Only iteration 2 is left; stock code resumes from it, and so do we, as far as iteration 6."""
    assert (tracked_step(train.root), steps_on_disk(train.root)) == (2, [2])
    assert_complete(train.root, 2)
    train.stock(f"--train-iters 4 --save {place}/elsewhere", begins=2)
    train(f"--train-iters 6 {flags}", begins=2)
    assert tracked_step(train.root) == 6
    assert_complete(train.root, 6)


def test_a_killed_writer_fails_the_save_on_all_ranks_and_the_older_step_stays(
    train: Trainer, tmp_path: Path
) -> None:
    """Catches: finalizers after a SIGKILL, a rank that waits for ever, an older checkpoint that is
    deleted before the newer one is whole."""
    with closing(Gate(tmp_path / "paused")) as paused:
        job = train.start(
            f"--train-iters 8 {ASYNC} --save-retain-interval 100", gate=paused.path, gated_at=4
        )
        os.kill(paused.arrival(job)["pid"], signal.SIGKILL)
        for rank in train.finish(job):
            assert rank["error"]["type"] == "WriterDied"
            assert rank["error"]["facts"]["step"] == 4
    assert_goes_on_from_2(train, tmp_path, ASYNC)
    assert steps_on_disk(train.root) == [2, 4, 6]


@pytest.mark.parametrize("how", [ASYNC, ""])
def test_a_job_that_is_killed_in_the_middle_of_a_save_goes_on_from_the_one_before(
    train: Trainer, tmp_path: Path, how: str
) -> None:
    """Catches: half a checkpoint that stock code or ours finds; a later save of the same
    iteration that is refused. Also: anything deleted before the newer one is tracked."""
    flags = f"{how} --save-retain-interval 100"
    with closing(Gate(tmp_path / "paused")) as paused:
        job = train.start(f"--train-iters 8 {flags}", gate=paused.path, gated_at=4)
        paused.arrival(job)
        for rank in (0, 1):
            job.kill(rank)
        job.wait()
    assert_goes_on_from_2(train, tmp_path, flags)
    assert steps_on_disk(train.root) == [6]


@pytest.mark.parametrize("how", [ASYNC, ""])
def test_a_signal_saves_and_ends_the_job(train: Trainer, tmp_path: Path, how: str) -> None:
    """Catches: a save at a preemption (``--exit-signal-handler``) that the end of the job cuts off."""
    with closing(Gate(tmp_path / "on")) as on:
        job = train.start(
            f"--train-iters 8 {how} --exit-signal-handler", trained=on.path, trained_at=3
        )
        for rank in (0, 1):
            on.arrival(job)
            job.kill(rank, signal.SIGTERM)
        on.open(2)
        for rank in train.finish(job):
            assert (rank["error"], rank["exit"]) == (None, 0)
    assert (tracked_step(train.root), steps_on_disk(train.root)) == (3, [2, 3])
    train.stock("--train-iters 5", begins=3)


def test_the_integrity_of_loaded_files_is_verified(train: Trainer, version: str) -> None:
    """Catches: ``--verify-integrity`` that refuses our checkpoints, which have no file of hashes, or
    that believes them; a checkpoint of stock code with such a file that is in our way."""
    if version < "0.17":
        pytest.skip("this trainer has no such option")
    asked = "--verify-integrity"
    train.stock(f"--train-iters 2 {asked}", begins=0)
    assert (path_of(train.root, 2) / "integrity.json").exists()
    train(f"--train-iters 4 {asked}", begins=2)
    train(f"--train-iters 6 {asked} {ASYNC}", begins=4)
    assert states_of(train.root) == {2: "tracked", 4: "tracked", 6: "tracked"}
    shard = max(path_of(train.root, 6).glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    for rank in train.finish(train.start(f"--train-iters 8 {asked}")):
        assert rank["error"]["type"] == "DamagedRoot"
        assert shard.name in rank["error"]["text"]


@pytest.mark.parametrize("how", [MCORE, NVRX])
def test_the_queue_alone_stays_where_pretrain_looks(train: Trainer, version: str, how: str) -> None:
    """Catches: a queue of ours that ``pretrain`` silently replaces by a stock one when it starts."""
    if how == NVRX and not find_spec("nvidia_resiliency_ext"):
        pytest.skip("stock code needs nvidia-resiliency-ext for this")
    if version < "0.17":
        pytest.skip("there the queue is megatron-core's")
    for rank in train(f"--train-iters 6 {how}", begins=0, installed=False, queue=True):
        assert rank["writers"] == 3
    assert tracked_step(train.root) == 6
    train.stock("--train-iters 8", begins=6)


@pytest.mark.parametrize("text", ["", "\x00\x00"])
def test_a_torn_tracker_is_mended_before_the_load(train: Trainer, text: str) -> None:
    """Catches: a run that a torn tracker ends with status 0, as in the first half with stock code."""
    train(f"--train-iters 4 {ASYNC}", begins=0)
    (train.root / TRACKER).write_text(text)
    for rank in train.finish(train.start("--train-iters 6", installed=False)):
        assert (rank["exit"], rank["start"]) == (0, None)
    assert (train.root / TRACKER).read_text() == text
    train(f"--train-iters 6 {ASYNC}", begins=4)
    assert tracked_step(train.root) == 6


def test_a_non_persistent_checkpoint_is_found_by_stock_code(train: Trainer, tmp_path: Path) -> None:
    """Catches: another directory than the one that stock code reads, or one that keeps more than
    the last; one that is copied over the run's own copies.
    """
    fast = "--save-interval 4 --non-persistent-save-interval 1 --non-persistent-ckpt-type global"
    copies = tmp_path / "copies"
    copies.mkdir()
    train(f"--train-iters 6 {ASYNC} {fast}", begins=0, place=str(copies))
    assert steps_on_disk(copies) == [4, 6]
    place = train.root / "non_persistent"
    assert (tracked_step(place), steps_on_disk(place)) == (6, [6])
    for step in (4, 6):
        path_of(train.root, step).rename(train.root / f"gone_{step}")
    train.stock(f"--train-iters 8 {fast}", begins=6)


def test_a_lost_machine_goes_on_from_a_copy(train: Trainer, tmp_path: Path) -> None:
    """Catches: a trainer that looks for its checkpoints before they are fetched."""
    copies = tmp_path / "copies"
    copies.mkdir()
    train(f"--train-iters 4 {ASYNC} --save-interval 2", begins=0, place=str(copies))
    shutil.rmtree(train.root)
    train(f"--train-iters 6 {ASYNC} --save-interval 2", begins=4, place=str(copies))


def test_a_local_checkpoint_is_found_by_stock_code(train: Trainer, tmp_path: Path) -> None:
    """Catches: a request for the ranks' local disks that is not finalized, or is taken for a
    checkpoint of ``--save``."""
    if not find_spec("nvidia_resiliency_ext"):
        pytest.skip("local checkpoints need nvidia-resiliency-ext")
    fast = (
        "--save-interval 4 --non-persistent-save-interval 1 --non-persistent-ckpt-type local "
        f"--non-persistent-local-ckpt-dir {tmp_path / 'local'}"
    )
    train(f"--train-iters 6 {ASYNC} {fast}", begins=0)
    assert states_of(train.root) == {4: "tracked", 6: "tracked"}
    for step in (4, 6):
        path_of(train.root, step).rename(train.root / f"gone_{step}")
    train.stock(f"--train-iters 8 {fast}", begins=6)


@pytest.mark.parametrize(
    "split",
    ["--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2 --num-layers 2"],
)
def test_a_model_that_is_split_over_the_ranks_comes_back(
    cluster: Cluster, tmp_path: Path, split: str
) -> None:
    """Catches: shards that are lost or swapped where each rank has different parameters."""

    def digests(place: str, flags: str, installed: bool) -> list[dict[str, str]]:
        ranks = cluster.run(
            "megatron_lm_job.train",
            root=str(tmp_path / place),
            flags=f"{flags} {split}",
            installed=installed,
        )
        return [rank["digests"] for rank in ranks]

    whole = digests("undisturbed", "--train-iters 6 --save-interval 100", installed=False)
    assert not whole[0].items() & whole[1].items()
    begun = digests("root", f"--train-iters 4 {ASYNC}", installed=True)
    resumed = digests("root", "--train-iters 6", installed=False)
    assert [list(rank) for rank in resumed] == [["4", "5", "6"]] * 2
    assert [{**a, **b} for a, b in zip(begun, resumed, strict=True)] == whole

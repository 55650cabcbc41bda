"""Files of ``torch.save`` as images: the same bytes, whose data is read behind the training."""

from __future__ import annotations

import collections
import io
import pickle
import tempfile
import weakref
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from devices import LARGE, FakeDevice  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils.serialization import config  # noqa: E402

from ckptfsm.adapters.memory import OwnMemory  # noqa: E402
from ckptfsm.adapters.posix_storage import PosixStorage  # noqa: E402
from ckptfsm.core.errors import ConfigError, RestoreFailed, SaveRefused  # noqa: E402
from ckptfsm.core.images import SMALL_BYTES, Literal, Memory  # noqa: E402
from ckptfsm.core.layout import staging_dir  # noqa: E402
from ckptfsm.core.parts import AttemptId, PartSpec, Planned  # noqa: E402
from ckptfsm.core.ports import RankJob  # noqa: E402
from ckptfsm.dcp import images, torch_file  # noqa: E402
from ckptfsm.dcp.blobs import Templates  # noqa: E402
from ckptfsm.dcp.checkpoint_manager import GroupWorker  # noqa: E402
from ckptfsm.dcp.device_copies import DeviceCopies  # noqa: E402
from ckptfsm.dcp.images import Held, Owners  # noqa: E402
from ckptfsm.dcp.state_format import Staging  # noqa: E402
from ckptfsm.dcp.torch_file import (  # noqa: E402
    TorchFile,
    TorchFilePlan,
    TorchFiles,
    load_torch_file,
)
from ckptfsm.ranks.controller import Controller  # noqa: E402
from ckptfsm.ranks.tickets import GroupPart  # noqa: E402
from ckptfsm.testing.simfs import SimDisk, SimStorage  # noqa: E402
from ckptfsm.writers.image import ImagePart, InlineChunks, write_image  # noqa: E402
from ckptfsm.writers.write_engine import WriteEngine, WriteEngineSettings  # noqa: E402

OF = AttemptId(5, 1, 1)
LOCATION = staging_dir(OF)
NAME = "model.pt"
FP8 = tuple(
    getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)
)
DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.bool),
    *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.uint16),
    *FP8,
)


class Sub(torch.Tensor):
    """A class of tensors."""


def marked(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with an attribute that is pickled."""
    found = tensor.detach()
    found.mark = tensor
    return found


VIEWS = {
    "whole": lambda t: t,
    "detached": lambda t: t.detach(),
    "rows": lambda t: t[1:],
    "transposed": lambda t: t.reshape(-1, 1).t(),
    "strided": lambda t: t[::2],
    "expanded": lambda t: t[:1].expand(3) if t.numel() else t,
    "clone": lambda t: t.clone(),
    "sparse": lambda t: torch.eye(3).to_sparse(),
    "nested": lambda t: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]),
    "meta": lambda t: t.to("meta"),
    "lazy": lambda t: torch.nn.parameter.UninitializedParameter(),
    "quantized": lambda t: torch.quantize_per_tensor(torch.ones(9), 0.1, 0, torch.qint8),
    "subclass": lambda t: t.as_subclass(Sub),
    "marked": marked,
    "conjugate": lambda t: t.conj() if t.is_complex() else t,
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=t.is_floating_point()),
    "needs grad": lambda t: t.clone().requires_grad_(t.is_floating_point()),
    "typed storage": lambda t: torch.ones(t.numel()).storage(),
    "storage": lambda t: t.clone().view(torch.uint8).untyped_storage(),
}
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()


@st.composite
def objects(draw):
    """A nest of dicts, lists and tuples, whose tensors share a few storages."""
    bases = []
    for dtype in draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=4)):
        size = draw(st.sampled_from([0, 1, 5, 16, 1000]))
        data = torch.arange(size * dtype.itemsize) % (2 if dtype is torch.bool else 251)
        bases.append(data.to(torch.uint8).view(dtype))
    views = st.builds(
        lambda index, kind: VIEWS[kind](bases[index]),
        st.integers(0, len(bases) - 1),
        st.sampled_from([*VIEWS]),
    )
    return draw(
        st.recursive(
            views | PLAIN,
            lambda inner: (
                st.lists(inner, max_size=5)
                | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=5)
                | st.tuples(inner, inner)
                | st.lists(st.tuples(st.text(), inner)).map(collections.OrderedDict)
            ),
            max_leaves=15,
        )
    )


def planned(obj: object, *, weights_only: bool | None = False) -> TorchFilePlan:
    return TorchFiles(Templates()).plan(NAME, TorchFile(obj, weights_only))


def staged(obj: object, held: Held | None = None, plan: TorchFilePlan | None = None) -> ImagePart:
    plan = plan or planned(obj)
    spec = PartSpec(NAME, TorchFiles.format.name)
    held = held or Held()
    buckets = plan.buckets(0, Planned(b""))
    return plan.stage(Staging(spec, 0, "", Planned(b""), buckets, Templates(), held, ()))


def written(part: ImagePart) -> bytes:
    """The bytes of the file that a writer makes of the part."""
    storage = SimStorage(SimDisk(), "p1")
    (image,) = part.images
    entry = write_image(storage, "", image, InlineChunks(OwnMemory()))
    assert entry.digest == storage.digest(NAME)
    return storage.read(NAME, 1 << 40)


def saved(obj: object) -> bytes:
    """The bytes of the file that ``torch.save`` makes."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, NAME)
        torch.save(obj, path)
        return path.read_bytes()


def memory_of(part: ImagePart) -> list[Memory]:
    return [piece for piece in part.images[0].pieces if isinstance(piece, Memory)]


@pytest.fixture(scope="module")
def group():
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300))
    return model, stepped(model)


def stepped(model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    optimizer.step()
    return optimizer


# ----------------------------------------------------------------------------------------- bytes


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated", "ignore:.*torch.nested")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:Sparse")
@given(obj=objects())
def test_the_file_is_what_torch_save_writes(obj):
    """Catches: a storage in the record of another, a checksum of other data, a view without the rest
    of its storage, an empty record that counts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "SMALL_BYTES", 16)
        assert written(staged(obj)) == saved(obj)


def test_a_state_of_a_module_and_its_optimizer_is_read_behind_the_training():
    """Catches: a state that is copied while the trainer waits; shared tensors that are written twice."""
    model, optimizer = trained()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "same": model[0].weight,
    }
    part = staged(state)
    sizes = [memory.size for memory in memory_of(part) if not memory.early]
    assert sizes == [300 * 300 * 4] * 3
    assert all(memory.mutable for memory in memory_of(part))
    assert written(part) == saved(state)


def test_a_state_of_dtensors_is_that_of_torch_save(group):
    """Catches: a rank's file of FSDP that is copied, or has the memory of the wrapper."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(300, 300)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = stepped(model)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    part = staged(state)
    large = [memory.size for memory in memory_of(part) if not memory.early]
    assert large == [300 * 300 * 4] * 3
    assert written(part) == saved(state)


def test_a_sharded_tensor_is_read_behind_the_training(group):
    """Catches: a rank's file of the first FSDP that is copied while the trainer waits."""
    from torch.distributed._shard import sharded_tensor

    local = torch.ones(300, 300)
    shard = sharded_tensor.Shard.from_tensor_and_offsets(local, [0, 0], 0)
    state = {"w": sharded_tensor.init_from_local_shards([shard], 300, 300)}
    part = staged(state)
    assert [memory.address for memory in memory_of(part)] == [local.data_ptr()]
    assert written(part) == saved(state)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_storage_of_its_own_has_its_own_data():
    """Catches: the memory of the tensor before it, which has no record."""
    obj = [torch.empty(LARGE, device="meta"), torch.ones(LARGE).storage()]
    assert written(staged(obj)) == saved(obj)


class SavesItself:
    """Pickles the bytes of a ``torch.save`` of its own."""

    def __getstate__(self) -> bytes:
        file = io.BytesIO()
        torch.save(torch.arange(100.0), file)
        return file.getvalue()

    def __setstate__(self, state: bytes) -> None:
        self.tensor = torch.load(io.BytesIO(state))


def test_an_object_that_calls_torch_save_keeps_its_data():
    """Catches: zeros in the place of an object's own data, as torch skips that of all tensors."""
    obj = [torch.ones(3), SavesItself()]
    file = written(staged(obj))
    assert file == saved(obj)
    loaded = torch.load(io.BytesIO(file), weights_only=False)
    assert torch.equal(loaded[1].tensor, torch.arange(100.0))


@pytest.mark.parametrize("size", [4 << 20, (4 << 20) + 100])
def test_a_writer_process_writes_the_same(tmp_path, size):
    """Catches: pieces that do not reach the writer's process whole; a record on the edge of chunks."""
    obj = {"a": torch.arange(size // 4), "b": torch.ones(size // 8), "c": 3}
    (tmp_path / LOCATION).mkdir(parents=True)
    storage = PosixStorage(tmp_path)
    engine = WriteEngine(WriteEngineSettings(mode="gated"))
    engine.expect_gate()
    try:
        process = engine(storage, RankJob(OF, 0, 1, LOCATION, (staged(obj),)))
        process.await_copy(60)
        process.confirm()
        outcome = process.wait(60)
        assert outcome is not None and outcome.succeeded, outcome
    finally:
        engine.close()
        storage.close_root()
    assert (tmp_path / LOCATION / NAME).read_bytes() == saved(obj)
    loaded = load_torch_file(NAME, TorchFile(None), str(tmp_path / LOCATION))
    assert torch.equal(loaded["b"], obj["b"])


def test_a_worker_of_a_group_has_files_of_its_own(tmp_path):
    """Catches: a file that is not torch's, because torch names its records after the file; a copy
    that is not yet taken when ``write`` returns; a worker that finds no file of its own again."""
    model, worker = torch.ones(LARGE), GroupWorker(tmp_path / "root")
    with Controller(tmp_path / "root", {"actor": 1}, worker.poll) as controller:
        save = controller.begin(5, {"actor": GroupPart("actor")})
        files = {"model_0.pt": TorchFile({"w": model}), "note.txt": b"one"}
        torch.save({"w": model}, tmp_path / "model_0.pt")
        controller.feed(worker.write(save.tickets["actor"], parts=files))
        model.zero_()
        save.handle.wait()
        with controller.reading() as found:
            wanted = {"model_0.pt": TorchFile(None), "note.txt": b""}
            restored = worker.restore(found, "actor", parts=wanted)
    worker.close()
    assert restored.parts["note.txt"] == b"one" and bool(restored.parts["model_0.pt"]["w"].all())
    there = Path(restored.directory, "actor/model_0.pt").read_bytes()
    assert there == (tmp_path / "model_0.pt").read_bytes()


def test_a_state_is_let_go_of_with_its_save():
    """Catches: memory of an old state that stays until the next collection of garbage."""
    tensor = torch.arange(LARGE)
    left, part = weakref.ref(tensor), staged([tensor])
    del part, tensor
    assert left() is None


# --------------------------------------------------------------------------------- what is copied


def other_numbers(*args):
    raise KeyError("data/7")


SURPRISES = {
    "no records": lambda patch: patch.setattr(torch_file, "template_of", other_numbers),
    "no numbers": lambda patch: patch.setattr(torch_file._Numbering, "numbered", lambda *_: None),
    "other bytes": lambda patch: patch.setattr(
        torch_file._Storage, "copied", lambda self: bytes(self.storage.nbytes())
    ),
}


@pytest.mark.parametrize("surprise", SURPRISES)
def test_a_torch_that_surprises_is_left_to_itself(monkeypatch, surprise):
    """Catches: a file put together by the rules of an older torch."""
    SURPRISES[surprise](monkeypatch)
    obj = {"a": torch.arange(LARGE), "b": torch.ones(3)}
    part = staged(obj)
    assert [type(piece) for piece in part.images[0].pieces] == [Literal]
    assert written(part) == saved(obj)


def test_without_checksums_torch_writes():
    """Catches: checksums in a file where torch is told to write none."""
    obj = [torch.arange(LARGE)]
    with config.patch({"save.compute_crc32": False}):
        assert written(staged(obj)) == saved(obj)


def test_a_small_tensor_is_read_before_the_save_returns():
    """Catches: buffers that a forward pass changed, in the file of the save before, or that fail it."""
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    held = Held()
    part = staged(state, held)
    assert all(memory.early == (memory.size < SMALL_BYTES) for memory in memory_of(part))
    assert written(part) == saved(state)
    model[1].running_mean.add_(1)
    model[1].num_batches_tracked.add_(1)
    assert held.changed() == ""


def test_memory_that_others_may_change_is_copied():
    """Catches: memory that a fork does not freeze, read while another process changes it."""
    shared = torch.arange(LARGE).share_memory_()
    held = Held()
    part = staged([shared], held)
    assert [memory.mutable for memory in memory_of(part)] == [False]
    wanted = saved([shared])
    shared.add_(1)
    assert held.changed() == ""
    assert written(part) == wanted


def test_a_state_that_nobody_promised_is_read_early():
    """Catches: the trainer's memory that is read after ``save``, without a promise that it stays."""
    promised, other = torch.arange(LARGE), torch.arange(LARGE)
    held = Held(Owners([promised]), promises_all=False)
    part = staged([promised, other], held)
    assert [memory.early for memory in memory_of(part)] == [False, True]


# ---------------------------------------------------------------------------- what changes too early

CHANGES = {
    "tensor": (lambda t: t, lambda t: t.add_(1)),
    "a view in the state": (lambda t: t[5:].t(), lambda t: t.add_(1)),
    "a view of the trainer": (lambda t: t, lambda t: t[3:].zero_()),
    "parameter": (torch.nn.Parameter, lambda p: torch.no_grad()(p.add_)(1)),
    "another tensor of the storage": (lambda t: [t[:5], t.detach()], lambda t: t.add_(1)),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_before_the_writer_has_read_it_is_found(kind):
    """Catches: a torn file that is tracked."""
    make, change = CHANGES[kind]
    base = torch.zeros(LARGE)
    obj, held = make(base), Held()
    staged({"x": obj}, held)
    assert held.changed() == ""
    change(obj if kind == "parameter" else base)
    assert NAME in held.changed()
    assert "was changed before the writer had read" in held.changed()


def test_a_change_of_a_dtensor_is_found(group):
    """Catches: a change that torch counts at the wrapper only."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    tensor = distribute_tensor(torch.zeros(LARGE), init_device_mesh("cpu", (1,)))
    held = Held()
    staged([tensor], held)
    assert held.changed() == ""
    tensor.add_(1)
    assert "was changed" in held.changed()


def test_a_step_of_an_optimizer_is_found():
    """Catches: an update of DTensors with ``foreach``, of which torch counts that of the steps alone."""
    step = torch.zeros(())
    held = Held()
    staged([step], held)
    step.add_(1)
    assert "was changed" in held.changed()


def test_the_state_of_an_accelerator_is_copied_beside_the_training():
    """Catches: a trainer that waits for the copy of a file's tensors; an update that is in the file."""
    device, held = FakeDevice(), Held()
    base = device.tensor(LARGE + 10)
    state = {"view": base[5:], "parameter": torch.nn.Parameter(base), "host": torch.ones(LARGE)}
    wanted = saved(state)
    copies = DeviceCopies(device.find, lambda: 1 << 40)
    plan = planned(state)
    [bucket] = plan.buckets(0, Planned(b""))
    held.device = copies.new_copy([value for _, value in bucket])
    part = staged(state, held, plan)
    assert [memory.mutable for memory in memory_of(part)] == [False, True]
    assert part.copying is held.device
    held.device.start()
    held.device.order_updates()
    device.launch(lambda: base.add_(1))
    assert held.changed() == ""
    device.run()
    assert held.device.done()
    assert written(part) == wanted
    held.clear()
    copies.close()


# -------------------------------------------------------------------------------- saving and loading


def test_what_torch_cannot_save_is_refused():
    """Catches: an error without the part, after the save began."""
    with pytest.raises(
        SaveRefused, match=r"'model\.pt': torch.save cannot save .*lambda"
    ) as caught:
        staged([torch.ones(3), lambda: 1])
    assert caught.value.part == NAME


class Settings:
    """A class that ``torch.load`` does not allow."""


def test_I12_an_object_that_could_not_be_loaded_again_is_refused():
    """Catches: a checkpoint of a month whose only copy ``torch.load`` refuses."""
    obj = {"a": torch.ones(3), "settings": [Settings()]}
    with pytest.raises(SaveRefused, match=r"obj\['settings'\]\[0\].*add_safe_globals") as caught:
        planned(obj, weights_only=None)
    assert (caught.value.part, caught.value.key) == (NAME, "obj['settings'][0]")
    assert written(staged(obj)) == saved(obj)


def test_I12_a_state_that_torch_load_takes_is_saved(group):
    """Catches: a refusal of the tensors that only a rank of FSDP has, or that have no values."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    model, optimizer = trained()
    obj = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "local": distribute_tensor(torch.zeros(LARGE), mesh, [Shard(0)]),
        "meta": torch.empty(3, device="meta"),
        "parameter": model[0].weight,
        "size": torch.Size([1]),
    }
    part = staged(obj, plan=planned(obj, weights_only=None))
    assert written(part) == saved(obj)


def test_a_class_is_loaded_if_the_user_trusts_the_file(tmp_path):
    """Catches: a refusal that says nothing of the way out."""
    torch.save({"a": Settings()}, tmp_path / NAME)
    with pytest.raises(RestoreFailed, match=r"weights_only=False.*add_safe_globals") as caught:
        load_torch_file(NAME, TorchFile(None), str(tmp_path))
    assert (caught.value.part, caught.value.file) == (NAME, str(tmp_path / NAME))
    loaded = load_torch_file(NAME, TorchFile(None, weights_only=False), str(tmp_path))
    assert isinstance(loaded["a"], Settings)


@pytest.mark.parametrize(
    "content", [b"", b"text", pickle.dumps([1], 2)], ids=["empty", "text", "pickle"]
)
def test_a_file_of_something_else_is_refused(tmp_path, content):
    """Catches: an error of torch that names no part."""
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(RestoreFailed, match=r"part 'model\.pt'.*give b\"\""):
        load_torch_file(NAME, TorchFile(None), str(tmp_path))


def test_tensors_come_where_the_user_wants_them(tmp_path):
    """Catches: a map location that is not used."""
    torch.save(torch.ones(3), tmp_path / NAME)
    assert load_torch_file(NAME, TorchFile(None), str(tmp_path)).device.type == "cpu"
    on_meta = TorchFile(None, map_location="meta")
    assert load_torch_file(NAME, on_meta, str(tmp_path)).device.type == "meta"


def test_other_values_are_no_torch_file():
    """Catches: bytes that are pickled."""
    assert [TorchFiles(Templates()).takes(value) for value in (TorchFile(1), b"", {})] == [1, 0, 0]


def test_a_torch_file_in_a_state_is_refused():
    """Catches: a file that never comes to be, as it is pickled like any value."""
    with pytest.raises(ConfigError, match="give it in parts="):
        torch.save({"model": TorchFile(1)}, io.BytesIO())


def test_ranks_that_give_other_values_are_told():
    """Catches: another rank's generator that is lost in silence; tensors of gigabytes that are read."""
    large, small = torch.zeros(LARGE), torch.zeros(3)
    own = planned({"large": large, "small": small, "step": 1}).digests()
    others = planned({"large": large + 1, "small": small + 1, "step": 2}).digests()
    assert {key for key in own if own[key] != others[key]} == {"small", "step"}
    assert planned({"large": large[1:]}).digests()["large"] != own["large"]


def test_ranks_that_give_their_shards_one_name_are_told(group, monkeypatch):
    """Catches: the shards of all ranks but one that are lost in silence."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    obj = {
        "shard": distribute_tensor(torch.zeros(4), mesh, [Shard(0)]),
        "replica": distribute_tensor(torch.zeros(4), mesh, [Replicate()]),
    }
    own = planned(obj).digests()
    monkeypatch.setattr(DeviceMesh, "get_coordinate", lambda mesh: [1])
    others = planned(obj).digests()
    assert {key for key in own if own[key] != others[key]} == {"shard"}

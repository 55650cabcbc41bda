"""Tensors that are moved into shared memory in place."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from ckptfsm import CheckpointManager, GroupWorker  # noqa: E402
from ckptfsm.adapters.segments import is_in_segment  # noqa: E402
from ckptfsm.core.errors import ConfigError  # noqa: E402
from ckptfsm.dcp.images import to_host  # noqa: E402
from ckptfsm.dcp.shared_memory import move_to_shared_memory, tensors_of  # noqa: E402
from ckptfsm.megatron.foreign import _private  # noqa: E402
from ckptfsm.writers.write_engine import WriteEngine  # noqa: E402

LARGE = 1 << 16


def moved(tensor: torch.Tensor) -> bool:
    return is_in_segment(tensor.data_ptr())


def test_an_optimizer_computes_on_in_shared_memory():
    """Catches: a step that makes other tensors; a parameter that is another object, has lost its
    gradient, or has other values than without this."""
    weights = []
    for shared in (False, True):
        torch.manual_seed(1)
        weight = torch.nn.Parameter(torch.randn(LARGE))
        optimizer = torch.optim.Adam([weight])
        for _ in range(3):
            optimizer.zero_grad()
            (weight * torch.randn(LARGE)).sum().backward()
            if shared and not moved(weight) and optimizer.state:
                before = [id(tensor) for tensor in tensors_of(optimizer)]
                segment = move_to_shared_memory(tensors_of(optimizer))
                assert segment.size == 3 * LARGE * 4
                assert [id(tensor) for tensor in tensors_of(optimizer)] == before
                assert weight.requires_grad and weight.is_leaf and weight.grad is not None
            optimizer.step()
        weights.append(weight)
    assert moved(weights[1])
    assert all(moved(t) for t in tensors_of(optimizer) if t.numel() > 1)
    assert torch.equal(*weights)


def test_tensors_that_share_memory_still_do():
    """Catches: tied weights that drift apart; a view with other strides."""
    whole = torch.randn(256, LARGE // 256)
    views = [whole.t(), whole[3:5], whole.view(torch.int32)]
    wanted = [view.clone() for view in views]
    assert move_to_shared_memory([views[1], whole, *views]) is not None
    for view, values in zip(views, wanted, strict=True):
        assert moved(view)
        assert torch.equal(view, values)
        assert view.stride() == values.stride() or view is views[0]
    whole.zero_()
    assert not any(view.any() for view in views)


def test_tensors_that_cannot_be_moved_stay():
    """Catches: a part of a larger memory that is torn out of it; memory that is shared already."""
    flat = torch.randn(4 * LARGE)
    stay = [
        flat[:LARGE],
        flat[2 * LARGE :],
        torch.randn(2 * LARGE)[:LARGE],
        torch.randn(2 * LARGE)[LARGE:],
        torch.randn(4),
        torch.randn(LARGE).share_memory_(),
        torch.randn(LARGE, dtype=torch.complex64).conj(),
        torch.eye(4).to_sparse(),
        torch.empty(LARGE, device="meta"),
    ]
    places = [tensor.data_ptr() if tensor.layout is torch.strided else 0 for tensor in stay]
    assert move_to_shared_memory(stay) is None
    found = [tensor.data_ptr() if tensor.layout is torch.strided else 0 for tensor in stay]
    assert found == places
    gone = torch.randn(LARGE)
    assert move_to_shared_memory([gone]) is not None
    assert move_to_shared_memory([gone]) is None


def test_the_memory_outlives_its_segment():
    """Catches: an optimizer in memory that was given back when its manager was closed; memory that
    stays when the tensors are gone."""
    tensor = torch.randn(LARGE)
    wanted, segment = tensor.clone(), move_to_shared_memory([tensor])
    address = tensor.data_ptr()
    segment.close()
    assert torch.equal(tensor, wanted)
    assert is_in_segment(address)
    del tensor
    assert not is_in_segment(address)


def test_a_foreign_request_gets_a_copy():
    """Catches: a request that sees later changes; a save that copies what the launch knows of."""
    tensor = torch.randn(LARGE)
    move_to_shared_memory([tensor])
    copy = _private(tensor)
    assert copy.data_ptr() != tensor.data_ptr()
    assert torch.equal(copy, tensor)
    assert to_host(tensor).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("kind", [CheckpointManager, GroupWorker])
def test_a_manager_reads_through_the_segment(tmp_path: Path, monkeypatch, kind):
    """Catches: tensors in a segment that the writer process does not get; a gated save that fails as
    its state is moved under it."""
    tensor, called = torch.randn(LARGE), []
    with closing(kind(tmp_path / "root")) as manager:
        monkeypatch.setattr(manager, "before_update", lambda: called.append(moved(tensor)))
        assert manager.share({"moments": [tensor], "step": 3, "name": "adam"}) == LARGE * 4
        assert manager.share([tensor]) == 0
        assert called == [False, True]
        [segment] = manager._engine._segments
        assert segment.holds(tensor.data_ptr(), LARGE * 4)
    assert manager._engine._segments == []


@pytest.mark.parametrize("kind", [CheckpointManager, GroupWorker])
def test_a_share_that_cannot_work_moves_nothing(tmp_path: Path, monkeypatch, kind):
    """Catches: an optimizer of another kind that is taken in silence; tensors that were moved, and
    then refused."""
    tensor = torch.randn(LARGE)
    with closing(kind(tmp_path / "root")) as manager:
        with pytest.raises(ConfigError, match="SimpleNamespace has no tensors"):
            manager.share(SimpleNamespace(optimizer=tensor))
        monkeypatch.setattr(WriteEngine, "may_add_segment", False)
        with pytest.raises(ConfigError, match="too often"):
            manager.share([tensor])
    forks = kind(tmp_path / "forked", engine="fork")
    with closing(forks), pytest.raises(ConfigError, match="writers are forked"):
        forks.share([tensor])
    assert not moved(tensor)

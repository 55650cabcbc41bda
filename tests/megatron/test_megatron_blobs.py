"""Blobs from templates: the bytes of ``torch.save``, or no template at all."""

from __future__ import annotations

import ctypes
import io
import warnings
import zipfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.serialization import config

from ckptfsm.dcp import blobs
from ckptfsm.dcp.blobs import Template, Templates, make_template
from ckptfsm.dcp.images import exact

pytestmark = pytest.mark.megatron

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FP8 = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if hasattr(torch, name)
)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32)
DTYPES = (*FLOATS, *FP8, *INTS, torch.bool, torch.complex64, torch.complex128)


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def by_template(template: Template, tensor: torch.Tensor) -> bytes:
    storage = tensor.untyped_storage()
    data = ctypes.string_at(storage.data_ptr(), storage.nbytes())
    return template.filled([data])


def made(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    size = dtype.itemsize
    for length in shape:
        size *= length
    random = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), generator=random)
    return data.to(torch.uint8).view(dtype).view(shape)


def views_of(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensor, and views of it that a trainer may have in its state."""
    found = {"whole": tensor, "detached": tensor.detach()}
    if tensor.dim() >= 2:
        found["transposed"] = tensor.transpose(0, 1)
        found["column"] = tensor[:, :1]
    if tensor.dim() >= 1 and tensor.shape[0] > 1:
        found["rows"] = tensor[1:]
        found["reshaped"] = tensor.reshape(-1)[1:]
    if tensor.dim() == 4:
        found["channels_last"] = tensor.contiguous(memory_format=torch.channels_last)
    if tensor.is_floating_point() or tensor.is_complex():
        found["with_grad"] = tensor.clone().requires_grad_()
        found["parameter"] = torch.nn.Parameter(tensor)
    if tensor.is_complex():
        found["conjugate"] = tensor.conj()
        found["negative"] = tensor.conj().imag
    found["expanded"] = tensor.reshape(-1)[:1].expand(3) if tensor.numel() else tensor
    return found


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 7), max_size=4),
    seed=st.integers(0, 1000),
)
def test_template_and_torch_save_give_the_same_bytes(dtype, shape, seed):
    """Catches: a template that is wrong for one dtype, shape, stride or kind of view."""
    templates = Templates()
    for kind, view in views_of(made(dtype, shape, seed)).items():
        tensor = exact(view)
        template = templates.of(tensor)
        if template is not None:
            assert by_template(template, tensor) == saved(tensor), kind
    assert templates._refused == ""


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_has_a_template(dtype):
    """Catches: a dtype that is silently written the slow way."""
    tensor = made(dtype, [100, 300], 1)
    template = Templates().of(tensor)
    assert template is not None
    blob = by_template(template, tensor)
    assert blob == saved(tensor)
    assert zipfile.ZipFile(io.BytesIO(blob)).testzip() is None
    loaded = torch.load(io.BytesIO(blob), weights_only=True)
    assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))


def test_a_tensor_of_more_than_four_gigabytes():
    """Catches: sizes and offsets of zip64. No page of the tensor is touched."""
    numel = (1 << 32) // 4 + 1000
    tensor = torch.empty(numel, dtype=torch.float32)  # fresh pages of the kernel: none is taken yet
    template = make_template(tensor)
    head, tail = blobs.Holes(), blobs.Holes()
    for file in (head, tail):
        with torch.serialization.skip_data():
            torch.save(tensor, file)
    (record,) = template.records
    assert (record.name, record.size) == ("data/0", numel * 4)
    assert head.size == len(template.head) + numel * 4 + record.tail.size
    with zipfile.ZipFile(head) as archive:
        sizes = {each.filename.partition("/")[2]: each.file_size for each in archive.infolist()}
    assert sizes["data/0"] == numel * 4
    patch, tail = record.tail.patch, record.tail.data
    patched = patch.applied(tail, [0xABCDEF01])
    assert patched != tail
    rest = blobs.Holes()
    rest.write(template.head)
    rest.seek(numel * 4, 1)
    rest.write(patched)
    with zipfile.ZipFile(rest) as archive:
        found = {each.filename.partition("/")[2]: each for each in archive.infolist()}
        assert found["data/0"].CRC == 0xABCDEF01
        assert (
            archive.read(found[".data/serialization_id"]) == patched[patch.id.at : patch.id.at + 40]
        )


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0),
        torch.ones(4).to_sparse(),
        torch.ones(4)[1:],
        torch.complex(torch.ones(3), torch.ones(3)).conj(),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        torch.ones(3, device="meta"),
    ],
    ids=["empty", "sparse", "view", "conjugate", "quantized", "meta"],
)
def test_others_have_no_template(tensor):
    """Catches: a template for a tensor whose pickle names more than its structure."""
    templates = Templates()
    assert templates.of(tensor) is None
    assert templates._refused == ""


def test_a_tensor_with_attributes_has_no_template():
    """Catches: attributes, which torch pickles, that are lost; a subclass that comes back plain."""
    tensor = torch.ones(3)
    tensor.mark = "kept"
    assert Templates().of(tensor) is None

    class Sub(torch.Tensor):
        pass

    assert Templates().of(torch.ones(3).as_subclass(Sub)) is None


def test_the_structure_is_kept_the_data_is_not():
    """Catches: a template that belongs to the data of the first tensor."""
    templates = Templates()
    first, second = made(torch.float32, [50, 60], 1), made(torch.float32, [50, 60], 2)
    assert templates.of(first) is templates.of(second)
    assert by_template(templates.of(second), second) == saved(second)


VIEWS = {
    "expanded": lambda base, start: base[start : start + 1].expand(4),
    "strided": lambda base, start: torch.as_strided(base, (2, 2), (1, 0), start),
    "windows": lambda base, start: torch.as_strided(base, (2, 2), (1, 1), start),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_views_at_different_places_have_different_templates(kind):
    """Catches: the values of one view in the checkpoint of another, of the same shape and stride."""
    templates, base = Templates(), torch.arange(4.0)
    for start in (0, 1, 0):
        tensor = exact(VIEWS[kind](base, start))
        template = templates.of(tensor)
        blob = saved(tensor) if template is None else by_template(template, tensor)
        assert blob == saved(tensor)
        assert torch.equal(
            torch.load(io.BytesIO(blob), weights_only=True), VIEWS[kind](base, start)
        )


def looked(templates: Templates, tensor: torch.Tensor) -> Template | None:
    """The template under torch's settings of this moment."""
    templates.look()
    return templates.of(tensor)


def test_without_checksums_torch_writes():
    """Catches: a template with checksums where torch is told to write none, or one for good after it."""
    templates, tensor = Templates(), torch.ones(1000)
    with config.patch({"save.compute_crc32": False}):
        assert looked(templates, tensor) is None
    assert by_template(looked(templates, tensor), tensor) == saved(tensor)
    with config.patch({"save.compute_crc32": False}):
        assert looked(templates, tensor) is None


@pytest.mark.parametrize("surprise", ["other bytes", "an error"])
def test_a_torch_that_writes_otherwise_is_left_to_itself(monkeypatch, caplog, surprise):
    """Catches: a template of an older format that is used with a newer torch."""
    original = blobs.make_template

    def other(tensor: torch.Tensor) -> Template:
        if surprise == "an error":
            raise KeyError("data/0")
        found = original(tensor)
        return Template(found.head + b" ", found.records)

    monkeypatch.setattr(blobs, "make_template", other)
    templates = Templates()
    assert templates.of(torch.ones(100)) is None
    assert templates.of(torch.ones(100, dtype=torch.int8)) is None
    assert caplog.text.count("state is written by torch.save") == 1


def test_torch_settings_make_another_template():
    """Catches: a template of other settings of torch.save."""
    templates = Templates()
    tensor = torch.ones(1000)
    plain = looked(templates, tensor)
    with warnings.catch_warnings(), config.patch({"save.storage_alignment": 4096}):
        aligned = looked(templates, tensor)
        assert by_template(aligned, tensor) == saved(tensor)
    assert len(aligned.head) > len(plain.head)
    assert by_template(looked(templates, tensor), tensor) == saved(tensor)

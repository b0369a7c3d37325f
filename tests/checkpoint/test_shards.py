"""Data files: every dtype and shape, streamed, and readable by plain safetensors."""

import hashlib
import json
import struct
import sys
import weakref
import zlib
from itertools import pairwise

import pytest
import torch
from safetensors import safe_open
from torch import nn

from mixle_core.checkpoint import CheckpointError, Piece, begin, commit, data_file, opaque, open_checkpoint, shards, write_data

INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
EIGHT_BIT = [dtype for dtype in shards.DTYPES.values() if "float8" in str(dtype)]
DTYPES = [*INTEGERS, *FLOATS, *EIGHT_BIT, torch.bool]


def bits(tensor):
    return tensor.detach().cpu().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def random(dtype, shape):
    """Any bits that the dtype has, NaN among them."""
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def whole(name, tensor, kind="parameter"):
    return Piece(name, kind, tuple(tensor.shape), (0,) * tensor.ndim, tensor)


def test_every_dtype_that_there_is_here_is_covered():
    assert len(DTYPES) == len(shards.DTYPES) == 19
    assert len(EIGHT_BIT) == 5


@pytest.mark.parametrize("checksum", ["crc32", "sha256"])
def test_every_dtype_and_shape_round_trips_and_plain_safetensors_reads_it(tmp_path, checksum):
    shapes = {"scalar": (), "vector": (5,), "matrix": (3, 4), "four": (2, 1, 3, 2), "none": (0,), "hollow": (3, 0, 2)}
    tensors = {f"{shape}.{dtype}": random(dtype, extents) for shape, extents in shapes.items() for dtype in DTYPES}
    part = begin(tmp_path, 1)
    records = write_data(part, data_file(3, 1), [whole(name, tensor) for name, tensor in tensors.items()], checksum=checksum)
    step = commit(part, records, {}, checksum=checksum)
    with open_checkpoint(step) as opened, safe_open(step / "data-00003-001.safetensors", "pt") as plain:
        for name, tensor in tensors.items():
            for found in (opened.read(name, "parameter", (0,) * tensor.ndim, tuple(tensor.shape)), plain.get_tensor(shards.chunk_key(
                name, "parameter", (0,) * tensor.ndim
            ))):  # fmt: skip
                assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
                assert torch.equal(bits(found), bits(tensor)), name
        opened.verify()
    data = (step / "data-00003-001.safetensors").read_bytes()
    for record in records:
        block = data[record.begin : record.begin + record.length]
        wanted = f"{zlib.crc32(block):08x}" if checksum == "crc32" else hashlib.sha256(block).hexdigest()
        assert record.checksum == wanted
        assert record.begin % shards.DTYPES[record.dtype].itemsize == 0, "aligned, for readers that map the file"


def test_the_file_is_a_header_and_the_blocks_without_gaps(tmp_path):
    part = begin(tmp_path, 0)
    records = write_data(part, data_file(0), [whole("b", torch.ones(3)), whole("a", torch.ones(2, dtype=torch.float64))])
    data = (part / data_file(0)).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert length % 8 == 0
    assert json.loads(data[8 : 8 + length]) == {
        "parameter:a@0": {"dtype": "F64", "shape": [2], "data_offsets": [0, 16]},
        "parameter:b@0": {"dtype": "F32", "shape": [3], "data_offsets": [16, 28]},
    }
    assert [(record.name, record.begin, record.length) for record in records] == [("a", 8 + length, 16), ("b", 24 + length, 12)]
    assert len(data) == 8 + length + 28


def test_tensors_in_any_memory_are_written_by_their_values(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "transposed": base.t(), "strided": base[::2, 1::2], "expanded": torch.ones(1, 3).expand(4, 3), "row": base[2],
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(), "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "parameter": nn.Parameter(torch.randn(3)), "leaf": torch.randn(2, requires_grad=True), "graph": nn.Parameter(torch.randn(2)) * 2,
    }  # fmt: skip
    part = begin(tmp_path, 1)
    commit(part, write_data(part, data_file(0), [whole(name, tensor) for name, tensor in tensors.items()]), {})
    with open_checkpoint(tmp_path / "step-00000001") as opened:
        for name, tensor in tensors.items():
            assert torch.equal(opened.read(name, "parameter", (0,) * tensor.ndim, tuple(tensor.shape)), tensor.detach()), name


def test_large_blocks_are_cut_into_chunks_of_bounded_size(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "CHUNK_BYTES", 64)
    tensors = {"rows": torch.randn(10, 4), "one": torch.randn(1, 1, 50), "wide": torch.randn(3, 40), "fits": torch.randn(4, 4)}
    part = begin(tmp_path, 1)
    records = write_data(
        part, data_file(0), [Piece("off", "m", (20, 4), (10, 0), torch.ones(10, 4)), *map(whole, tensors, tensors.values())]
    )
    sizes = {name: [record.size for record in records if record.name == name] for name in [*tensors, "off"]}
    assert sizes["rows"] == [(4, 4), (4, 4), (2, 4)]
    assert sizes["one"] == [(1, 1, 16)] * 3 + [(1, 1, 2)]
    assert sizes["wide"] == [(1, 40)] * 3
    assert sizes["fits"] == [(4, 4)]
    assert [record.offset for record in records if record.name == "off"] == [(10, 0), (14, 0), (18, 0)]
    step = commit(part, [record for record in records if record.name != "off"] + [*_other_half(part, records)], {})
    with open_checkpoint(step) as opened:
        for name, tensor in tensors.items():
            assert torch.equal(opened.read(name, "parameter", (0,) * tensor.ndim, tuple(tensor.shape)), tensor)


def _other_half(part, records):
    yield from (record for record in records if record.name == "off")
    yield from write_data(part, data_file(1), [Piece("off", "m", (20, 4), (0, 0), torch.zeros(10, 4))])


def test_functions_are_called_in_turn_and_what_they_give_is_let_go(tmp_path):
    alive, peak = weakref.WeakSet(), []

    def fetch(number):
        def call():
            peak.append(len(alive))
            tensor = torch.full((100,), float(number))
            alive.add(tensor)
            return tensor

        return call

    part = begin(tmp_path, 1)
    pieces = (Piece(str(n), "parameter", (100,), (0,), fetch(n), size=(100,), dtype=torch.float32) for n in range(5))
    step = commit(part, write_data(part, data_file(0), pieces), {})
    assert peak == [0] * 5, "before one is fetched, the one before it is gone"
    with open_checkpoint(step) as opened:
        assert all(opened.read(str(n), "parameter", (0,), (100,)).eq(n).all() for n in range(5))


@pytest.mark.parametrize(("size", "dtype"), [((3,), torch.float32), ((2,), torch.float64), ((), torch.float32)])
def test_a_function_that_gives_something_else_than_announced_is_refused(tmp_path, size, dtype):
    piece = Piece("w", "parameter", (2,) * len(size) if size != (3,) else (3,), (0,) * len(size), lambda: torch.ones(2), size, dtype)
    with pytest.raises(CheckpointError, match=r"float32 of shape \(2,\); expected .*, as announced"):
        write_data(begin(tmp_path, 1), data_file(0), [piece])


REFUSED = {
    "sparse": (torch.eye(2).to_sparse(), "expected an ordinary dense tensor"),
    "meta": (torch.ones(2, device="meta"), "meta.; expected an ordinary dense tensor"),
    "subclass": (torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {})), "Mine .*; expected an ordinary dense tensor"),
    "packed": (torch.zeros(2, dtype=torch.float4_e2m1fn_x2), "dtype torch.float4_e2m1fn_x2; expected one of"),
    "double complex": (torch.ones(2, dtype=torch.complex128), "dtype torch.complex128; expected one of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_tensors_are_refused_by_name(tmp_path, name):
    tensor, said = REFUSED[name]
    with pytest.raises(CheckpointError, match=f"^layer.w \\(exp_avg\\): .*{said}"):
        write_data(begin(tmp_path, 1), data_file(0), [whole("layer.w", tensor, "exp_avg")])


def test_blocks_outside_their_tensor_doubles_and_nameless_ones_are_refused(tmp_path):
    part = begin(tmp_path, 1)
    one = torch.ones(2, 2)
    for piece in (Piece("w", "p", (3, 2), (2, 0), one), Piece("w", "p", (3, 2), (-1, 0), one), Piece("w", "p", (4,), (0,), one)):
        with pytest.raises(CheckpointError, match="expected a block inside it"):
            write_data(part, data_file(0), [piece])
    with pytest.raises(CheckpointError, match="p:w@0,0 is given twice"):
        write_data(part, data_file(0), [whole("w", one, "p"), whole("w", one, "p")])
    for name, kind in (("", "p"), ("w", ""), (3, "p")):
        with pytest.raises(CheckpointError, match="as the name or kind of a tensor"):
            write_data(part, data_file(0), [whole(name, one, kind)])
    with pytest.raises(CheckpointError, match="lone surrogates"):
        write_data(part, data_file(0), [whole("\ud800", one)])
    with pytest.raises(CheckpointError, match="without size and dtype"):
        write_data(part, data_file(0), [Piece("w", "p", (2, 2), (0, 0), lambda: one)])
    with pytest.raises(CheckpointError, match="expected one of crc32, sha256"):
        write_data(part, data_file(0), [whole("w", one)], checksum="md5")
    for name in ("x.safetensors", "../data-00000-000.safetensors", "data-00000-000.safetensors\n", "data-0000\u0660-000.safetensors"):
        with pytest.raises(CheckpointError, match="no name of a data file"):
            write_data(part, name, [whole("w", one)])
    assert list(part.iterdir()) == [], "nothing was written before it was checked"


def test_blocks_without_elements_are_left_out_and_no_file_is_empty(tmp_path):
    part = begin(tmp_path, 1)
    assert write_data(part, data_file(0), [Piece("w", "p", (4, 2), (4, 0), torch.ones(0, 2))]) == ()
    assert list(part.iterdir()) == []
    # every rank may have a block of a tensor that has no elements at all
    empty = [Piece("none", "parameter", (0, 2), (0, column), torch.ones(0, 1)) for column in (0, 1)]
    records = [record for rank in (0, 1) for record in write_data(part, data_file(rank), empty)]
    assert [(record.offset, record.size) for record in records] == [((0, 0), (0, 2))] * 2
    with open_checkpoint(commit(part, records, {})) as opened:
        assert opened.read("none", "parameter", (0, 0), (0, 2)).shape == (0, 2)


def test_an_existing_file_is_not_written_again(tmp_path):
    part = begin(tmp_path, 1)
    write_data(part, data_file(0), [whole("w", torch.ones(2))])
    with pytest.raises(CheckpointError, match=r"EEXIST"):
        write_data(part, data_file(0), [whole("w", torch.ones(2))])


def test_opaque_tensors_have_names_of_their_own(tmp_path):
    part = begin(tmp_path, 1)
    state = torch.get_rng_state()
    with open_checkpoint(commit(part, write_data(part, data_file(0), [whole("rng", torch.ones(3)), opaque("rng", state)]), {})) as opened:
        assert torch.equal(opened.opaque("rng"), state)
        assert torch.equal(opened.read("rng", "parameter", (1,), (2,)), torch.ones(2))
        with pytest.raises(CheckpointError, match="no tensor 'other'; there are rng"):
            opened.opaque("other")


def test_records_are_plain_and_ordered_for_sending(tmp_path):
    records = write_data(begin(tmp_path, 1), data_file(0), [whole("w", torch.ones(2, 3)), opaque("r", torch.ones(1))])
    for record in records:
        fields = [getattr(record, name) for name in record.__slots__ if name != "__weakref__"]
        flat = [item for field in fields for item in (field if isinstance(field, tuple) else (field,))]
        assert {type(item) for item in flat} <= {str, int, type(None)}
    assert all(a.begin + a.length == b.begin for a, b in pairwise(records))


def test_a_big_endian_machine_is_refused(tmp_path, save, monkeypatch):
    step = save(tmp_path, 1)
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(CheckpointError, match="a big-endian machine"):
        write_data(begin(tmp_path, 2), data_file(0), [whole("w", torch.ones(2))])
    with pytest.raises(CheckpointError, match="a big-endian machine"):
        open_checkpoint(step)

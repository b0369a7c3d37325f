"""Written under one cut, read under another: bit equal, each chunk checked, and no more memory than about one chunk."""

import itertools
import math
import random
import tempfile
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mixle_core.checkpoint import CheckpointError, Piece, begin, commit, data_file, open_checkpoint, shards, write_data
from mixle_core.checkpoint.coverage import covers


@st.composite
def partitions(draw, shape):
    """Any cut of a tensor into blocks by cutting blocks again: (offset, size)."""
    blocks = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        offset, size = blocks.pop(draw(st.integers(0, len(blocks) - 1)))
        dims = [dim for dim, extent in enumerate(size) if extent > 1]
        if not dims:
            blocks.append((offset, size))
            continue
        dim = draw(st.sampled_from(dims))
        at = draw(st.integers(1, size[dim] - 1))
        blocks.append((offset, (*size[:dim], at, *size[dim + 1 :])))
        blocks.append(((*offset[:dim], offset[dim] + at, *offset[dim + 1 :]), (*size[:dim], size[dim] - at, *size[dim + 1 :])))
    return draw(st.permutations(blocks))


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
    return shape, draw(partitions(shape)), draw(partitions(shape)), draw(st.integers(1, 3)), draw(st.sampled_from([8, 64, 2**25]))


def view(tensor, offset, size):
    for dim, (start, extent) in enumerate(zip(offset, size, strict=True)):
        tensor = tensor.narrow(dim, start, extent)
    return tensor


@given(cases(), st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.bool]))
@settings(max_examples=100, deadline=None, database=None, derandomize=True)
def test_any_cut_is_read_under_any_other(case, dtype):
    shape, written, read, files, chunk_bytes = case
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patched:
        patched.setattr(shards, "CHUNK_BYTES", chunk_bytes)
        part = begin(root, 7)
        records = []
        for file in range(files):
            pieces = [Piece("w", "parameter", shape, offset, view(tensor, offset, size)) for offset, size in written[file::files]]
            records += write_data(part, data_file(file), pieces)
        with open_checkpoint(commit(part, records, {})) as opened:
            filled = torch.zeros(shape, dtype=dtype)
            for offset, size in read:
                block = opened.read("w", "parameter", offset, size)
                assert torch.equal(block, view(tensor, offset, size))
                opened.read_into("w", "parameter", offset, view(filled, offset, size))
            assert torch.equal(filled, tensor)


boxes = st.lists(st.tuples(st.tuples(*[st.integers(0, 3)] * 2), st.tuples(*[st.integers(0, 4)] * 2)), min_size=1, max_size=5)


one_missing_or_twice = st.builds(lambda found, drop: found[1:] if drop else [*found, found[0]], partitions((4, 4)), st.booleans())


@given(st.one_of(boxes, partitions((4, 4)), one_missing_or_twice))
@settings(max_examples=300, deadline=None, database=None, derandomize=True)
def test_coverage_is_exact(found):
    """Against counting every element."""
    count = torch.zeros(9, 9, dtype=torch.int64)
    for (a, b), (n, m) in found:
        count[a : a + n, b : b + m] += 1
    right = bool((count[:4, :4] == 1).all() and count.sum() == 16) and all(n and m for _, (n, m) in found)
    assert (covers((4, 4), found) is None) == right


def test_coverage_says_what_is_wrong():
    whole = ((0, 0), (4, 4))
    assert covers((4, 4), [whole]) is None
    assert covers((), [((), ())]) is None
    assert covers((0, 3), [((0, 0), (0, 3)), ((0, 0), (0, 3))]) is None
    assert "have 32 elements, the tensor 16" in covers((4, 4), [whole, whole])
    assert "overlap" in covers((4, 4), [((0, 0), (2, 4)), ((1, 0), (2, 4))])
    assert "overlap" in covers((2,), [((0,), (1,)), ((0,), (1,))])
    assert "have 2 elements, the tensor 1" in covers((), [((), ()), ((), ())])
    assert "reaches out" in covers((4, 4), [((0, 1), (4, 4))])
    assert "without elements" in covers((4, 4), [whole, ((0, 0), (0, 4))])
    assert "without elements" in covers((0, 3), [((0, 0), (0, 2))])
    assert "1 offsets and 2 sizes" in covers((4, 4), [((0,), (4, 4))])


def test_coverage_of_3000_tensors_in_64_chunks_is_fast():
    rows = [((64 * index, 0), (64, 1024)) for index in range(64)]
    grid = [((512 * i, 128 * j), (512, 128)) for i, j in itertools.product(range(8), range(8))]
    random.Random(0).shuffle(rows)
    started = time.process_time()
    for _ in range(100):
        assert covers((4096, 1024), rows) is None
        assert covers((4096, 1024), grid) is None
    assert (time.process_time() - started) * 15 < 10  # 0.03 times that of 3000 of each, 1.2 s here


def test_what_is_not_there_or_not_inside_is_an_error(tmp_path, save):
    with open_checkpoint(save(tmp_path, 1)) as opened:
        assert opened.kinds("layers.0.weight") == ("parameter", "exp_avg")
        assert opened.kinds("nowhere") == ()
        assert (opened.value("plan"), opened.step) == ("dp_shard=2", 1)
        with pytest.raises(CheckpointError, match=r"no 'exp_avg_sq' of layers\.0\.weight; there is parameter, exp_avg"):
            opened.read("layers.0.weight", "exp_avg_sq", (0, 0), (8, 6))
        with pytest.raises(CheckpointError, match="no 'parameter' of nowhere; there is nothing"):
            opened.read("nowhere", "parameter", (), ())
        with pytest.raises(CheckpointError, match="no value 'seed'; there are plan, loader, losses, step"):
            opened.value("seed")
        for offset, shape in [((0, 0), (9, 6)), ((-1, 0), (2, 6)), ((0,), (8,)), ((8, 0), (1, 6)), ((0, 0), (-1, 6))]:
            with pytest.raises(CheckpointError, match="way out: ask for a block inside it"):
                opened.read("layers.0.weight", "parameter", offset, shape)
        with pytest.raises(CheckpointError, match=r"is float32; expected torch\.float64"):
            opened.read_into("layers.0.weight", "parameter", (0, 0), torch.zeros(8, 6, dtype=torch.float64))


def test_a_chunk_of_which_only_part_is_asked_for_is_checked_whole(tmp_path, save):
    step = save(tmp_path, 1)
    with open_checkpoint(step) as opened:
        chunk = next(c for c in opened.stored("layers.0.weight", "parameter").chunks if c.offset == (0, 0))
    data = bytearray((step / chunk.file).read_bytes())
    data[chunk.begin + chunk.length - 1] ^= 1  # in row 3
    (step / chunk.file).write_bytes(data)
    with open_checkpoint(step) as opened:
        for offset, shape in [((0, 0), (1, 6)), ((0, 0), (8, 1)), ((0, 0), (4, 6))]:
            with pytest.raises(CheckpointError, match=f"{chunk.file}: bytes {chunk.begin} to .* have crc32 .*; expected {chunk.checksum}"):
                opened.read("layers.0.weight", "parameter", offset, shape)
        assert opened.read("layers.0.weight", "parameter", (4, 0), (4, 6))[0, 0] == 1024, "the other chunk is whole"
    with open_checkpoint(step, verify=False) as opened:
        assert opened.read("layers.0.weight", "parameter", (0, 0), (1, 6))[0, 0] == 1000


def test_several_blocks_of_one_chunk_read_it_once(tmp_path, save):
    """Seen on disk: what is kept of a chunk is still right after the file was damaged under it; another chunk in between ends that."""
    step = save(tmp_path, 1)
    with open_checkpoint(step) as opened:
        chunk = next(c for c in opened.stored("layers.0.weight", "parameter").chunks if c.offset == (0, 0))
        first = opened.read("layers.0.weight", "parameter", (0, 0), (1, 6))
        with (step / chunk.file).open("r+b") as file:
            file.seek(chunk.begin)
            file.write(b"\xff" * chunk.length)
        assert torch.equal(opened.read("layers.0.weight", "parameter", (0, 0), (1, 6)), first)
        opened.read("layers.1.weight", "parameter", (0, 0), (1, 6))
        with pytest.raises(CheckpointError, match="have crc32"):
            opened.read("layers.0.weight", "parameter", (0, 0), (1, 6))


def test_a_block_is_memory_of_its_own(tmp_path, save):
    with open_checkpoint(save(tmp_path, 1)) as opened:
        for shape in ((1, 6), (4, 6), (8, 6)):
            opened.read("layers.0.weight", "parameter", (0, 0), shape).zero_()
            assert opened.read("layers.0.weight", "parameter", (0, 0), shape)[0, 1] == 1001

"""Damage of every sort: refused with the file named, never a wrong value."""

import copy
import json
import os
import random
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mixle_core.checkpoint import CheckpointError, Piece, begin, commit, data_file, opaque, open_checkpoint, steps, write_data

FILES = ["data-00000-000.safetensors", "data-00001-000.safetensors", "metadata.json", "_SUCCESS"]


@pytest.fixture
def step(tmp_path, save):
    return save(tmp_path / "root", 1)


@pytest.fixture
def refused(load):
    """Assert that a load ends in a CheckpointError that names one of the files; returns its text."""

    def run(path, *names):
        with pytest.raises(CheckpointError) as error:
            load(path)
        if names:
            assert any(name in str(error.value) for name in names), str(error.value)
        with pytest.raises(CheckpointError), open_checkpoint(path) as opened:
            opened.verify()
        return str(error.value)

    return run


def test_undamaged_it_loads_and_verifies(step, is_step):
    assert is_step(step, 1)
    with open_checkpoint(step) as opened:
        told = []
        opened.verify(lambda done, total: told.append((done, total)))
    total = sum((step / name).stat().st_size for name in FILES[:2])
    assert told[-1] == (total, total)
    assert told == sorted(told)


def test_200_random_bit_flips_are_all_refused(step, load, refused):
    chosen = random.Random(1)
    whole = {name: (step / name).read_bytes() for name in FILES}
    places = [(name, index) for name in FILES for index in range(len(whole[name]))]
    for name, index in chosen.sample(places, 200):
        data = bytearray(whole[name])
        data[index] ^= 1 << chosen.randrange(8)
        (step / name).write_bytes(data)
        refused(step, name, "_SUCCESS")  # what differs from _SUCCESS may be either
        (step / name).write_bytes(whole[name])
    load(step)


def test_50_pages_of_zeros_are_all_refused(tmp_path, save, refused):
    extra = torch.randint(1, 256, (300_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    step = save(tmp_path, 1, extra=[opaque("big", extra)])
    name = "data-00001-000.safetensors"
    whole = (step / name).read_bytes()
    pages = random.Random(2).sample(range(len(whole) // 4096), 50)
    for page in pages:
        data = bytearray(whole)
        data[page * 4096 : (page + 1) * 4096] = bytes(4096)
        (step / name).write_bytes(data)
        refused(step, name)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["missing", "empty", "cut", "longer", "directory"])
def test_a_file_that_is_missing_or_of_another_size_is_refused(step, refused, name, how):
    file = step / name
    data = file.read_bytes()
    file.unlink()
    if how == "directory":
        file.mkdir()
    elif how != "missing":
        file.write_bytes({"empty": b"", "cut": data[:-1], "longer": data + b" "}[how])
    text = refused(step, name)
    assert "; way out: " in text
    if how == "missing":
        assert "missing" in text or "ENOENT (No such file or directory)" in text
    assert steps(step.parent) == ()


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_step_with_equal_shapes_is_refused(tmp_path, save, refused, name, is_step):
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    assert (first / name).stat().st_size == (second / name).stat().st_size
    shutil.copy(first / name, second / name)
    refused(second)
    shutil.copy(first / "metadata.json", second / "metadata.json")
    shutil.copy(first / "_SUCCESS", second / "_SUCCESS")
    assert "it is of step 1; expected step 2" in refused(second, "_SUCCESS")
    assert is_step(first, 1)


def test_two_data_files_exchanged_are_refused(step, refused):
    first, second = step / FILES[0], step / FILES[1]
    first.rename(step / "x")
    second.rename(first)
    (step / "x").rename(second)
    refused(step, *FILES[:2])


def test_a_file_that_shrinks_while_it_is_open_is_refused(step):
    with open_checkpoint(step) as opened:
        opened.read("layers.0.weight", "parameter", (0, 0), (1, 6))
        for name in FILES[:2]:
            os.truncate(step / name, 100)
        for wanted in ("layers.0.weight", "layers.1.weight"):
            with pytest.raises(CheckpointError, match=r"it ends at byte \d+; expected|100 bytes; expected"):
                opened.read(wanted, "parameter", (0, 0), (8, 6))


def _chunks(metadata, name="layers.0.weight", kind="parameter"):
    return metadata["tensors"][name][kind]["chunks"]


def _set(metadata, field, value):
    metadata["tensors"]["layers.0.weight"]["parameter"][field] = value


FORGED = {
    "a chunk missing": (lambda m, s: _chunks(m).pop(), "its chunks have 24 elements, the tensor 48"),
    "a chunk twice": (lambda m, s: _chunks(m).append(_chunks(m)[0]), "its chunks have 72 elements, the tensor 48"),
    "chunks that overlap": (lambda m, s: _chunks(m)[1].__setitem__(0, [3, 0]), "its chunks overlap, and leave elements out"),
    "a chunk outside": (lambda m, s: _chunks(m)[1].__setitem__(0, [5, 0]), "reaches out of shape [8, 6]"),
    "the rows exchanged": (lambda m, s: [_chunks(m)[0].__setitem__(0, [4, 0]), _chunks(m)[1].__setitem__(0, [0, 0])], "its header differs"),
    "another dtype": (lambda m, s: _set(m, "dtype", "int32"), "its header differs from metadata.json"),
    "another size of items": (lambda m, s: _set(m, "dtype", "float64"), "expected 24 elements of 8 bytes"),
    "an unknown dtype": (lambda m, s: _set(m, "dtype", "float33"), "dtype is 'float33'; expected one of float64,"),
    "another shape": (lambda m, s: _set(m, "shape", [6, 8]), "reaches out of shape [6, 8]"),
    "names exchanged": (
        lambda m, s: m["tensors"].update(
            {"layers.0.weight": m["tensors"]["layers.1.weight"], "layers.1.weight": m["tensors"]["layers.0.weight"]}
        ),
        "its header differs",
    ),
    "one range of bytes twice": (lambda m, s: _chunks(m)[0].__setitem__(3, _chunks(m, "layers.1.weight")[0][3]), "overlap at"),
    "a tensor missing": (lambda m, s: m["tensors"].pop("layers.1.weight"), "leave a gap at"),
    "bytes beyond the end": (lambda m, s: _chunks(m)[0].__setitem__(3, 2**40), "last byte is 1099511627872; expected at most"),
    "a file that nobody names": (
        lambda m, s: _chunks(m)[0].__setitem__(2, "data-00009-000.safetensors"),
        "expected one that _SUCCESS names",
    ),
    "a file without chunks": (lambda m, s: s["files"].update({"data-00002-000.safetensors": 0}), "no chunk in data-00002-000.safetensors"),
    "sums of another kind": (lambda m, s: s.update(checksum="sha256"), "expected a sha256"),
    "an unknown sum": (lambda m, s: s.update(checksum="md5"), "expected one of crc32, sha256"),
    "a later format": (lambda m, s: s.update(format=2), "format 2; expected format 1; way out: update mixle-core"),
    "an earlier format": (lambda m, s: s.update(format=0), "format 0; expected format 1; way out: load another step"),
    "another step": (lambda m, s: s.update(step=2), "it is of step 2; expected step 1"),
    "a field more": (lambda m, s: m.update(more=1), "expected exactly the fields tensors, opaque, values"),
    "an offset that is false": (lambda m, s: _chunks(m)[0].__setitem__(0, [False, 0]), "expected a list of sizes"),
    "a huge tensor": (lambda m, s: _set(m, "shape", [2**40, 6]), "its chunks have 48 elements, the tensor 6597069766656"),
    "a tensor beyond memory": (lambda m, s: _set(m, "shape", [2**61, 0, 8]), "expected a tensor of less than 4 EiB"),
    "65 dims": (lambda m, s: _set(m, "shape", [1] * 65), "expected a list of sizes"),
    "a huge chunk": (lambda m, s: _chunks(m)[0].__setitem__(1, [2**40, 6]), "expected 6597069766656 elements of 4 bytes"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_manifest_that_cannot_be_is_refused_although_its_sums_are_right(step, refused, forge, name):
    change, said = FORGED[name]
    (step / "data-00002-000.safetensors").touch()
    metadata, success = forge.read(step)
    change(metadata, success)
    forge.write(step, metadata, success)
    assert said in refused(step, *FILES)


def test_key_twice_infinite_numbers_depth_and_text_that_is_no_json_are_refused(step, refused, forge):
    metadata, success = forge.read(step)
    text = json.dumps(metadata)
    for raw, said in [
        (text.replace('"values": {', '"values": {"plan": 1, ', 1), "the key 'plan' stands twice"),
        (text.replace('"epoch": 3', '"epoch": NaN', 1), "NaN is no JSON"),
        (text.replace('"epoch": 3', '"epoch": 1e999', 1), "beyond the range"),
        (text.replace('"epoch": 3', '"epoch": ' + "[" * 100_000 + "]" * 100_000, 1), "recursion"),
        (text[:-1], "not the JSON that was written"),
        (text.replace("layers.0", "\\ud800", 1), "expected Unicode text"),
    ]:
        assert raw != text
        forge.write(step, metadata, success, raw=raw.encode())
        assert said in refused(step, "metadata.json")


def _nodes(document, path=()):
    yield path
    items = document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    for key, value in items:
        yield from _nodes(value, (*path, key))


def _at(document, path):
    for key in path:
        document = document[key]
    return document


def _replace(document, path, value):
    """The document with another value at a path; with `...`, without what is there."""
    if not path:
        return value
    document = copy.deepcopy(document)
    parent = _at(document, path[:-1])
    if value is ...:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return document


def _survives(step, load, before, what):
    """Either refused, or every tensor is what it was."""
    try:
        tensors, opaques, values = load(step)
    except CheckpointError:
        return False
    assert tensors.keys() == before[0].keys() and opaques.keys() == before[1].keys(), what
    for found, wanted in ((tensors, before[0]), (opaques, before[1])):
        for key in wanted:
            assert found[key].dtype == wanted[key].dtype and torch.equal(found[key], wanted[key]), (what, key)
    return values


OTHERS = [..., None, True, 0, 1, -1, 7, 2**31, 2**62, 2**70, 1.0, 0.5, "", "x", "../x", "float64", [], [0], {}, {"a": 1}, [[]]]


def test_every_node_of_both_files_changed_is_refused_or_harmless(step, load, forge):
    """Sums made right again, so that validation alone decides. What may load: another value, or another version of a package."""
    before = load(step)
    metadata, success = forge.read(step)
    loaded = tried = 0
    for path in [("metadata", *path) for path in _nodes(metadata)] + [("success", *path) for path in _nodes(success)]:
        for other in OTHERS if path[1:2] != ("values",) else OTHERS[:10]:
            if not path[1:] and other is ...:
                continue
            pair = _replace({"metadata": metadata, "success": success}, path, other)
            if pair == {"metadata": metadata, "success": success}:
                continue
            forge.write(step, pair["metadata"], pair["success"])
            tried += 1
            values = _survives(step, load, before, (path, other))
            if values is False:
                continue
            loaded += 1
            if path[:2] == ("metadata", "values"):
                assert all(values.get(key) == value for key, value in before[2].items() if key not in path[2:3]) or len(path) == 2, path
            else:  # `metadata` is recomputed with the file, so that its change is none
                assert path[:2] in {("success", "versions"), ("success", "metadata")}, (path, other)
    assert tried > 2000
    assert 0 < loaded < tried / 5


@given(st.data())
@settings(max_examples=150, deadline=None, database=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_two_parts_exchanged_are_refused_or_harmless(shared, data):
    step, load, forge, before, metadata, success = shared
    nodes = [path for path in _nodes(metadata) if path and path[0] != "values"]
    first, second = data.draw(st.sampled_from(nodes)), data.draw(st.sampled_from(nodes))
    if first == second[: len(first)] or second == first[: len(second)]:
        return
    changed = _replace(_replace(metadata, first, _at(metadata, second)), second, _at(metadata, first))
    forge.write(step, changed, success)
    _survives(step, load, before, (first, second))


@pytest.fixture
def shared(step, load, forge):
    return step, load, forge, load(step), *forge.read(step)


def test_the_shape_of_a_tensor_without_elements_is_confirmed_by_its_header(tmp_path, refused, forge):
    part = begin(tmp_path, 1)
    step = commit(part, write_data(part, data_file(0), [Piece("none", "parameter", (0, 3), (0, 0), torch.ones(0, 3))]), {})
    metadata, success = forge.read(step)
    entry = metadata["tensors"]["none"]["parameter"]
    entry["shape"] = entry["chunks"][0][1] = [0, 7]
    forge.write(step, metadata, success)
    assert "its header differs from metadata.json" in refused(step, data_file(0))


def test_all_damage_is_told_by_verify(step):
    with open_checkpoint(step) as opened:
        chunks = [chunk for *_, chunk in opened.metadata.chunks() if chunk.file == FILES[0] and chunk.length][:2]
    data = bytearray((step / FILES[0]).read_bytes())
    for chunk in chunks:
        data[chunk.begin] ^= 1
    (step / FILES[0]).write_bytes(data)
    header = bytearray((step / FILES[1]).read_bytes())
    header[20] ^= 1
    (step / FILES[1]).write_bytes(header)
    with open_checkpoint(step) as opened, pytest.raises(CheckpointError) as error:
        opened.verify()
    lines = str(error.value).split("\n")
    assert lines[0].endswith("3 of its 11 chunks cannot be believed")
    assert f"{FILES[1]}: its header differs from metadata.json" in lines[1]
    assert all(f"layers.0.weight (parameter), bytes {c.begin} to" in lines[i] or "exp_avg" in lines[i] for i, c in enumerate(chunks, 2))
    assert lines[-1] == "way out: load another step"


def test_a_name_with_a_newline_or_quotes_comes_back(tmp_path):
    part = begin(tmp_path, 1)
    names = ["a\nb", 'q"uote', "back\\ud800", "é😀", "__metadata__", "x" * 500, "a:b", "a@0"]
    pieces = [Piece(name, "parameter", (2,), (0,), torch.full((2,), float(i))) for i, name in enumerate(names)]
    with open_checkpoint(commit(part, write_data(part, data_file(0), pieces), {name: i for i, name in enumerate(names)})) as opened:
        assert [opened.read(name, "parameter", (0,), (2,))[0] for name in names] == list(range(len(names)))
        assert list(opened.values) == names

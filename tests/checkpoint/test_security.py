"""Loading runs nothing from the directory, follows no link, and allocates only what lies there."""

import builtins
import importlib
import io
import json
import os
import pickle
import resource
import shutil
import struct

import attrs
import pytest
import torch

from mixle_core.checkpoint import (
    CheckpointError,
    Piece,
    begin,
    clean,
    commit,
    data_file,
    latest,
    open_checkpoint,
    prune,
    steps,
    survey,
    write_data,
)
from mixle_core.checkpoint.shards import header

NAMES = ["data-00000-000.safetensors", "metadata.json", "_SUCCESS"]


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def no_code(monkeypatch):
    """Every way from bytes to code raises."""

    def refuse(*_, **__):
        raise AssertionError("loading ran code")

    for module in (pickle, importlib.import_module("_pickle"), torch.serialization.pickle):
        for name in ("load", "loads", "Unpickler"):
            monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(pickle, "_Unpickler", refuse)
    for module, name in [
        (torch, "load"),
        (torch.serialization, "load"),
        (torch.jit, "load"),
        (importlib.import_module("marshal"), "loads"),
    ]:
        monkeypatch.setattr(module, name, refuse)
    for name in ("eval", "exec"):
        monkeypatch.setattr(builtins, name, refuse)


def test_planted_pickles_do_nothing(tmp_path, save, is_step, no_code):
    mark = tmp_path / "ran"
    body = pickle.dumps(Payload(mark))
    step = save(tmp_path / "root", 1)
    for name in (".metadata", "__0.metadata", "__0_0.distcp", "metadata.pkl", "data.pkl", "__init__.py", "data-00009-000.safetensors"):
        (step / name).write_bytes(body if not name.endswith(".py") else f"import os; os.mkdir({str(mark)!r})".encode())
        (step.parent / name).write_bytes(body)
    assert is_step(step, 1)
    with open_checkpoint(step) as opened:
        opened.verify()
    assert [entry.step for entry in steps(step.parent)] == [1]
    assert latest(step.parent) == step
    assert not mark.exists()
    with pytest.raises(AssertionError, match="loading ran code"):
        pickle.loads(body)


@pytest.mark.parametrize("name", NAMES)
def test_a_pickle_in_place_of_a_file_is_refused(tmp_path, save, no_code, name):
    mark = tmp_path / "ran"
    body = io.BytesIO()
    pickle.Pickler(body).dump(Payload(mark))
    step = save(tmp_path / "root", 1)
    (step / name).write_bytes(body.getvalue())
    with pytest.raises(CheckpointError, match=name):
        open_checkpoint(step)
    assert not mark.exists()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["same content elsewhere", "relative", "absolute", "pipe", "dangling"])
def test_links_and_pipes_are_not_opened(tmp_path, save, name, how):
    step = save(tmp_path / "root", 1)
    outside = tmp_path / "outside"
    shutil.copy(step / name, outside)
    if how == "relative":
        shutil.copy(step / name, step / "copy")
    (step / name).unlink()
    if how == "pipe":
        os.mkfifo(step / name)
    else:
        (step / name).symlink_to({"relative": "copy", "dangling": tmp_path / "nowhere"}.get(how, outside))
    with pytest.raises(CheckpointError, match="no regular file" if how == "pipe" else "ELOOP.*; way out: links are not followed"):
        open_checkpoint(step)
    assert steps(step.parent) == ()


def test_a_linked_step_is_not_listed_and_not_opened_but_a_linked_root_is(tmp_path, save, is_step):
    step = save(tmp_path / "real", 1)
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "step-00000001").symlink_to(step)
    assert steps(tmp_path / "root") == ()
    for path in (tmp_path / "root" / "step-00000001", f"{tmp_path}/root/step-00000001/"):
        with pytest.raises(CheckpointError, match=r"ELOOP|ENOTDIR"):
            open_checkpoint(path)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert is_step(save(tmp_path / "link", 2), 2)
    assert [entry.step for entry in steps(tmp_path / "link")] == [1, 2]


@pytest.mark.parametrize(
    "file",
    ["../outside", "/etc/hostname", "./data-00000-000.safetensors", "data-00000-000.safetensors/", "sub/data-00000-000.safetensors",
     "data-00000-000.safetensors\x00", "data-00000-000.safetensors\n", "", ".", "..", "data-\u06600000-000.safetensors"],
)  # fmt: skip
def test_names_that_are_no_data_files_are_refused_wherever_they_stand(tmp_path, save, forge, file):
    step = save(tmp_path / "root", 1)
    metadata, success = forge.read(step)
    shutil.copy(step / NAMES[0], tmp_path / "root" / "outside")
    text = json.dumps(metadata).replace(json.dumps(NAMES[0]), json.dumps(file))
    forge.write(step, json.loads(text), success)
    with pytest.raises(CheckpointError, match="expected one that _SUCCESS names"):
        open_checkpoint(step)
    success["files"] = {file if name == NAMES[0] else name: size for name, size in success["files"].items()}
    forge.write(step, json.loads(text), success)
    with pytest.raises(CheckpointError, match=r"expected names such as data-00000-000\.safetensors"):
        open_checkpoint(step)


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_declared_sizes_allocate_nothing(tmp_path, save, forge):
    step = save(tmp_path / "root", 1)
    metadata, success = forge.read(step)
    before = peak_bytes()
    entry = metadata["tensors"]["layers.0.weight"]["parameter"]
    large = 2**38
    for shape, chunks, files in [
        ([large, 6], entry["chunks"], success["files"]),
        ([large], [[[0], [large], NAMES[0], 8, 4 * large, "00000000"]], success["files"]),
        ([large], [[[0], [large], NAMES[0], 8, 4 * large, "00000000"]], {**success["files"], NAMES[0]: 8 + 4 * large}),
    ]:
        entry.update(shape=shape, chunks=chunks)
        forge.write(step, metadata, {**success, "files": files})
        with pytest.raises(CheckpointError):
            open_checkpoint(step)
    (step / "_SUCCESS").unlink()
    with (step / "_SUCCESS").open("wb") as file:
        file.truncate(2**36)  # without blocks on the disk
    with pytest.raises(CheckpointError, match="_SUCCESS: 68719476736 bytes; expected at most"):
        open_checkpoint(step)
    assert peak_bytes() - before < 32 * 2**20


def test_a_file_that_really_is_huge_is_an_error_and_no_crash(tmp_path):
    """A file of 2 TiB without blocks on the disk, whose header is right."""
    part = begin(tmp_path, 1)
    records = write_data(part, data_file(0), [Piece("w", "parameter", (1,), (0,), torch.zeros(1))])
    elements = 2**39
    head = header([("parameter:w@0", "float32", (elements,), 0, 4 * elements)])
    (part / data_file(0)).write_bytes(head)
    os.truncate(part / data_file(0), len(head) + 4 * elements)
    record = attrs.evolve(records[0], shape=(elements,), size=(elements,), begin=len(head), length=4 * elements)
    with open_checkpoint(commit(part, [record], {})) as opened:
        with pytest.raises(CheckpointError, match="no memory for a block of 2199023255552 bytes"):
            opened.read("w", "parameter", (0,), (elements,))
        with pytest.raises(CheckpointError, match="no memory for a block"):
            opened.read("w", "parameter", (0,), (1,))


def test_a_header_length_beyond_the_file_is_refused(tmp_path, save):
    step = save(tmp_path, 1)
    data = bytearray((step / NAMES[0]).read_bytes())
    for length in (2**63, 2**64 - 1, 0, len(data)):
        data[:8] = struct.pack("<Q", length)
        (step / NAMES[0]).write_bytes(data)
        with open_checkpoint(step) as opened, pytest.raises(CheckpointError, match="its header differs"):
            opened.read("layers.0.weight", "parameter", (0, 0), (8, 6))


def test_what_lies_outside_is_not_deleted(tmp_path, save):
    """Directories that are links, or hold links, lead nowhere when they are pruned or cleaned."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    root = tmp_path / "root"
    first = save(root, 1)
    save(root, 2)
    (first / "link").symlink_to(outside)
    (root / "step-00000003.part-0123456789abcdef").symlink_to(outside)
    part = begin(root, 4)
    (part / "link").symlink_to(outside)
    assert prune(root, 1) == (1,)
    assert clean(root, older_than_s=0) == (part,)
    assert (outside / "precious").exists()
    assert [entry.step for entry in survey(root)] == [2]

"""Weights as transformers has them: the same bytes as the library safetensors writes, whole or not at all; and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mixle_core.checkpoint import CheckpointError, HfWeights, begin, commit, data_file, export_hf, opaque, write_data
from mixle_core.checkpoint.shards import DTYPES, Piece
from mixle_core.runtime import load_hf_weights, save_training_state


class Model(nn.Module):
    """Tied embedding and head, two dtypes, buffers that are stored and one that is not; more than nine layers."""

    def __init__(self, *, tied=True):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(11))
        self.norm = nn.LayerNorm(8, dtype=torch.bfloat16)
        self.head = nn.Linear(8, 20, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor(3))
        self.register_buffer("ramp", torch.arange(4.0), persistent=False)


def stored(model, *, tied=True):
    return {name: value for name, value in model.state_dict().items() if not tied or name != "head.weight"}


@pytest.fixture
def step(tmp_path):
    return save_training_state(Model(), {}, tmp_path / "run", step=7)


def test_one_file_has_the_bytes_that_the_library_writes(step, tmp_path):
    made = export_hf(step, tmp_path / "out")
    save_file(stored(Model()), tmp_path / "ref.safetensors", metadata={"format": "pt"})
    assert (made.step, made.files, made.copied, made.dtype) == (7, ("model.safetensors",), (), None)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "ref.safetensors").read_bytes()
    assert sorted(child.name for child in tmp_path.iterdir()) == ["out", "ref.safetensors", "run"]
    assert (tmp_path / "out").stat().st_mode & 0o777 == tmp_path.stat().st_mode & 0o777
    assert "head.weight" not in made.names and "ramp" not in made.names and "seen" in made.names
    # of all steps the latest
    save_training_state(Model(tied=False), {}, tmp_path / "run", step=8)
    assert "head.weight" in export_hf(tmp_path / "run", tmp_path / "untied").names


def test_every_dtype_has_the_place_that_the_library_gives_it(tmp_path):
    """The order of the file is by size of elements, then by name."""
    known = {name: dtype for name, dtype in DTYPES.items() if "fnuz" not in name}
    tensors = {f"t.{name}.{i}": torch.arange(16, dtype=torch.uint8).view(dtype) for name, dtype in known.items() for i in (1, 0)}
    tensors["t.empty"], tensors["t.number"], tensors["t.é"] = torch.zeros(0, 3), torch.tensor(2.5), torch.ones(2)
    tensors = {name: tensor != 0 if tensor.dtype is torch.bool else tensor for name, tensor in tensors.items()}
    part = begin(tmp_path / "run", 0)
    pieces = [Piece(name, "parameter", tuple(t.shape), (0,) * t.dim(), t) for name, t in tensors.items()]
    path = commit(part, write_data(part, data_file(0), pieces), {})
    export_hf(path, tmp_path / "out")
    save_file(tensors, tmp_path / "ref.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "ref.safetensors").read_bytes()


def test_shards_have_an_index_and_a_tensor_above_the_limit_has_a_file_of_its_own(step, tmp_path):
    made = export_hf(step, tmp_path / "out", max_shard_size="0.6KB")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    model = Model()
    wanted = stored(model)
    assert index["metadata"] == {
        "total_parameters": sum(p.numel() for p in model.parameters()),
        "total_size": sum(t.numel() * t.element_size() for t in wanted.values()),
    }
    assert list(made.files) == [f"model-{i:05d}-of-{len(made.files):05d}.safetensors" for i in range(1, len(made.files) + 1)]
    found = {}
    for file in made.files:
        here = load_file(tmp_path / "out" / file)
        assert all(index["weight_map"][name] == file for name in here)
        assert len(here) == 1 or sum(t.numel() * t.element_size() for t in here.values()) <= 600
        found |= here
    assert found.keys() == wanted.keys() == index["weight_map"].keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    order = [index["weight_map"][f"layers.{i}.weight"] for i in range(11)]
    assert order == sorted(order), "numbers count as numbers"


def test_a_buffer_that_differed_between_ranks_is_that_of_the_first(tmp_path):
    part = begin(tmp_path / "run", 0)
    tensors = [opaque(f"buffer/norm.mean/{rank}", torch.full((2,), float(rank))) for rank in (0, 1)]
    records = write_data(
        part, data_file(0), [*tensors, opaque("generator/0/torch", torch.ones(3)), Piece("w", "exp_avg", (1,), (0,), torch.ones(1))]
    )
    export_hf(commit(part, records, {}), tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == {"norm.mean"} and found["norm.mean"].tolist() == [0, 0]


def test_like_copies_config_and_tokenizer_and_no_programs(step, tmp_path):
    like = tmp_path / "like"
    like.mkdir()
    (tmp_path / "blob").write_text(json.dumps({"torch_dtype": "bfloat16", "x": 1}))
    (like / "config.json").symlink_to(tmp_path / "blob")  # as in the cache of transformers
    for name in ("tokenizer.json", "vocab.json", "modeling_x.py", "model.safetensors", "pytorch_model.bin", "notes.txt"):
        (like / name).write_text(name)
    made = export_hf(step, tmp_path / "out", like=like)
    assert made.copied == ("config.json", "tokenizer.json", "vocab.json") and made.dtype == "float32"
    assert {child.name for child in (tmp_path / "out").iterdir()} == {*made.copied, "model.safetensors"}
    assert not any(child.is_symlink() for child in (tmp_path / "out").iterdir())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"dtype": "float32", "x": 1}
    (tmp_path / "blob").write_text('{"dtype":   "float32"}')
    assert export_hf(step, tmp_path / "same", like=like).dtype is None
    assert (tmp_path / "same" / "config.json").read_text() == '{"dtype":   "float32"}'


def refused(text, *arguments, **options):
    with pytest.raises(CheckpointError, match=text) as error:
        export_hf(*arguments, **options)
    assert "\n" not in str(error.value)


def test_what_cannot_be_exported_leaves_nothing(step, tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("x")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "empty").mkdir()
    for out in (full, tmp_path / "file", tmp_path / "link"):
        refused("it exists, and is no empty directory; expected nothing there", step, out)
    for size in ("5GiB", "0KB", "GB", "-1", 0):
        refused("max_shard_size=.*; expected bytes, or such as 5GB", step, tmp_path / "out", max_shard_size=size)
    refused("no config.json in it", step, tmp_path / "out", like=full)
    refused("no step, and none in it is whole; .*mixle checkpoint list", full, tmp_path / "out")
    (full / "config.json").write_text("{")
    refused("config.json: no JSON", step, tmp_path / "out", like=full)
    part = begin(tmp_path / "run", 9)
    refused("no parameter in it", commit(part, (), {}), tmp_path / "out")
    data = bytearray((step / "data-00000-000.safetensors").read_bytes())
    data[bytes(data).index(Model().embed.weight.detach().numpy().tobytes()[:64])] ^= 1
    (step / "data-00000-000.safetensors").write_bytes(data)
    refused("data-00000-000.safetensors: ", step, tmp_path / "out")
    assert {child.name for child in tmp_path.iterdir()} == {"run", "full", "file", "link", "empty"}
    assert (full / "mine").read_text() == "x" and not list((tmp_path / "empty").iterdir())


def test_an_empty_directory_is_filled(step, tmp_path):
    (tmp_path / "out").mkdir()
    export_hf(step, tmp_path / "out")
    assert [child.name for child in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_the_command_exports(mixle, step, tmp_path):
    code, out, err = mixle("checkpoint", "export-hf", tmp_path / "run", tmp_path / "out")
    assert (code, err) == (0, "") and out == f"{tmp_path}/out: step 7, 26 tensors in model.safetensors\n"
    code, out, err = mixle("checkpoint", "export-hf", tmp_path / "run", tmp_path / "out")
    assert (
        (code, out) == (1, "") and err.startswith(f"mixle: {tmp_path}/out: it exists, and is no empty directory") and err.count("\n") == 1
    )
    code, out, _ = mixle("checkpoint", "export-hf", step, tmp_path / "json", "--json", "--max-shard-size", "1KB")
    assert code == 0 and json.loads(out)["step"] == 7 and len(json.loads(out)["files"]) > 1


# ---- and back --------------------------------------------------------------------------------------------------------


def other(**options):
    model = Model(**options)
    with torch.no_grad():
        for tensor in (*model.parameters(), model.seen):
            tensor.fill_(1)
    return model


def test_weights_come_back_from_one_file_and_from_several(step, tmp_path):
    export_hf(step, tmp_path / "one")
    export_hf(step, tmp_path / "many", max_shard_size=600)
    for place in ("one", "many"):
        model = other()
        load_hf_weights(model, tmp_path / place)
        assert all(torch.equal(value, Model().state_dict()[name]) for name, value in model.state_dict().items())
        assert model.head.weight is model.embed.weight


def test_values_take_the_dtype_of_the_parameter(step, tmp_path):
    export_hf(step, tmp_path / "out")
    model = other().to(torch.float64)
    load_hf_weights(model, tmp_path / "out")
    assert torch.equal(model.embed.weight, Model().embed.weight.double()) and torch.equal(model.norm.weight, Model().norm.weight.double())


def wrong(directory, model, text):
    with pytest.raises(CheckpointError, match=text) as error:
        load_hf_weights(model, directory)
    assert "\n" not in str(error.value)


def test_names_shapes_and_dtypes_that_do_not_fit_are_refused_with_both_values(step, tmp_path):
    def files(name, **change):
        (tmp_path / name).mkdir()
        save_file({**stored(Model()), **change}, tmp_path / name / "model.safetensors")
        return tmp_path / name

    export_hf(step, tmp_path / "out")
    wrong(tmp_path / "out", other(tied=False), r"no head\.weight \(1 missing\); expected the 27 tensors of the model")
    wrong(files("extra", more=torch.ones(1)), other(), r"more, which the model has not \(1 such\)")
    shape = {"norm.bias": torch.ones(9, dtype=torch.bfloat16)}
    wrong(files("shape", **shape), other(), r"norm\.bias is torch\.bfloat16 of shape \[9\]; expected torch\.bfloat16 of shape \[8\]")
    wrong(
        files("dtype", **{"norm.bias": torch.ones(8, dtype=torch.int32)}), other(), r"norm\.bias is torch\.int32 of shape \[8\]; expected"
    )
    wrong(files("buffer", seen=torch.ones(())), other(), r"seen is torch\.float32 of shape \[\]; expected torch\.int64 of shape \[\]")
    # C47: both names are in the file
    head = files("untied", **{"head.weight": Model().embed.weight.detach() + 1})
    wrong(
        head,
        other(),
        r"embed\.weight and head\.weight differ, and the model has them tied; expected equal values; .*tie_word_embeddings=False",
    )
    model = other(tied=False)
    load_hf_weights(model, head)
    assert torch.equal(model.head.weight, Model().embed.weight + 1) and torch.equal(model.embed.weight, Model().embed.weight)
    load_hf_weights(other(), files("twice", **{"head.weight": Model().embed.weight.detach().clone()}))


def test_damaged_files_are_refused_and_nothing_outside_is_read(step, tmp_path):
    export_hf(step, tmp_path / "out", max_shard_size=1000)
    index = tmp_path / "out" / "model.safetensors.index.json"
    said, name = json.loads(index.read_text()), min(child.name for child in (tmp_path / "out").glob("*.safetensors"))
    shutil.copy(tmp_path / "out" / name, tmp_path / "x.safetensors")
    file = tmp_path / "out" / name
    whole = file.read_bytes()
    for change in ("../x.safetensors", str(tmp_path / "x.safetensors"), "x.bin", 3):
        index.write_text(json.dumps({"weight_map": {**said["weight_map"], "embed.weight": change}}))
        wrong(tmp_path / "out", other(), "safetensors files of the directory itself|the name of a file for each tensor")
    index.write_text(json.dumps({"weight_map": {k: v for k, v in said["weight_map"].items() if k != "seen"}}))
    wrong(tmp_path / "out", other(), "seen is there and not in the index")
    index.write_text(json.dumps(said))
    header = int.from_bytes(whole[:8], "little")
    for data in (
        whole[:-1], whole + b"x", b"", whole[:7], struct.pack("<Q", 2**60) + whole[8:], whole[:8] + b"{" * header + whole[8 + header :],
        whole[:8] + re.sub(rb'"shape":\[(\d)', rb'"shape":[9', whole[8:], count=1),
        whole[:8] + whole[8:].replace(b'"F32"', b'"F64"', 1), whole[:8] + whole[8:].replace(b'"F32"', b'"F31"', 1),
        whole[:8] + whole[8:].replace(b"[0,", b"[4,", 1),
    ):  # fmt: skip
        file.write_bytes(data)
        wrong(tmp_path / "out", other(), re.escape(str(file)))
    file.unlink()
    wrong(tmp_path / "out", other(), f"{name}: could not be opened: ENOENT")
    wrong(tmp_path / "run", other(), "model.safetensors: could not be opened: ENOENT")


def test_headers_with_flipped_bits_are_refused_or_say_the_same(step, tmp_path):
    export_hf(step, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    whole = file.read_bytes()
    draw, unseen = torch.Generator().manual_seed(0), 0
    for _ in range(200):
        bit = int(torch.randint(0, (8 + int.from_bytes(whole[:8], "little")) * 8, (), generator=draw))
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        model = other()
        try:
            load_hf_weights(model, tmp_path / "out")
        except CheckpointError:
            continue
        unseen += 1
        assert all(torch.equal(value, Model().state_dict()[name]) for name, value in model.state_dict().items())
    assert unseen < 20


def test_only_what_is_asked_for_is_read(tmp_path):
    """A file that is mostly a hole: its blocks are read where they lie."""
    shape, name = (2**20, 2**10), "w"
    head = json.dumps({name: {"dtype": "F32", "shape": list(shape), "data_offsets": [0, 2**32]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(8 + len(head) + 2**32)
    with HfWeights(tmp_path) as weights:
        assert weights.block(name, (2**19, 3), (2, 5)).tolist() == [[0] * 5] * 2

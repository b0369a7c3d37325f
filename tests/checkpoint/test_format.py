"""The page on the format, against what is written: a reader made from the page alone, and its tables and example."""

import hashlib
import json
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from mixle_core.checkpoint import shards
from mixle_core.checkpoint.values import _TAGS, decode

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoint-format.md").read_text()


def read_as_the_page_says(step):
    """Every tensor, with nothing of mixle: {(name, kind): array}; opaque tensors have no kind."""
    body, own, rest = (step / "_SUCCESS").read_bytes().split(b"\n")
    assert hashlib.sha256(body).hexdigest() == own.decode() and rest == b""
    success = json.loads(body)
    assert list(success) == re.findall(r"^\| `(\w+)` \|", PAGE.partition("## `_SUCCESS`")[2].partition("\n## ")[0], re.MULTILINE)
    raw = (step / "metadata.json").read_bytes()
    assert success["metadata"] == {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    metadata, found, heads = json.loads(raw), {}, {name: [] for name in success["files"]}
    entries = [((name, kind), entry) for name, kinds in metadata["tensors"].items() for kind, entry in kinds.items()]
    for (name, kind), entry in [*entries, *(((key, None), entry) for key, entry in metadata["opaque"].items())]:
        code = dict(_dtypes())[entry["dtype"]]
        width = {"BF16": 2}.get(code) or int(re.sub(r"\D", "", code)) // 8
        array = np.zeros((*entry["shape"], width), np.uint8)
        for offset, size, file, begin, length, checksum in entry["chunks"]:
            data = (step / file).read_bytes()
            assert len(data) == success["files"][file]
            block = data[begin : begin + length]
            assert f"{zlib.crc32(block):08x}" == checksum
            place = tuple(slice(start, start + extent) for start, extent in zip(offset, size, strict=True))
            array[place] = np.frombuffer(block, np.uint8).reshape(*size, width)
            heads[file].append((begin, begin + length, f"{kind or ''}:{name}@{','.join(map(str, offset))}", code, size))
        found[name, kind] = array
    for file, chunks in heads.items():
        chunks.sort()
        base = chunks[0][0]
        header = {key: {"dtype": code, "shape": size, "data_offsets": [a - base, b - base]} for a, b, key, code, size in chunks}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        assert (step / file).read_bytes()[:base] == struct.pack("<Q", len(text)) + text
    return found


def _dtypes():
    """(name, code) of the table of dtypes on the page."""
    for line in re.findall(r"^\| `(?:float|bfloat|complex).*$", PAGE, re.MULTILINE):
        cells = [re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split("|")]
        for names, codes in (cells[:2], cells[2:]):
            yield from zip(names, codes, strict=True)


def test_a_reader_made_from_the_page_reads_what_is_written(tmp_path, save, load):
    step = save(tmp_path, 1)
    found = read_as_the_page_says(step)
    tensors, opaques, _ = load(step)
    wanted = {**tensors, **{(key, None): tensor for key, tensor in opaques.items()}}
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert found[key].tobytes() == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), key


def test_the_tables_of_the_page_are_those_of_the_code():
    assert dict(_dtypes()) == {name: shards.FORMATS[dtype] for name, dtype in shards.DTYPES.items()}
    tags = re.findall(r'^\| `\{"(!\w+)": ', PAGE, re.MULTILINE)
    assert sorted(tags) == sorted(_TAGS)


def test_the_example_of_the_page_has_the_fields_of_a_manifest(tmp_path, save):
    example = json.loads(re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)[1])
    written = json.loads((save(tmp_path, 1) / "metadata.json").read_text())
    assert list(example) == list(written)
    entry, real = example["tensors"]["layers.0.weight"]["parameter"], written["tensors"]["layers.0.weight"]["parameter"]
    assert list(entry) == list(real)
    assert (entry["dtype"], entry["shape"]) == (real["dtype"], real["shape"])
    assert [chunk[:3] for chunk in entry["chunks"]] == [chunk[:3] for chunk in real["chunks"]]
    assert [list(map(type, chunk)) for chunk in entry["chunks"]] == [list(map(type, chunk)) for chunk in real["chunks"]]
    assert decode(example["values"]["loader"], "page") == {"epoch": 3, "seed": (1, None)}


@pytest.mark.parametrize("field", ["begin", "checksum"])
def test_that_reader_sees_a_wrong_field(tmp_path, save, forge, field):
    step = save(tmp_path, 1)
    metadata, success = forge.read(step)
    chunk = metadata["tensors"]["layers.0.weight"]["parameter"]["chunks"][0]
    chunk[3 if field == "begin" else 5] = chunk[3] + 4 if field == "begin" else "00000000"
    forge.write(step, metadata, success)
    with pytest.raises(AssertionError):
        read_as_the_page_says(step)

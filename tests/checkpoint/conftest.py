"""A small checkpoint with every kind of content, and what it must give back."""

import hashlib
import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch

from mixle_core.checkpoint import Piece, begin, commit, data_file, opaque, open_checkpoint, write_data
from mixle_core.cli import main


def tensors_of(step):
    """Whole tensors by (name, kind), of which every value names its step."""
    return {
        ("layers.0.weight", "parameter"): torch.arange(48, dtype=torch.float32).reshape(8, 6) + 1000 * step,
        ("layers.0.weight", "exp_avg"): torch.arange(48, dtype=torch.float32).reshape(8, 6) / 7 + step,
        ("layers.1.weight", "parameter"): torch.arange(48, dtype=torch.float32).reshape(8, 6) + 2000 * step,
        ("layers.1.bias", "parameter"): (torch.arange(5) + step).to(torch.bfloat16),
        ("layers.1.bias", "step"): torch.tensor(float(step)),
        ("empty", "parameter"): torch.zeros(0, 3, dtype=torch.float16),
    }


VALUES = {"plan": "dp_shard=2", "loader": {"epoch": 3, "seed": (1, None)}, "losses": [0.5, math.pi]}


@pytest.fixture
def save():
    """Save a step under a root: two data files, tensors cut into two blocks of rows where that goes."""

    def run(root, step, *, checksum="crc32", hook=None, extra=()):
        part = begin(root, step)
        blocks = ([], [opaque("rng.0", torch.arange(64, dtype=torch.uint8)), *extra])
        for (name, kind), tensor in tensors_of(step).items():
            rows = tensor.shape[0] // 2 if tensor.ndim else 0
            cuts = [(0, rows), (rows, tensor.shape[0])] if rows else [None]
            for rank, cut in enumerate(cuts):
                block = tensor if cut is None else tensor[cut[0] : cut[1]]
                offset = (0,) * tensor.ndim if cut is None else (cut[0], *(0,) * (tensor.ndim - 1))
                blocks[rank].append(Piece(name, kind, tuple(tensor.shape), offset, block))
        records = [record for rank in (0, 1) for record in write_data(part, data_file(rank), blocks[rank], checksum=checksum, hook=hook)]
        return commit(part, records, {**VALUES, "step": step}, checksum=checksum, hook=hook)

    return run


@pytest.fixture
def load():
    """Everything in a checkpoint: ({(name, kind): tensor}, {key: opaque tensor}, {key: value})."""

    def run(path):
        with open_checkpoint(path) as opened:
            tensors = {
                (name, kind): opened.read(name, kind, (0,) * len(stored.shape), stored.shape)
                for name, kinds in opened.metadata.tensors.items()
                for kind, stored in kinds.items()
            }
            return tensors, {key: opened.opaque(key) for key in opened.metadata.opaque}, dict(opened.values)

    return run


@pytest.fixture
def is_step(load):
    """Whether a directory loads as exactly what was saved as a step."""

    def run(path, step):
        tensors, opaques, values = load(path)
        wanted = tensors_of(step)
        return (
            tensors.keys() == wanted.keys()
            and all(tensors[key].dtype == wanted[key].dtype and torch.equal(tensors[key], wanted[key]) for key in wanted)
            and torch.equal(opaques["rng.0"], torch.arange(64, dtype=torch.uint8))
            and values == {**VALUES, "step": step}
        )

    return run


@pytest.fixture
def forge():
    """Rewrite `metadata.json` and `_SUCCESS` with the sums made right again, so that only what they say can be wrong."""

    def read(path):
        return json.loads((path / "metadata.json").read_text()), json.loads((path / "_SUCCESS").read_text().split("\n")[0])

    def write(path, metadata, success, *, raw=None):
        data = raw if raw is not None else json.dumps(metadata).encode()
        (path / "metadata.json").write_bytes(data)
        if type(success) is dict and type(success.get("metadata")) is dict and metadata is not None:
            success = {**success, "metadata": {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}}
        body = json.dumps(success).encode()
        (path / "_SUCCESS").write_bytes(body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n")

    return SimpleNamespace(read=read, write=write)


@pytest.fixture
def mixle(monkeypatch, capsys):
    """Run `mixle ARGUMENTS`; return (exit code, stdout, stderr)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["mixle", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        out, err = capsys.readouterr()
        return stopped.value.code, out, err

    return run

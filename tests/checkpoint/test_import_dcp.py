"""Checkpoints of plain torch, written in one process: what comes over, what is refused, and that nothing in them runs."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from mixle_core.checkpoint import CheckpointError, import_dcp, open_checkpoint, steps
from mixle_core.runtime import load_training_state


class Mixed(nn.Module):
    """Parameters of several dtypes and shapes, one that is frozen, one that is never used, and statistics."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.unused = nn.Linear(6, 10), nn.Linear(10, 3, bias=False), nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(10)
        self.scale = nn.Parameter(torch.tensor(1.5), requires_grad=False)
        self.register_buffer("table", torch.arange(6.0).to(torch.bfloat16))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, rows):
        return self.b(self.norm(self.a(rows))) * self.scale + self.empty.sum()


def trained(kind=torch.optim.AdamW, updates=2, **options):
    model = Mixed()
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=0.01, **options)
    for update in range(updates):
        step(model, optimizer, update)
    return model, optimizer


def step(model, optimizer, update):
    model(torch.randn(8, 6, generator=torch.Generator().manual_seed(update))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def write(path, state):
    dcp.save(state, checkpoint_id=str(path), no_dist=True)
    return path


def by_name(model, optimizer, *, flat=False):
    model_state, optimizer_state = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    return {"model": model_state, "optim": optimizer_state}


class App:
    """What the tutorial of torch saves."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        raise NotImplementedError


FORMS = {
    "by name": by_name,
    "flattened": lambda m, o: by_name(m, o, flat=True),
    "by number": lambda m, o: {"model": m.state_dict(), "optimizer": o.state_dict()},
    "in an object": lambda m, o: {"app": App(by_name(m, o))},
    "beside a model at the top": lambda m, o: {**m.state_dict(), "optimizer": by_name(m, o)["optim"]},
    "in a wrapper": lambda m, o: {
        "model": {f"module.{k}": v for k, v in m.state_dict().items()},
        "optim": {
            "state": {f"_orig_mod.{k}": v for k, v in by_name(m, o)["optim"]["state"].items()},
            "param_groups": by_name(m, o)["optim"]["param_groups"],
        },
    },
}
TRAINABLE = ["empty", "a.weight", "a.bias", "b.weight", "unused.weight", "unused.bias", "norm.weight", "norm.bias"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_comes_over_to_the_bit_and_the_next_update_is_that_of_the_unbroken_run(form, tmp_path):
    torch.set_num_threads(1)
    model, optimizer = trained()
    write(tmp_path / "dcp", FORMS[form](model, optimizer))
    options = {"buffers": ["table"], "order": TRAINABLE if form == "by number" else None}
    made = import_dcp(tmp_path / "dcp", tmp_path / "run", **options)
    assert (made.step, made.path.name, made.optimizer) == (2, "step-00000002", "AdamW")
    assert made.buffers == ("norm.num_batches_tracked", "norm.running_mean", "norm.running_var", "table")
    assert set(made.parameters) == {name for name, _ in model.named_parameters()}
    again = Mixed()
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.fill_(7)
    other = torch.optim.AdamW([p for p in again.parameters() if p.requires_grad], lr=0.5, betas=(0.5, 0.5))
    assert load_training_state(again, other, tmp_path / "run").step == 2
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value) and again.state_dict()[name].dtype == value.dtype, name
    for one, twin in zip(optimizer.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        ours, theirs = other.state.get(twin, {}), optimizer.state.get(one, {})
        # get_state_dict gives a state to what was never stepped
        assert ours.keys() == theirs.keys() or form != "by number"
        assert all(torch.equal(ours[kind], theirs[kind]) and ours[kind].dtype == theirs[kind].dtype for kind in theirs)
    assert other.param_groups[0]["lr"] == 0.01 and other.param_groups[0]["betas"] == (0.9, 0.999)
    step(model, optimizer, 2)
    step(again, other, 2)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    with open_checkpoint(made.path) as opened:
        opened.verify()


def test_a_model_alone_comes_over_without_an_optimizer(tmp_path):
    model, _ = trained(updates=0)
    made = import_dcp(write(tmp_path / "dcp", model.state_dict()), tmp_path / "run", step=5, buffers=["table"])
    assert (made.step, made.optimizer) == (5, None)
    again = Mixed()
    load_training_state(again, {}, tmp_path / "run")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        (torch.optim.Adam, {}, "Adam"),
        (torch.optim.AdamW, {"amsgrad": True}, "AdamW"),
        (torch.optim.SGD, {"momentum": 0.9}, "SGD"),
        (torch.optim.NAdam, {}, "NAdam"),
        (torch.optim.RMSprop, {}, "RMSprop"),
    ],
)
def test_the_class_of_the_optimizer_is_found_from_its_options(kind, options, says, tmp_path):
    model, optimizer = trained(kind, **options)
    made = import_dcp(write(tmp_path / "dcp", by_name(model, optimizer)), tmp_path / "run", buffers=["table"], step=2)
    assert made.optimizer == says
    again = Mixed()
    other = kind([p for p in again.parameters() if p.requires_grad], lr=1.0, **options)
    load_training_state(again, other, tmp_path / "run")
    step(model, optimizer, 2)
    step(again, other, 2)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


def test_steps_that_are_numbers_and_options_that_an_older_torch_did_not_have_are_filled_in_as_torch_does(tmp_path):
    model, optimizer = trained()
    state = copy.deepcopy(by_name(model, optimizer))
    for kept in state["optim"]["state"].values():
        kept["step"] = int(kept["step"])
    del state["optim"]["param_groups"][0]["decoupled_weight_decay"]
    write(tmp_path / "dcp", state)
    with pytest.raises(CheckpointError, match=r"nobody says which optimizer it is of .* --optimizer AdamW"):
        import_dcp(tmp_path / "dcp", tmp_path / "run", buffers=["table"])
    with pytest.raises(CheckpointError, match="its optimizer has the option 'amsgrad', which SGD has not"):
        import_dcp(tmp_path / "dcp", tmp_path / "run", buffers=["table"], optimizer="SGD")
    import_dcp(tmp_path / "dcp", tmp_path / "run", buffers=["table"], optimizer="AdamW")
    again = Mixed()
    other = torch.optim.AdamW([p for p in again.parameters() if p.requires_grad])
    load_training_state(again, other, tmp_path / "run")
    step(model, optimizer, 2)
    step(again, other, 2)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    assert float(other.state[again.a.weight]["step"]) == 3


def test_schedulers_values_and_other_tensors_come_along_and_groups_stay_apart(tmp_path):
    model = Mixed()
    parts = [[model.a.weight, model.b.weight], [model.a.bias]]
    optimizer = torch.optim.SGD([{"params": parts[0], "lr": 0.1}, {"params": parts[1], "lr": 0.2, "momentum": 0.5}])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    step(model, optimizer, 0)
    schedule.step()
    more = {
        "lr_scheduler": schedule,
        "step": 9,
        "odd": {"text": "x", "bytes": b"\xff", "nested": (1, [None, 2.5])},
        "draw": torch.arange(3),
    }
    made = import_dcp(write(tmp_path / "dcp", {**by_name(model, optimizer), **more}), tmp_path / "run", buffers=["table"])
    assert (made.step, made.scheduler, made.optimizer) == (9, True, "SGD")
    assert set(made.rest) == {"step", "odd.text", "odd.bytes", "odd.nested", "draw"}
    again = Mixed()
    other = torch.optim.SGD([{"params": [again.a.weight, again.b.weight]}, {"params": [again.a.bias]}], lr=9.0)
    resumed = torch.optim.lr_scheduler.StepLR(other, 5)
    loaded = load_training_state(again, other, tmp_path / "run", scheduler=resumed)
    assert loaded.metadata == {"imported": {"step": 9, "odd.text": "x", "odd.bytes": b"\xff", "odd.nested": (1, [None, 2.5])}}
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.2] and other.param_groups[1]["momentum"] == 0.5
    assert resumed.state_dict() == schedule.state_dict()
    with open_checkpoint(made.path) as opened:
        assert torch.equal(opened.opaque("imported/draw"), torch.arange(3))
    made = import_dcp(tmp_path / "dcp", tmp_path / "less", buffers=["table"], skip=["odd.**", "draw"])
    assert made.rest == ("step",) and len(made.skipped) == 4


def test_tied_names_are_one_when_said_so_and_equal_pairs_are_told(tmp_path):
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    optimizer = torch.optim.Adam(model.parameters())
    model["head"](model["embed"](torch.tensor([1, 2]))).sum().backward()
    optimizer.step()
    write(tmp_path / "dcp", by_name(model, optimizer))
    assert import_dcp(tmp_path / "dcp", tmp_path / "both").alike == (("embed.weight", "head.weight"),)
    made = import_dcp(tmp_path / "dcp", tmp_path / "run", tied={"head.weight": "embed.weight"})
    assert made.parameters == ("embed.weight",) and made.alike == ()
    load_training_state(model, optimizer, tmp_path / "run")
    numbered = write(tmp_path / "numbers", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert import_dcp(numbered, tmp_path / "run2", tied={"head.weight": "embed.weight"}).optimizer == "Adam"
    model["head"].weight = nn.Parameter(model["embed"].weight.detach() + 1)
    write(tmp_path / "untied", {"model": model.state_dict()})
    with pytest.raises(CheckpointError, match=r"head\.weight and embed\.weight are said to be tied, and differ"):
        import_dcp(tmp_path / "untied", tmp_path / "run3", tied={"head.weight": "embed.weight"})


def test_every_dtype_comes_over_to_the_bit(tmp_path):
    from mixle_core.checkpoint.shards import DTYPES

    values = torch.randint(0, 2, (4, 16), dtype=torch.uint8)
    model = {f"t.{name}": values.view(-1).clone().view(dtype) for name, dtype in DTYPES.items()}
    model["t.view"] = torch.arange(12.0).view(3, 4).t()
    made = import_dcp(write(tmp_path / "dcp", {"model": model}), tmp_path / "run")
    with open_checkpoint(made.path) as opened:
        for name, tensor in model.items():
            kind = "buffer" if name in made.buffers else "parameter"
            found = opened.read(name, kind, (0,) * tensor.dim(), tuple(tensor.shape))
            assert found.dtype == tensor.dtype
            assert torch.equal(found.contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


# ---- refusals --------------------------------------------------------------------------------------------------------


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (Path(self.mark),)


@pytest.fixture
def small(tmp_path):
    model, optimizer = trained(updates=1)
    return write(tmp_path / "dcp", {**by_name(model, optimizer), "step": 1})


def refused(path, tmp_path, text, **options):
    with pytest.raises(CheckpointError, match=text) as error:
        import_dcp(path, tmp_path / "run", buffers=["table"], **options)
    assert "\n" not in str(error.value) and not (tmp_path / "mark").exists()
    assert not (tmp_path / "run").exists() or (steps(tmp_path / "run") == () and not list((tmp_path / "run").iterdir()))


def metadata(path):
    return pickle.loads((path / ".metadata").read_bytes())


def rewrite(path, changed):
    (path / ".metadata").write_bytes(pickle.dumps(changed))


def test_a_pickle_in_place_of_the_metadata_is_refused_before_anything_runs(small, tmp_path):
    """C45."""
    (small / ".metadata").write_bytes(pickle.dumps(Payload(tmp_path / "mark")))
    refused(small, tmp_path, r"\.metadata: it asks for pathlib\.Path.*; expected only what .* nothing was run; way out")


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_payload_in_an_unused_field_is_refused(small, tmp_path, protocol):
    """C45: a checkpoint that torch loads with the right values, and that runs code."""
    changed = metadata(small)
    changed.storage_meta.modules = [Payload(tmp_path / "mark")]
    (small / ".metadata").write_bytes(pickle.dumps(changed, protocol=protocol))
    refused(small, tmp_path, "it asks for .*; nothing was run")
    dcp.load({"step": 0}, checkpoint_id=str(small), no_dist=True)
    assert (tmp_path / "mark").exists(), "the payload works"


@pytest.mark.parametrize(
    "name", ["builtins.eval", "os.system", "torch.load", "torch.serialization.load", "builtins.getattr", "copyreg._reconstructor"]
)
def test_names_that_are_not_on_the_list_are_refused(small, tmp_path, name):
    module, _, attribute = name.rpartition(".")
    (small / ".metadata").write_bytes(b"c%b\n%b\n(S'1'\ntR." % (module.encode(), attribute.encode()))
    refused(small, tmp_path, f"it asks for {name}; ".replace(".", r"\."))


@pytest.mark.parametrize(
    "body",
    [
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n(S'__setattr__'\nNtb.",  # state for the class itself
        b"ctorch.distributed.checkpoint.metadata\nMetadata\nN}S'find_class'\nNs\x86b.",
        b"ctorch\nSize\nN}S'__call__'\nNs\x86b.",
        b"\x82\x01.",  # an extension
        b"Ppersistent\n.",
        b"",
        b".",
        b"\x80\x04N.",
        b"\x80\x04]\x94(h\x00h\x00e.",
    ],
)
def test_odd_pickles_are_one_line(small, tmp_path, body):
    (small / ".metadata").write_bytes(body)
    refused(small, tmp_path, r"\.metadata: ")


def entry(path, key):
    """(file, first byte, length) of what is no tensor."""
    info = next(info for index, info in metadata(path).storage_data.items() if index.fqn == key)
    return path / info.relative_path, info.offset, info.length


def replace(path, key, body):
    """Put other bytes in place of an entry, at the end of its file."""
    changed = metadata(path)
    for index, info in changed.storage_data.items():
        if index.fqn == key:
            file = path / info.relative_path
            info.offset, info.length = file.stat().st_size, len(body)
            file.write_bytes(file.read_bytes() + body)
    rewrite(path, changed)


def saved(value):
    body = io.BytesIO()
    torch.save(value, body)
    return body.getvalue()


@pytest.mark.parametrize("key", ["step", "optim.param_groups.0.lr", "model.a.weight"])
def test_a_payload_in_an_entry_is_refused(small, tmp_path, key):
    """C45."""
    replace(small, key, saved(Payload(tmp_path / "mark")))
    refused(small, tmp_path, f"{key}: it asks for .*; nothing was run")
    replace(small, key, pickle.dumps(Payload(tmp_path / "mark")))
    refused(small, tmp_path, f"{key}: nothing that torch.save wrote")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [torch.ones(2)]}, "a tensor inside a value; expected plain values; way out: leave the entry out with skip"),
        ({1, 2}, "it asks for __builtin__.set"),
        (nn.Linear, "it asks for torch.nn.modules.linear.Linear"),
        (OrderedDict, "a type; expected plain values"),
        (torch.Size([1]), None),
        (OrderedDict(a=b"\x80"), None),
    ],
)
def test_values_that_are_not_plain_are_refused_and_can_be_left_out(small, tmp_path, value, text):
    replace(small, "step", saved(value))
    if text is None:
        import_dcp(small, tmp_path / "run", buffers=["table"])
        return
    refused(small, tmp_path, text)
    assert import_dcp(small, tmp_path / "run", buffers=["table"], skip=["step"]).skipped == ("step",)


class Odd:
    """An ordered dict with an attribute in place of a method."""

    def __reduce__(self):
        return OrderedDict, ([("a", 1)],), {"items": OrderedDict}


def test_an_attribute_set_on_an_ordered_dict_is_not_called(small, tmp_path):
    replace(small, "step", saved(Odd()))
    made = import_dcp(small, tmp_path / "run", buffers=["table"], step=1)
    with open_checkpoint(made.path) as opened:
        assert opened.value("metadata") == {"imported": {"step": {"a": 1}}}


def test_values_that_refer_to_each_other_over_and_over_are_refused_at_once(small, tmp_path):
    value = []
    for _ in range(60):
        value = [value, value, value]
    replace(small, "step", saved(value))
    refused(small, tmp_path, "step: nested more than 64 deep, in a cycle, or the same parts many times over")


def test_only_the_metadata_of_the_whole_is_read(small, tmp_path):
    """C45: the file that torch falls back to."""
    (small / "__0.metadata").write_bytes(pickle.dumps(Payload(tmp_path / "mark")))
    assert import_dcp(small, tmp_path / "ok", buffers=["table"]).step == 1
    (small / ".metadata").unlink()
    refused(small, tmp_path, r"\.metadata: missing; expected .* files such as __0.metadata are no substitute")


@pytest.mark.parametrize("name", ["../x", "/etc/hostname", "sub/x", "..", "", "x\0y", "link"])
def test_files_elsewhere_are_not_read(small, tmp_path, name):
    """C45."""
    source = next(small.glob("*.distcp"))
    for place in (tmp_path / "x", small / "sub" / "x"):
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(source.read_bytes())
    (small / "link").symlink_to(tmp_path / "x")
    changed = metadata(small)
    for info in changed.storage_data.values():
        info.relative_path = name
    rewrite(small, changed)
    refused(small, tmp_path, "ELOOP" if name == "link" else "a file of the directory itself, by its name")


def test_a_link_in_place_of_the_metadata_or_of_the_directory_is_not_followed(small, tmp_path):
    (tmp_path / "alias").symlink_to(small)
    refused(tmp_path / "alias", tmp_path, "ELOOP|ENOTDIR")
    (small / ".metadata").rename(tmp_path / "elsewhere")
    (small / ".metadata").symlink_to(tmp_path / "elsewhere")
    refused(small, tmp_path, "ELOOP")


def test_sizes_are_checked_before_anything_is_read(small, tmp_path):
    changed = metadata(small)
    next(iter(changed.storage_data.values())).length = 2**50
    rewrite(small, changed)
    refused(small, tmp_path, r"distcp: \d+ bytes; expected at least 11258999068\d+, for ")


def test_chunks_that_are_missing_or_overlap_are_refused(small, tmp_path):
    for change, text in (
        (lambda chunks: chunks.clear(), "the chunks of model.a.weight is"),
        (lambda chunks: setattr(chunks[0], "sizes", torch.Size([4, 6])), "model.a.weight: its chunks have 24 elements, the tensor 60"),
        (lambda chunks: chunks.append(chunks[0]), "model.a.weight: its chunks have 120 elements, the tensor 60"),
        (lambda chunks: setattr(chunks[0], "offsets", torch.Size([1, 0])), "the place of model.a.weight at"),
    ):
        changed = metadata(small)
        change(changed.state_dict_metadata["model.a.weight"].chunks)
        before = (small / ".metadata").read_bytes()
        rewrite(small, changed)
        refused(small, tmp_path, text)
        (small / ".metadata").write_bytes(before)


def test_a_flipped_bit_is_refused_where_torch_loads_it(small, tmp_path):
    file, begin, _ = entry(small, "model.a.weight")
    data = bytearray(file.read_bytes())
    place = bytes(data).index(trained(updates=1)[0].a.weight.detach().numpy().tobytes()[:64], begin)
    data[place + 3] ^= 4
    file.write_bytes(data)
    refused(small, tmp_path, "model.a.weight: the CRC32 of data/0 is another; expected .*set_crc32_options")


def test_random_damage_never_gives_other_values_and_never_a_traceback(small, tmp_path):
    whole = import_dcp(small, tmp_path / "whole", buffers=["table"])
    files = [small / ".metadata", next(small.glob("*.distcp"))]
    contents = {file: file.read_bytes() for file in files}
    draw = torch.Generator().manual_seed(0)
    outcomes = {"refused": 0, "equal": 0}
    for number in range(80):
        file = files[number % 2]
        data = bytearray(contents[file])
        bit = int(torch.randint(0, len(data) * 8, (), generator=draw))
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        try:
            made = import_dcp(small, tmp_path / f"n{number}", buffers=["table"], step=1)
            outcomes["equal" if same(made.path, whole.path) else f"other values: bit {bit} of {file.name}"] = 1 + outcomes.get("equal", 0)
        except CheckpointError:
            outcomes["refused"] += 1
        file.write_bytes(contents[file])
    # `.metadata` has no checksum: names and options may change unseen, tensors not
    assert outcomes["refused"] > 20 and not [key for key in outcomes if key.startswith("other values") and "distcp" in key], outcomes


def same(one, other):
    with open_checkpoint(one) as a, open_checkpoint(other) as b:
        if a.metadata.values != b.metadata.values or a.metadata.tensors.keys() != b.metadata.tensors.keys():
            return False
        return all(
            a.kinds(name) == b.kinds(name)
            and all(
                torch.equal(a.read(name, k, (0,) * len(s.shape), s.shape), b.read(name, k, (0,) * len(s.shape), s.shape))
                for k, s in kinds.items()
            )
            for name, kinds in a.metadata.tensors.items()
        )


def test_what_does_not_belong_together_is_refused(tmp_path):
    model, optimizer = trained(updates=1)
    state = by_name(model, optimizer)
    cases = [
        ({"optim": state["optim"]}, {}, "no tensor of a model; there is optim"),
        (state, {"model": "net"}, "no tensor of a model under 'net'; there is model, optim"),
        ({"model": {"a": torch.ones(2), "module.a": torch.ones(2)}}, {}, "model.a and model.module.a are both a without the segments"),
        ({**state, "model": {"a.weight": torch.ones(2)}}, {}, "the optimizer has .*, which the model has not"),
        (
            {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
            {},
            "the optimizer numbers 8 parameters in 1 groups, and the model has 9",
        ),
        (
            {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
            {"order": ["empty", "a.bias", "a.weight", *TRAINABLE[3:]]},
            r"exp_avg has shape \[10, 6\], and a.bias has \[10\]; expected the same; way out: give the right order=",
        ),
        (state, {"tied": {"a.weight": "nothing"}}, "a.weight tied to nothing: nothing is not there"),
    ]
    for number, (content, options, text) in enumerate(cases):
        refused(write(tmp_path / f"dcp{number}", content), tmp_path, text, **options)


def test_a_committed_step_is_never_written_again(small, tmp_path):
    import_dcp(small, tmp_path / "run", buffers=["table"])
    with pytest.raises(CheckpointError, match="the step is committed already"):
        import_dcp(small, tmp_path / "run", buffers=["table"])
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == ["step-00000001"]


def test_the_command_imports_and_says_what_came_over(mixle, small, tmp_path):
    code, out, err = mixle("checkpoint", "import-dcp", small, tmp_path / "run", "--buffer", "table", "--step", "7")
    assert (code, err) == (0, "")
    assert "step-00000007: 9 parameters, 4 buffers, AdamW\nkept beside them: step\n" in out
    assert mixle("checkpoint", "verify", tmp_path / "run")[0] == 0
    (small / ".metadata").write_bytes(pickle.dumps(Payload(tmp_path / "mark")))
    code, out, err = mixle("checkpoint", "import-dcp", small, tmp_path / "run")
    assert code == 1 and out == "" and err.startswith(f"mixle: {small}/.metadata: it asks for ") and err.count("\n") == 1
    assert mixle("checkpoint", "import-dcp", small, tmp_path / "run", "--tied", "a")[0] == 1
    assert not (tmp_path / "mark").exists()


def test_one_chunk_at_a_time_is_in_memory(tmp_path):
    import tracemalloc

    model = {f"w{i}": torch.zeros(2**18) for i in range(16)}
    write(tmp_path / "dcp", {"model": model})
    tracemalloc.start()
    import_dcp(tmp_path / "dcp", tmp_path / "run")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2.5 * 2**20, f"{peak / 2**20:.1f} MiB for tensors of 1 MiB"

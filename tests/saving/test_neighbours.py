"""From plain torch and to transformers, with ranks: what was trained there goes on here under any plan, and the other way round."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import toys
from test_contents import NATIVE, native, step_natively

import mixle_core as mx
from mixle_core.audit import relative_error
from mixle_core.checkpoint import export_hf, import_dcp, open_checkpoint
from mixle_core.runtime import load_hf_weights, load_training_state
from mixle_core.testing import next_token_loss, run_ranks

OPTIMIZER = partial(torch.optim.AdamW, lr=1e-2, eps=1e-6)


# ---- a training of plain torch ---------------------------------------------------------------------------------------


class Block(nn.Module):
    """Norm, two projections, and the way around them."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, hidden):
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class Small(nn.Module):
    """What `parallelize_module` can cut: an embedding, blocks of two projections with a norm before them, a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 32, bias=False)

    def forward(self, ids):
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class SmallLayout:
    """Its layout here."""

    @mx.hookimpl
    def declare_layout(self, model, plan):
        whole, part = mx.Replica("complete"), mx.Replica("partial")
        enter, leave = mx.Boundary(outside=whole, inside=part), mx.Boundary(outside=whole, inside=mx.Term())
        norm = mx.ModuleLayout(parameters={"{weight,bias}": whole})
        modules = {
            "embed": mx.ModuleLayout(parameters={"weight": mx.Shard(0)}, lookup="weight", output=leave),
            "blocks.*.norm": norm,
            "blocks.*.up": mx.ModuleLayout(parameters={"{weight,bias}": mx.Shard(0)}, inputs={0: enter}),
            "blocks.*.down": mx.ModuleLayout(parameters={"weight": mx.Shard(1), "bias": part}, output=leave, once=("bias",)),
            "norm": norm,
            "head": mx.ModuleLayout(
                parameters={"weight": mx.Shard(0)}, inputs={0: enter}, output=mx.Boundary(outside=whole, inside=mx.Shard(-1))
            ),
        }
        return mx.ModelLayout(axis="tp", modules=modules, units=("blocks.*",))


def plain(root: str):
    """FSDP2 over dp and parallelize_module over tp on four ranks: two updates, what dcp.save writes in each form, and a third."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.set_num_threads(1)
    model = Small()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    cut = {"embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh["tp"], {**cut, "blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()})
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = OPTIMIZER(model.parameters())

    def update(number):
        rows = toys.rows(mx.ParallelPlan(dp_shard=2, tp=2), number)
        loss, count = next_token_loss(model, rows)
        (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()

    def whole():
        found = {}
        for name, parameter in model.named_parameters():
            kinds = {"parameter": parameter.detach(), **optimizer.state[parameter]}
            found |= {f"{kind}:{name}": getattr(value, "full_tensor", lambda value=value: value)().clone() for kind, value in kinds.items()}
        return found

    update(0)
    update(1)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=f"{root}/by name")
    model_state, optimizer_state = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=f"{root}/flattened")
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=f"{root}/by number")
    before = whole()
    update(2)
    return before, whole()


FORMS = ("by name", "flattened", "by number")
PLANS = ("one", "ddp2", "fsdp2", "tp2", "fsdp2 x tp2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("plain")
    before, after = run_ranks(plain, 4, str(root), reuse=True)[0].value
    for form in FORMS:
        made = import_dcp(root / form, root / f"{form} imported")
        assert (made.step, made.optimizer, made.buffers, made.alike) == (2, "AdamW", (), ())
    return root, before, after


def test_what_ranks_of_plain_torch_wrote_is_in_the_step_to_the_bit(trained):
    root, before, _ = trained
    for form in FORMS:
        with open_checkpoint(root / f"{form} imported" / "step-00000002") as opened:
            assert sum(len(kinds) for kinds in opened.metadata.tensors.values()) == len(before)
            for key, value in before.items():
                kind, _, name = key.partition(":")
                assert torch.equal(opened.read(name, kind, (0,) * value.dim(), tuple(value.shape)), value), (form, key)
            opened.verify()


def goes_on(plan: str, root: str):
    """A session of ours from each form: its state, and that after the next update."""
    found = {}
    for form in FORMS:
        chosen = toys.PLANS[plan]
        plugins = {"small": SmallLayout()} if chosen.tp > 1 else None
        session = mx.prepare(Small(), chosen, loss=next_token_loss, optimizer=OPTIMIZER, plugins=plugins, seed=3)
        loaded = session.load(f"{root}/{form} imported")
        assert (loaded.step, loaded.same_ranks, session.update) == (2, False, 2)
        state = toys.whole_state(session)
        session.train_batch(toys.rows(chosen, 2))
        found[form] = state, toys.whole_state(session)
        session.close()
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_a_training_of_plain_torch_goes_on_here_under_any_plan(plan, trained):
    root, before, after = trained
    for outcome in run_ranks(goes_on, toys.PLANS[plan].world_size, plan, str(root), reuse=True):
        for form, (state, next_state) in outcome.value.items():
            assert state.keys() == before.keys() and {key for key in before if not torch.equal(state[key], before[key])} == set(), form
            worst = max(relative_error(next_state[key], after[key]) for key in after if not key.startswith("step"))
            assert worst <= 1e-5, (form, worst)


def uneven(root: str, begin: bool, plan: str):
    """Rows that do not divide, without a session: written by plain torch, read by `load_training_state`."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    torch.set_num_threads(1)
    model, optimizer = native(plan)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    if begin:
        for update in range(2):
            step_natively(model, optimizer, update)
            schedule.step()
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optim": optimizer_state, "lr_scheduler": schedule}, checkpoint_id=f"{root}/{plan}")
    else:
        assert load_training_state(model, optimizer, f"{root}/imported", scheduler=schedule).step == 2
    before = [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in model.parameters()]
    step_natively(model, optimizer, 2)
    return before, [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in model.parameters()], schedule.get_last_lr()


def test_uneven_shards_and_schedules_of_plain_torch_go_on_under_any_native_plan(tmp_path):
    before, after, rate = run_ranks(uneven, 4, str(tmp_path), True, "fsdp2 x tp", reuse=True)[0].value
    assert import_dcp(tmp_path / "fsdp2 x tp", tmp_path / "imported").scheduler
    for plan, size in NATIVE.items():
        if plan == "fsdp2 of four":
            continue
        for outcome in run_ranks(uneven, size, str(tmp_path), False, plan, reuse=True):
            ours, next_ours, our_rate = outcome.value
            assert our_rate == rate and all(torch.equal(a, b) for a, b in zip(ours, before, strict=True)), plan
            assert max(relative_error(a, b) for a, b in zip(next_ours, after, strict=True)) <= 1e-5, plan


# ---- transformers ----------------------------------------------------------------------------------------------------


def qwen3(size: str):
    from mixle_qwen3.build import SIZES
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES[size]))


def session_of(model, plan: str):
    # the first update of Adam is a sign where gradients are as small as eps: rounding would count
    optimizer = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)
    return mx.prepare(model, toys.PLANS[plan], loss=next_token_loss, optimizer=optimizer, seed=3)


def train(root: str, size: str, plan: str):
    """One update under the plan and a save; the model of one process with the same values, as transformers writes it."""
    model = qwen3(size)
    session = session_of(model, plan)
    session.train_batch(toys.rows(toys.PLANS[plan], 0) + 32)
    session.save(f"{root}/{size}/run")
    state = toys.whole_state(session)
    if not dist.is_initialized() or dist.get_rank() == 0:
        reference = qwen3(size)
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                parameter.copy_(state[f"parameter:{name}"])
        reference.save_pretrained(f"{root}/{size}/reference")
        reference.save_pretrained(f"{root}/{size}/reference shards", max_shard_size="100KB")
    session.close()


SIZES = ("tiny", "tiny-tied")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    root = tmp_path_factory.mktemp("hf")
    for size in SIZES:
        run_ranks(train, 4, str(root), size, "fsdp2 x tp2", reuse=True)
        export_hf(root / size / "run", root / size / "out", like=root / size / "reference")
        export_hf(root / size / "run", root / size / "shards", like=root / size / "reference", max_shard_size="100KB")
    return root


@pytest.mark.parametrize("size", SIZES)
def test_an_export_has_the_bytes_of_save_pretrained(size, exported):
    """Saved by four ranks; every file of the directory is equal, tied head or not."""
    from safetensors.torch import load_file

    ours, theirs = exported / size / "out", exported / size / "reference"
    assert {child.name for child in ours.iterdir()} == {child.name for child in theirs.iterdir()}
    for child in theirs.iterdir():
        assert (ours / child.name).read_bytes() == child.read_bytes(), child.name
    ours, theirs = exported / size / "shards", exported / size / "reference shards"
    found, wanted = ({k: v for file in sorted(place.glob("*.safetensors")) for k, v in load_file(file).items()} for place in (ours, theirs))
    assert len(list(ours.glob("*.safetensors"))) > 2 and found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) and found[name].dtype == wanted[name].dtype for name in wanted)
    assert ("lm_head.weight" in wanted) == (size == "tiny")
    index, reference = (parsed(place / "model.safetensors.index.json") for place in (ours, theirs))
    assert index["metadata"] == reference["metadata"] and index["weight_map"].keys() == reference["weight_map"].keys()


def parsed(path):
    return json.loads(path.read_text())


@pytest.mark.parametrize("size", SIZES)
def test_from_pretrained_reads_an_export_and_ties_its_head_again(size, exported):
    from transformers import Qwen3ForCausalLM

    wanted = Qwen3ForCausalLM.from_pretrained(exported / size / "reference").state_dict()
    for place in ("out", "shards"):
        model, report = Qwen3ForCausalLM.from_pretrained(exported / size / place, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        assert (model.lm_head.weight is model.model.embed_tokens.weight) is (size == "tiny-tied")
        assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())


def test_a_head_that_was_untied_by_hand_is_kept_and_comes_back(tmp_path):
    """C47: the config says tied, and the memory is not."""
    from mixle_qwen3.build import build
    from transformers import Qwen3ForCausalLM

    from mixle_core.runtime import save_training_state

    model = qwen3("tiny-tied")
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach() + 1)
    model.save_pretrained(tmp_path / "reference")
    save_training_state(model, {}, tmp_path / "run", step=0)
    export_hf(tmp_path / "run", tmp_path / "out", like=tmp_path / "reference")
    for child in (tmp_path / "reference").iterdir():
        assert (tmp_path / "out" / child.name).read_bytes() == child.read_bytes(), child.name
    for again in (Qwen3ForCausalLM.from_pretrained(tmp_path / "out"), build(str(tmp_path / "out"))):
        assert torch.equal(again.lm_head.weight, model.lm_head.weight)
        assert torch.equal(again.model.embed_tokens.weight, model.model.embed_tokens.weight)


def train_on(root: str, size: str, plan: str, place: str):
    """From an exported directory through the plugin, and by reading the slices of this rank into a model of the same size."""
    from mixle_qwen3.build import SIZES, build
    from transformers import Qwen3Config, Qwen3ForCausalLM

    directory, batch = f"{root}/{size}/{place}", toys.rows(toys.PLANS[plan], 1) + 32
    through = session_of(build(directory), plan)
    with torch.device("meta"):
        empty = Qwen3ForCausalLM(Qwen3Config(**SIZES[size]))
    filled = session_of(empty, plan)
    load_hf_weights(filled.reduction, directory)
    first, second = toys.whole_state(through), toys.whole_state(filled)
    losses = through.train_batch(batch).loss, filled.train_batch(batch).loss
    after = toys.whole_state(through), toys.whole_state(filled)
    through.close()
    filled.close()
    return first, second, losses, after


@pytest.mark.parametrize(
    ("size", "plan", "place"), [("tiny", "tp2", "shards"), ("tiny-tied", "tp2", "out"), ("tiny-tied", "fsdp2 x tp2", "shards")]
)
def test_an_export_trains_on_under_another_plan(size, plan, place, exported):
    from transformers import Qwen3ForCausalLM

    wanted = dict(Qwen3ForCausalLM.from_pretrained(exported / size / "reference").named_parameters())
    reference = run_ranks(train_on, 1, str(exported), size, "one", "out", reuse=True)[0].value
    for outcome in run_ranks(train_on, toys.PLANS[plan].world_size, str(exported), size, plan, place, reuse=True):
        first, second, losses, after = outcome.value
        for state in (first, second):
            assert {key.partition(":")[2] for key in state} == set(wanted)
            assert all(torch.equal(state[f"parameter:{name}"], value) for name, value in wanted.items())
        assert losses[0] == losses[1] and abs(losses[0] - reference[2][0]) < 1e-5 * losses[0]
        for state in after:
            assert max(relative_error(state[key], value) for key, value in reference[3][0].items() if key.startswith("parameter")) <= 1e-5


def misfits(root: str):
    """Every rank is told what any found wrong."""
    session = session_of(qwen3("tiny"), "tp2")
    said = []
    for place in (f"{root}/tiny-tied/out", f"{root}/tiny/out" if dist.get_rank() else f"{root}/nowhere"):
        try:
            load_hf_weights(session.reduction, place)
        except mx.MixleError as error:
            said.append(str(error))
    session.close()
    return said


def test_what_one_rank_cannot_read_is_an_error_on_all(exported):
    for outcome in run_ranks(misfits, 2, str(exported), reuse=True):
        tied, nowhere = outcome.value
        assert "rank 0: " in tied and "no lm_head.weight (1 missing); expected the 25 tensors of the model" in tied
        assert "rank 0: " in nowhere and "nowhere/model.safetensors: could not be opened: ENOENT" in nowhere

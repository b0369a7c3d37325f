"""What attach refuses before training, on every rank and in time."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import mixle_core as mx
from mixle_core.testing import OwnsEverything, ToyLayout, ToyLM, run_ranks, toy_model

Plan = mx.ParallelPlan
OURS = {"toy": ToyLayout(), "double": OwnsEverything()}


def said(function):
    """Type name and text of what `function` raises."""
    try:
        function()
    except Exception as error:  # noqa: BLE001 - the test judges what it is
        return type(error).__name__, str(error)
    return None, ""


# models that something else parallelises already


def wrapped(kind):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    if kind == "DistributedDataParallel":
        return DistributedDataParallel(model)
    if kind == "FSDPLinear":
        fully_shard(model[1], mesh=init_device_mesh("cpu", (1,)))
    if kind == "DTensor parameters":
        model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), init_device_mesh("cpu", (1,)), [Replicate()]))
    if kind == "gradient hooks":
        model[0].bias.register_hook(lambda gradient: gradient * 2)
    if kind == "post-accumulate hooks":
        model[0].bias.register_post_accumulate_grad_hook(lambda parameter: None)
    return model


FOREIGN = {
    "DistributedDataParallel": "DistributedDataParallel (module at the root)",
    "FSDPLinear": "FSDPLinear (module 1)",
    "DTensor parameters": "DTensor parameters (0.weight)",
    "gradient hooks": "gradient hooks (0.bias)",
    "post-accumulate hooks": "gradient hooks (0.bias)",
}


def attach_to_foreign_models():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return {kind: said(lambda kind=kind: mx.attach(wrapped(kind), Plan(), plugins={})) for kind in FOREIGN}


def test_a_model_that_something_else_parallelises_is_refused_with_its_name():
    found = run_ranks(attach_to_foreign_models, 1, timeout_s=60)[0].value
    for kind, where in FOREIGN.items():
        error, text = found[kind]
        assert error == "CapabilityError" and text.startswith("the model already carries") and where in text
        assert text.endswith("expected a plain module; pass the model before anything wraps it")


# ranks that do not agree


class Raises:
    @mx.hookimpl
    def declare_layout(self, model):
        if dist.is_initialized() and dist.get_rank() == 2:
            raise ZeroDivisionError("in a plugin")


def reordered():
    model = toy_model()
    blocks = model._modules.pop("blocks")
    model.blocks = blocks
    return model


def frozen():
    model = toy_model()
    model.head.weight.requires_grad_(False)
    return model


def tied():
    with torch.device("meta"):
        return ToyLM(tied=True)


def attach_with_an_odd_rank(odd_ones):
    """Attach again and again, each time with something of rank 2 changed; a refusal leaves the ranks fit for the next."""
    found = {}
    for odd in odd_ones:
        model, options = toy_model(), {"plan": Plan(dp_replicate=3), "plugins": OURS, "seed": 0}
        if dist.get_rank() == 2:
            changed = {
                "seed": {"seed": 1},
                "plan": {"plan": Plan(dp_replicate=3, gradient_accumulation_steps=2)},
                "world": {"plan": Plan(dp_replicate=2)},
                "plugins": {"plugins": {**OURS, "more": object()}},
                "no owner": {"plugins": {}},
                "backend": {"backend": "megatron"},
            }
            options.update(changed.get(odd, {}))
            models = {"order": reordered, "trainable": frozen, "ties": tied, "size": lambda: ToyLM(blocks=1)}
            model = models[odd]() if odd in models else model
        if odd == "raises":
            options["plugins"] = {**OURS, "raises": Raises()}
        started = time.monotonic()
        found[odd] = (*said(lambda model=model, options=options: mx.attach(model, **options)), time.monotonic() - started)
    return found


DISAGREE = {
    "seed": "rank 2 differs from rank 0 at extra.seed: 1 against 0",
    "plan": "rank 2 differs from rank 0 at plan.gradient_accumulation_steps: 2 against 1",
    "plugins": 'rank 2 differs from rank 0 at plugins.more: "in code" against "absent"',
    "order": 'rank 2 differs from rank 0 at sequence[1]: "norm.weight" against "blocks.0.norm.weight"',
    "trainable": "rank 2 differs from rank 0 at parameters[head.weight].trainable: false against true",
    "ties": "rank 2 differs from rank 0 at parameters[embed.weight].aliases[head.weight]: 1 entries (only there) against 0 entries",
    "size": 'rank 2 differs from rank 0 at parameters[9].name: "embed.weight" against "blocks.1.branch.bias"',
}
FAILS = {
    "raises": ("ZeroDivisionError", "in a plugin", "rank 2 could not prepare: ZeroDivisionError: in a plugin"),
    "world": (
        "CapabilityError",
        "world size is 3 (the process group), the plan needs 2 (dp_replicate=2)",
        "rank 2 could not prepare: world size is 3",
    ),
    "no owner": (
        "OwnershipError",
        "each trainable parameter needs exactly one owner; none for 22 of 22",
        "rank 2 could not prepare: each trainable",
    ),
    "backend": ("CapabilityError", "backend megatron: no plugin of it owns dp_replicate=3", "rank 2 could not prepare: backend megatron"),
}


@pytest.fixture(scope="module")
def odd_rank():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIXLE_PLUGINS", "")
        return [outcome.value for outcome in run_ranks(attach_with_an_odd_rank, 3, [*DISAGREE, *FAILS], timeout_s=60)]


@pytest.mark.parametrize("odd", list(DISAGREE))
def test_ranks_that_prepared_different_things_all_fail_and_name_the_odd_one(odd_rank, odd):
    for found in odd_rank:
        error, text, seconds = found[odd]
        assert error == "AgreementError" and seconds < 20
        assert text == f"ranks prepared different things: {DISAGREE[odd]}; make them alike before training"


@pytest.mark.parametrize("odd", list(FAILS))
def test_a_rank_that_fails_while_preparing_fails_all_and_is_named(odd_rank, odd):
    own_error, own_text, others = FAILS[odd]
    for rank, found in enumerate(odd_rank):
        error, text, seconds = found[odd]
        assert error == (own_error if rank == 2 else "AgreementError") and seconds < 20
        assert text.startswith(own_text if rank == 2 else others)


class FillsOnOneRank:
    @mx.hookimpl
    def init_params(self, model):
        if dist.get_rank() == 1:
            raise MemoryError("no room")


def attach_without_room():
    return said(lambda: mx.attach(toy_model(), Plan(dp_replicate=2), plugins={**OURS, "fills": FillsOnOneRank()}))


def test_a_rank_that_fails_while_filling_parameters_fails_all():
    first, second = (outcome.value for outcome in run_ranks(attach_without_room, 2, timeout_s=30))
    assert first == ("UsageError", "rank 1: MemoryError: no room") and second == ("MemoryError", "no room")


# what stands in the way under any number of ranks


@pytest.mark.parametrize(
    ("plan", "plugins", "error", "text"),
    [
        (Plan(dp_shard=2), {}, mx.OwnershipError, r"exactly one owner; none for 22 of 22\n.*\nway out: install or enable a plugin"),
        (
            Plan(dp_shard=2),
            {"a": OwnsEverything(), "b": OwnsEverything()},
            mx.OwnershipError,
            r"several for 22 of 22\n  blocks\.0\.branch\.bias: claimed by a \(passed in code\) and b \(passed in code\)",
        ),
        (Plan(pp=2), OURS, mx.CapabilityError, r"exactly one executor \(plan: pp=2\); none for 1 of 1: pp; way out: set the axis to 1"),
        (Plan(cp=2), OURS, mx.CapabilityError, r"executor \(plan: cp=2\); none for 1 of 1: cp; way out: set the axis to 1"),
        (Plan(dp_shard=2, ep=2), OURS, mx.CapabilityError, r"executor \(plan: dp_shard=2 x ep=2\); none for 1 of 1: ep"),
        (Plan(tp=2), OURS, mx.CapabilityError, r"executor \(plan: tp=2\); none for 1 of 1: tp"),
        (Plan(dp_shard=2), None, mx.OwnershipError, "none for 22 of 22"),
        (Plan(dp_shard=2), ["nothing"], mx.PluginError, "no plugin named 'nothing' is installed; way out: pip install mixle-nothing"),
    ],
)
def test_plans_that_nobody_or_several_serve_are_refused_without_a_process_group(plan, plugins, error, text):
    with pytest.raises(error, match=f"(?s){text}"):
        mx.explain(toy_model(), plan, plugins=plugins)


def answering(hook, answer):
    """A plugin whose one hook returns `answer`."""
    return type("Answers", (), {hook: mx.hookimpl(lambda self: answer)})()


@pytest.mark.parametrize(
    ("hook", "answer", "error", "text"),
    [
        ("declare_layout", {"norm": "Shard"}, mx.PluginError, "declare_layout returned dict, expected ModelLayout or None"),
        ("own_axis", "tp", mx.PluginError, r"odd \(passed in code\): own_axis returned str, expected AxisClaim, Refusal or None"),
        ("own_reduction", True, mx.PluginError, r"odd \(passed in code\): own_reduction returned bool, expected Claim, Refusal or None"),
        ("init_params", ["norm.weight"], mx.PluginError, r"odd \(passed in code\): init_params returned list, expected a set of names"),
    ],
)
def test_hooks_that_return_another_type_are_refused_by_name(hook, answer, error, text):
    plan = Plan(tp=2) if hook == "own_axis" else Plan()
    with pytest.raises(error, match=text):
        (mx.explain if hook == "own_axis" else mx.attach)(toy_model(), plan, plugins={"odd": answering(hook, answer)})


def test_a_plan_for_several_processes_in_one_says_how_to_launch():
    with pytest.raises(
        mx.CapabilityError, match=r"world size is 1 \(this process alone\), the plan needs 2 .* torchrun --nproc-per-node 2"
    ):
        mx.attach(toy_model(), Plan(dp_replicate=2), plugins=OURS)


def test_a_module_with_sparse_gradients_is_refused_by_name():
    model = torch.nn.Sequential(torch.nn.Embedding(4, 2, sparse=True))
    with pytest.raises(mx.CapabilityError, match="0 makes sparse gradients, which nobody reduces or clips here; set sparse=False"):
        mx.explain(model, mx.ParallelPlan(), plugins={})

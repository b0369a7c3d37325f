"""Parameters that only some ranks of an axis hold, and experts: their groups, use, values, verdicts and whole tensors."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mixle_core as mx
from mixle_core.audit import assemble
from mixle_core.declarations import parameter_facts, resolve_layouts
from mixle_core.ownership import OwnershipTable, make_row
from mixle_core.plan import AXES, EXPERT_AXES
from mixle_core.runtime import Mesh, Usage, counted_traffic, solo_group
from mixle_core.runtime.initialise import equalise_copies, place_parameters, recompute_units
from mixle_core.runtime.probe import Probe
from mixle_core.testing import run_ranks

Plan = mx.ParallelPlan
CPU = torch.device("cpu")
STAGES = Plan(pp=4, timeout_s=17.0)
STAGES_AND_DATA = Plan(pp=2, dp_replicate=2, timeout_s=18.0)
FOLDED = Plan(pp=2, dp_shard=2, ep=2, timeout_s=19.0)
APART = Plan(dp_shard=2, tp=2, ep=2, etp=1, timeout_s=20.0)

ASKED = [
    (STAGES, ("pp",), {"pp": (0, 3)}, "pp[0,3]"),
    (STAGES, ("pp",), {"pp": (1, 2, 3)}, "pp[1,2,3]"),
    (STAGES, ("pp",), {"pp": (2,)}, ""),
    (STAGES, ("pp",), {"tp": (0,)}, "pp"),
    (STAGES_AND_DATA, ("pp", "dp_replicate"), {"pp": (1,)}, "pp[1].dp_replicate"),
    (STAGES_AND_DATA, ("dp_replicate", "pp"), {"pp": (0, 1)}, "pp[0,1].dp_replicate"),
    (STAGES_AND_DATA, ("dp_replicate",), {"pp": (1,)}, "dp_replicate"),
    (FOLDED, ("ep",), None, "ep"),
    (FOLDED, ("edp",), None, ""),
    (FOLDED, ("ep", "pp"), {"ep": (1,)}, "pp.ep[1]"),
    (APART, ("ep",), None, "ep"),
    (APART, ("edp",), None, "edp"),
    (APART, ("edp", "ep"), {"ep": (0, 1)}, "edp.ep[0,1]"),
]


def timeout_of(group):
    return group._get_backend(CPU).options._timeout.total_seconds()


def groups_of_holders():
    found = []
    for plan, axes, holders, _ in ASKED:
        mesh = Mesh(plan, CPU)
        group, again = mesh.group(axes, "mine", holders=holders), Mesh(plan, CPU).group(reversed(axes), "mine", holders=holders)
        everyone, others = mesh.group(axes, "mine"), mesh.group(axes, "other", holders=holders)
        if group is None:
            found.append(None)
            continue
        total = torch.tensor([float(2 ** dist.get_rank())])
        dist.all_reduce(total, group=group)
        same = (again is group, everyone is group, others is group)
        found.append((dist.get_process_group_ranks(group), group.group_desc, timeout_of(group), float(total), same))
    for axes in (("ep", "tp"), ("edp", "dp_shard")):
        with pytest.raises(mx.PlanError, match=f"axis {axes[0]}: expected some of"):
            Mesh(APART, CPU).group(axes, "mine")
    dist.barrier()
    return found


def members(plan, rank, axes, holders):
    """Ranks of the group of `rank`, from the coordinates of all of them."""
    view = AXES if set(axes) <= set(AXES) else EXPERT_AXES
    at = [plan.coordinates(other, view) for other in range(plan.world_size)]
    alike = [r for r in range(plan.world_size) if all(at[r][axis] == at[rank][axis] for axis in view if axis not in axes)]
    return [r for r in alike if all(at[r][axis] in held for axis, held in (holders or {}).items() if axis in axes)]


def test_a_group_has_the_holders_of_its_axes_in_either_view_and_is_none_for_the_others():
    outcomes = run_ranks(groups_of_holders, 4, timeout_s=90)
    for outcome in outcomes:
        for (plan, axes, holders, description), found in zip(ASKED, outcome.value, strict=True):
            ranks = members(plan, outcome.rank, axes, holders)
            if holders is None:
                assert tuple(ranks) == plan.group_ranks(outcome.rank, axes)
            if outcome.rank not in ranks or len(ranks) == 1:
                assert found is None, (axes, holders)
                continue
            everyone = not any(axis in axes for axis in holders or {})
            assert found == (ranks, f"mixle:mine:{description}", plan.timeout_s, sum(2.0**r for r in ranks), (True, everyone, False))
    none = [{outcome.rank for outcome in outcomes if outcome.value[i] is None} for i in range(len(ASKED))]
    assert none == [{1, 2}, {0}, {0, 1, 2, 3}, set(), {0, 1}, set(), set(), set(), {0, 1, 2, 3}, {0, 2}, set(), set(), set()]


def alone_and_together():
    mesh = Mesh(STAGES, CPU)
    if mesh.rank == 2:
        solo_group("early")  # no collective: the others know nothing of it
    both = mesh.group(("pp",), "mine", holders={"pp": (0, 3)})
    alone = mesh.group(("tp",), "mine", alone=True)
    found = [dist.get_process_group_ranks(alone), alone.group_desc, alone is solo_group("mine"), alone is solo_group("other")]
    value = torch.tensor([3.0])
    dist.all_reduce(value, group=alone)
    together = mesh.group(("pp",), "mine", alone=True)
    traffic = {key: (t.num_collectives, t.payload_bytes) for key, t in counted_traffic("mixle:mine.alone:|").items()}
    dist.barrier()
    return found, float(value), dist.get_process_group_ranks(together), both is None, traffic, mesh.position


def test_a_rank_alone_has_a_real_group_where_one_is_asked_for():
    for outcome in run_ranks(alone_and_together, 4, timeout_s=60):
        found, value, together, outside, traffic, position = outcome.value
        assert found == [[outcome.rank], "mixle:mine.alone:", True, False] and value == 3.0
        assert together == [0, 1, 2, 3] and outside == (outcome.rank in (1, 2))
        assert traffic == {"mixle:mine.alone:|allreduce": (1, 4)}
        assert position == {"pp": outcome.rank, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 0, "edp": 0, "ep": 0, "etp": 0}


def solo_in_one_process():
    group = solo_group("mine")
    value = torch.tensor([5.0])
    dist.all_reduce(value, group=group)
    return dist.get_process_group_ranks(group), float(value), Mesh(Plan(), CPU).group(("tp",), "mine", alone=True) is group


def test_a_process_that_nobody_launched_has_a_group_of_its_own_too():
    (outcome,) = run_ranks(solo_in_one_process, 1, timeout_s=60)
    assert outcome.value == ([0], 5.0, True)


def positions():
    return Mesh(APART, CPU).position


def test_the_position_of_a_rank_has_the_axes_of_both_views():
    for outcome in run_ranks(positions, 4, timeout_s=60):
        high, low = divmod(outcome.rank, 2)
        both = {"pp": 0, "dp_replicate": 0, "dp_shard": high, "cp": 0, "tp": low, "edp": high, "ep": low, "etp": 0}
        assert outcome.value == both


def uses(elsewhere, second):
    """Rank 0 has `a`, rank 1 has `b`, both have `c`; two updates of two backwards. In the second, rank 0 uses only `second`."""
    mesh = Mesh(Plan(pp=2), CPU)
    mine = "ac" if mesh.rank == 0 else "bc"
    usage = Usage("abc", mesh.plan, elsewhere=set("abc") - set(mine) if elsewhere else ())
    trail = []
    for update in range(2):
        for _ in range(2):
            usage.next_forward()
            for name in second if update and mesh.rank == 0 else mine:
                usage.saw(name)
        before = counted_traffic("mixle:control:")
        unused, missing = usage.settle(mesh)
        asked = counted_traffic("mixle:control:") != before
        trail.append((sorted(unused), sorted(missing), usage.varies, asked))
    return trail


def test_what_only_other_ranks_hold_is_neither_unused_nor_missing():
    for outcome in run_ranks(uses, 2, True, "ac", timeout_s=60):
        assert outcome.value == [([], [], False, True), ([], [], False, False)]


def test_a_parameter_of_this_rank_is_missed_though_others_hold_their_own():
    first, second = (outcome.value for outcome in run_ranks(uses, 2, True, "c", timeout_s=60))
    assert first[1] == ([], ["a"], False, False) and second[1] == ([], [], False, False)


def test_a_rank_that_does_not_say_what_it_lacks_makes_use_vary():
    for outcome in run_ranks(uses, 2, False, "c", timeout_s=60):
        assert outcome.value == [([], [], True, True), (["a"], [], True, True)]


def meshes_of_experts():
    mesh = Mesh(APART, CPU)
    one, two = mesh.device_mesh(("ep",), "mine"), mesh.device_mesh(("edp", "ep"), "mine")
    dist.barrier()
    return one.mesh.tolist(), two.mesh.tolist(), two.mesh_dim_names


def test_a_device_mesh_may_be_over_two_axes_of_the_expert_view():
    for outcome in run_ranks(meshes_of_experts, 4, timeout_s=30, group_timeout_s=10):
        row = outcome.rank // 2 * 2
        assert outcome.value == ([row, row + 1], [[0, 1], [2, 3]], ("edp", "ep"))


class OnlyOnEp:
    """Declares an expert on ep and leaves open what it is on etp, which is tp's size here."""

    def shard(self, layout, tensor, mesh):
        return tensor

    def apply(self, model, layouts, mesh):
        pass

    @mx.hookimpl
    def declare_layout(self, model, plan):
        return mx.ModelLayout(axis="ep", modules={"": mx.ModuleLayout(parameters={"weight": mx.Shard(0)})})

    @mx.hookimpl
    def own_axis(self, plan, layouts):
        return tuple(mx.AxisClaim(axis=axis, executor=OnlyOnEp, backend="double") for axis in plan.executed_axes)

    @mx.hookimpl
    def own_reduction(self, plan, layouts):
        return mx.Claim(owner=object, parameters=layouts.trainable, axes={"edp", "etp"}, backend="double")


def test_an_expert_that_is_undeclared_on_etp_is_refused_where_etp_is_as_large_as_tp():
    plan = Plan(dp_shard=4, tp=2, ep=2)
    assert plan.size("etp") == 2
    with pytest.raises(mx.LayoutError, match="undeclared on axis 'etp' of size 2"):
        mx.explain(nn.Linear(4, 4, bias=False), plan, plugins={"ep": OnlyOnEp()})


class Bare(nn.Module):
    """A weight that nobody knows how to fill."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


def placed(build, held, fill=lambda module, layouts, seed: frozenset()):
    """Model, names filled, and names that were cut."""
    with torch.device("meta"):
        model = build()
    layouts = mx.Layouts(parameters=parameter_facts(model), modules={}, units=())
    cut = []

    def shard(name, tensor):
        cut.append(name)
        return tensor

    return model, place_parameters(model, layouts, 5, CPU, shard, fill, held), cut


def stack():
    return nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Sequential(Bare()), nn.Linear(3, 2, dtype=torch.float64))


def test_what_this_rank_does_not_hold_stays_empty_and_nobody_fills_or_cuts_it():
    asked = []

    def fill(module, layouts, seed):
        asked.extend(layouts.parameters)
        return frozenset()

    model, filled, cut = placed(stack, lambda name: name.startswith(("0.", "1.")), fill)
    assert filled == set(cut) == set(asked) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    whole, everything, _ = placed(lambda: stack()[:2], lambda name: True)
    assert everything == filled and all(torch.equal(value, model.state_dict()[name]) for name, value in whole.state_dict().items())
    for name in ("2.0.weight", "3.weight", "3.bias"):
        assert model.get_parameter(name).shape == (0,) and not model.get_parameter(name).is_meta
        assert model.get_parameter(name).requires_grad
    assert model[3].weight.dtype == torch.float64
    with pytest.raises(mx.LayoutError, match=r"^2\.0\.weight on meta: Bare has no reset_parameters"):
        placed(stack, lambda name: True)


def test_values_of_what_this_rank_does_not_hold_are_dropped_and_objects_stay():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].bias.requires_grad_(False)
    before, kept = dict(model.named_parameters()), model[0].weight.detach().clone()
    layouts = mx.Layouts(parameters=parameter_facts(model), modules={}, units=())
    filled = place_parameters(
        model, layouts, 0, CPU, lambda name, tensor: tensor, lambda *_: frozenset(), lambda name: name.startswith("0.")
    )
    assert filled == frozenset() and torch.equal(model[0].weight, kept)
    assert all(model.get_parameter(name) is parameter for name, parameter in before.items())
    assert [parameter.numel() for parameter in model.parameters()] == [4, 2, 0, 0]
    assert [parameter.requires_grad for parameter in model.parameters()] == [True, True, True, False]


def test_a_tied_weight_is_held_or_not_under_all_its_names():
    def build():
        model = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
        model.head.weight = model.embed.weight
        return model

    for held, shape in ((True, (4, 3)), (False, (0,))):
        model, filled, _ = placed(build, lambda name, held=held: held and name == "embed.weight")
        assert model.head.weight is model.embed.weight and model.head.weight.shape == shape
        assert filled == ({"embed.weight"} if held else set())


def test_the_value_of_a_parameter_does_not_depend_on_what_else_of_its_module_is_held():
    whole, _, _ = placed(lambda: nn.Linear(3, 3), lambda name: True)
    part, filled, _ = placed(lambda: nn.Linear(3, 3), lambda name: name == "bias")
    assert filled == {"bias"} and torch.equal(part.bias, whole.bias)


HELD = {"ends": (0, 3), "middle": (1, 2), "one": (2,), "all": None}


def copies(plan, held):
    """Values of each rank before and after its copies are made equal."""
    model = nn.ParameterDict({name: nn.Parameter(torch.full((3,), float(10 * i + dist.get_rank()))) for i, name in enumerate(held)})
    parameters = {name: mx.Replica("partial", ranks=ranks) for name, ranks in held.items()}
    layouts = resolve_layouts(model, plan, [("x", mx.ModelLayout(axis="pp", modules={"": mx.ModuleLayout(parameters=parameters)}))])
    mesh = Mesh(plan, CPU)
    stage = mesh.coordinates["pp"]
    for name, ranks in held.items():
        if ranks is not None and stage not in ranks:
            model[name].data = torch.empty(0)
    equalise_copies(model, layouts, mesh, frozenset({"filled"}))
    dist.barrier()
    return {name: model[name].tolist() for name in held}


def test_copies_start_from_the_first_rank_that_holds_them():
    filled = {**HELD, "filled": (0, 3)}
    first = {"ends": 0, "middle": 1, "one": 2, "all": 0}
    for outcome in run_ranks(copies, 4, STAGES, filled, timeout_s=60):
        for i, (name, ranks) in enumerate(filled.items()):
            source = outcome.rank if name == "filled" else first[name]
            assert outcome.value[name] == ([10.0 * i + source] * 3 if ranks is None or outcome.rank in ranks else []), name


def test_copies_of_one_stage_are_equal_over_its_data_ranks_only():
    held = {"first": (0,), "last": (1,), "tied": (0, 1)}
    for outcome in run_ranks(copies, 4, STAGES_AND_DATA, held, timeout_s=60):
        stage = outcome.rank // 2
        assert outcome.value == {"first": [] if stage else [0.0] * 3, "last": [12.0] * 3 if stage else [], "tied": [20.0] * 3}


class Counts(nn.Linear):
    calls = 0

    def forward(self, rows):
        self.calls += 1
        return super().forward(rows)


def two_blocks():
    """A model whose second block another stage holds; the layouts say so."""
    model = nn.Sequential(Counts(2, 2), Counts(2, 2))
    parameters = {
        name: mx.ParameterLayout(name, (2,), "torch.float32", 4, trainable=True, roles={"pp": mx.Replica(ranks=(int(name[0]),))})
        for name, _ in model.named_parameters()
    }
    return model, mx.Layouts(parameters=parameters, modules={}, units=("0", "1"))


def test_units_of_other_stages_are_passed_over_and_those_of_this_one_recomputed():
    model, layouts = two_blocks()
    del model[1]
    recompute_units(model, layouts, Mesh(Plan(), CPU))
    model(torch.ones(1, 2)).sum().backward()
    assert model[0].calls == 2


def test_a_unit_of_this_stage_that_is_gone_is_an_error():
    model, layouts = two_blocks()
    model = nn.ModuleDict({"1": model[1]})
    with pytest.raises(mx.UsageError, match=r"^unit '0' is not a module of the model$"):
        recompute_units(model, layouts, Mesh(Plan(), CPU))


def row_of(plan, roles, shape=(8, 6), stored=(), stages=()):
    """The row of `w`, for an owner that reduces over everything."""
    layout = mx.ParameterLayout("w", shape, "torch.float32", 4, trainable=True, roles=roles)
    axes = {*AXES, *EXPERT_AXES}
    return make_row(plan, layout, "x", mx.Claim(owner=object, parameters=["w"], axes=axes, backend="x", stored=stored, stages=stages))


EP = Plan(dp_shard=4, ep=4)


def verdicts(plan, axis, ranks):
    """Of four probes: what is declared, and whether the holders' gradients are equal."""
    mesh = Mesh(plan, CPU)
    holds = mesh.position[axis] in ranks
    found = []
    for gradient in ("complete", "partial"):
        for equal in (True, False):
            row = row_of(plan, {axis: mx.Replica(gradient, ranks=ranks)}, (2,))
            probe = Probe(OwnershipTable(plan, (row,)), mesh, 0)
            if holds:
                probe.observe({"w": torch.tensor([3.0, 4.0]) * (1 if equal else 1 + mesh.position[axis])})
            try:
                probe.judge()
                found.append(probe.done)
            except mx.DeclarationError as error:
                found.append(str(error))
    return found


@pytest.mark.parametrize(("plan", "axis", "ranks"), [(STAGES, "pp", (0, 3)), (EP, "ep", (1, 2))], ids=["stages", "experts"])
def test_a_declaration_is_judged_by_those_that_hold_the_parameter(plan, axis, ranks):
    """Ranks without it have seen nothing: that is no gradient of zero which differs from the others."""
    norms = ", ".join(f"{5 * (1 + position):.4g}" for position in ranks)
    for outcome in run_ranks(verdicts, 4, plan, axis, ranks, timeout_s=60):
        equal_complete, unequal_complete, equal_partial, unequal_partial = outcome.value
        assert equal_complete is True and unequal_partial is True
        said = f"w on {axis}: declared Replica(complete, ranks={list(ranks)}), but the ranks' gradients differ by "
        assert said in unequal_complete and f"(norms {norms})" in unequal_complete
        said = f"w on {axis}: declared Replica(partial, ranks={list(ranks)}), but all ranks computed the same gradient (norms 5, 5)"
        assert said in equal_partial


WHOLE = torch.arange(48.0).view(8, 6)


def test_ranks_that_do_not_hold_a_parameter_are_passed_over():
    row = row_of(STAGES, {"pp": mx.Replica("partial", ranks=(0, 3))})
    whole, equal = assemble(STAGES, row, [WHOLE, None, torch.ones(1), WHOLE])
    assert equal and torch.equal(whole, WHOLE)
    assert assemble(STAGES, row, [WHOLE, None, None, WHOLE + 1])[1] is False
    assert assemble(STAGES, row, [WHOLE, WHOLE, WHOLE, None]) == (None, False)
    assert assemble(STAGES, row, [None, WHOLE, WHOLE, None]) == (None, True)
    only = row_of(STAGES_AND_DATA, {"pp": mx.Replica(ranks=(1,))})
    assert torch.equal(assemble(STAGES_AND_DATA, only, [None, None, WHOLE, WHOLE])[0], WHOLE)
    assert assemble(STAGES_AND_DATA, only, [None, None, WHOLE, WHOLE * 2])[1] is False


def test_experts_are_put_together_in_their_own_view():
    """ep cuts rows, etp columns; edp has copies, or slices of rows where the owner stores them."""
    plan = Plan(dp_shard=4, tp=2, ep=2, etp=2)
    roles = {"ep": mx.Shard(0), "etp": mx.Shard(1)}

    def piece(rank):
        at = plan.coordinates(rank, EXPERT_AXES)
        return WHOLE.chunk(2, 0)[at["ep"]].chunk(2, 1)[at["etp"]], at["edp"]

    pieces = [piece(rank) for rank in range(8)]
    whole, equal = assemble(plan, row_of(plan, roles), [tensor for tensor, _ in pieces])
    assert equal and torch.equal(whole, WHOLE)
    stored = row_of(plan, roles, stored=("edp",))
    assert torch.equal(assemble(plan, stored, [tensor.chunk(2)[edp] for tensor, edp in pieces])[0], WHOLE)
    flat = [tensor.flatten().split([5, 7])[edp] for tensor, edp in pieces]
    assert torch.equal(assemble(plan, stored, flat)[0], WHOLE)
    assert assemble(plan, row_of(plan, roles), [tensor + (rank == 7) for rank, (tensor, _) in enumerate(pieces)])[1] is False


@pytest.mark.parametrize("first", [12, 13, 24, 0], ids=["even", "uneven", "all-on-one", "none-on-one"])
@pytest.mark.parametrize("dim", [0, 1])
def test_flat_slices_over_stored_axes_get_the_shape_that_they_have_on_one_rank(first, dim):
    plan = Plan(dp_shard=2, tp=2)
    row = row_of(plan, {"tp": mx.Shard(dim)}, stored=("dp_shard",))
    pieces = [WHOLE.chunk(2, dim)[rank % 2].flatten().split([first, 24 - first])[rank // 2] for rank in range(4)]
    whole, equal = assemble(plan, row, pieces)
    assert equal and torch.equal(whole, WHOLE)


@pytest.mark.parametrize("shape", [(8, 6), (48,)], ids=["matrix", "vector"])
def test_parameters_that_are_whole_beside_gradients_that_are_sharded_are_copies(shape):
    plan = Plan(dp_shard=4)
    row = row_of(plan, {}, shape, stored=("dp_shard",))
    value = WHOLE.reshape(shape)
    assert all(torch.equal(assemble(plan, row, pieces)[0], value) for pieces in ([value] * 4, list(WHOLE.flatten().chunk(4))))
    assert assemble(plan, row, [value, value, value, value + 1])[1] is False


@pytest.mark.parametrize("stages", [(), (("dp_shard",), ("cp",))], ids=["flattened", "one-after-the-other"])
def test_slices_over_two_stored_axes_lie_in_mesh_order(stages):
    """As a reduce-scatter over the flattened axes leaves them, and one over dp_shard followed by one over cp."""
    plan = Plan(dp_shard=2, cp=2)
    row = row_of(plan, {}, stored=("dp_shard", "cp"), stages=stages)
    assert torch.equal(assemble(plan, row, list(WHOLE.chunk(4)))[0], WHOLE)


def test_two_axes_that_cut_one_dim_are_undone_backwards():
    """The executor of ep cuts first, that of etp cuts what is left."""
    plan = Plan(dp_shard=4, ep=2, etp=2)
    row = row_of(plan, {"ep": mx.Shard(0), "etp": mx.Shard(0)})
    pieces = [WHOLE.chunk(2)[rank // 2].chunk(2)[rank % 2] for rank in range(4)]
    assert torch.equal(assemble(plan, row, pieces)[0], WHOLE)

"""The conformance suite: a plugin author subclasses `PluginConformance` in a test file and gets one check per rule."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from mixle_core.cli.inputs import random_input
from mixle_core.plan import ParallelPlan
from mixle_core.runtime.contracts import Loss
from mixle_core.testing import conformance_checks as checks
from mixle_core.testing import conformance_layouts as layouts
from mixle_core.testing.conformance_rules import FIRST, check
from mixle_core.testing.conformance_subject import Subject
from mixle_core.testing.models import ToyLM, tied_toy_model, toy_model


class PluginConformance:
    """One check per rule of the hooks. Subclass it at the top of a test file, as `TestSomething`, and set what is yours.

    Only the plugin under test is loaded, what you name beside it, and an owner of all gradients where nobody loaded claims them.
    A check that has nothing to judge, since the plugin lacks its hook, is skipped; one whose rule is judged by another check that
    fails is skipped too and names that check. Names of checks are public: none is renamed without notice.

    A check of a later minor version than 0.1 only warns in the version that brings it, and fails from the next minor on. A
    subclass may bring checks of its own: methods with `check(since="0.1")`.

    Attributes:
        plugin_name: the entry point, such as "mymodel". With `plugin`, what messages call it.
        plugin: the plugin itself, a module or an object, where it is not installed.
        beside: further installed plugins to load, such as an executor of the axis that a layout declares.
        extra: name -> module or object of further plugins, as in `load_plugins`.
        backend: as in `attach`.
        sizes: model axis -> sizes of it that the layout supports for `make_model()`; the first is used most.
        plans: the plans that are run against one process. None: a plan for 1, 2 and 4 processes with every axis of `sizes`, or
            of dp_replicate for a plugin that neither declares nor executes an axis. Empty: the plugin refuses every plan.
        tolerance: largest relative error against one process in fp32.
        failure_limit_s: a failure on one rank has to end all ranks within so many seconds.
        unsupported: name of a check -> why this plugin cannot fulfil it. An exempted check that passes fails.
    """

    plugin_name: ClassVar[str] = ""
    plugin: ClassVar[Any] = None
    beside: ClassVar[Sequence[str]] = ()
    extra: ClassVar[Mapping[str, Any]] = {}
    backend: ClassVar[str | None] = None
    sizes: ClassVar[Mapping[str, Sequence[int]]] = {"tp": (2,)}
    plans: ClassVar[Sequence[ParallelPlan] | None] = None
    tolerance: ClassVar[float] = 1e-5
    failure_limit_s: ClassVar[float] = 20.0
    unsupported: ClassVar[Mapping[str, str]] = {}

    def make_model(self) -> nn.Module:
        """A small model that the plugin is for, equal at every call; torch's generator is seeded around it.

        A plugin without `declare_layout` need not have it: then it is `mixle_core.testing.ToyLM`.
        """
        return toy_model()

    def make_tied_model(self) -> nn.Module | None:
        """The same with tied parameters; None where the plugin's models have none."""
        model = self.make_model()
        if isinstance(model, ToyLM):
            return tied_toy_model()
        parameters = list(model.named_parameters(remove_duplicate=False))
        return model if len(parameters) > len({id(parameter) for _, parameter in parameters}) else None

    def batch(self, update: int, backward: int, data_rank: int) -> Any:
        """What a data rank trains on, the same wherever it is asked for; made up from the model where you do not override it."""
        draw, _ = _input(self._kind, 2 + data_rank % 2)
        return draw(torch.Generator().manual_seed(1 + 7919 * update + 104729 * backward + 15485863 * data_rank))

    @property
    def _kind(self) -> Any:
        return type(self)

    def unused_batch(self, update: int, backward: int, data_rank: int) -> Any:
        """As `batch`, but the second update leaves a parameter out on every rank, and others leave it out on some.

        None where no batch of the model does.
        """
        if not isinstance(self.make_model(), ToyLM):
            return None
        return {"ids": self.batch(update, backward, data_rank), "use_branch": update != 1 and data_rank == 0}

    def loss(self, module: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        """Summed loss of one microbatch and its number of loss tokens, as in `prepare`."""
        options: dict[str, Any] = {}
        if isinstance(batch, dict) and "ids" in batch:
            batch, options = batch["ids"], {key: value for key, value in batch.items() if key != "ids"}
        _, loss = _input(self._kind, 1)
        return loss(_Called(module, options) if options else module, batch)

    @check(since=FIRST)
    def test_exemptions_are_known(self) -> None:
        """`unsupported` names checks that exist, each with a reason."""
        checks.exemptions_are_known(Subject.of(self))

    @check(since=FIRST)
    def test_discovered(self) -> None:
        """The entry point is found, named like its distribution, listed without an import, and its hooks keep the contract."""
        checks.discovered(Subject.of(self))

    @check(since=FIRST, needs=["discovered"])
    def test_unknown_model_is_refused(self) -> None:
        """`build_model` answers a name that it does not know with a UsageError."""
        checks.unknown_model_is_refused(Subject.of(self))

    @check(since=FIRST, needs=["discovered"])
    def test_answers_without_processes(self) -> None:
        """The hooks that `explain` asks need no process group, make none and raise nothing under the plans that are supported."""
        checks.answers_without_processes(Subject.of(self))

    @check(since=FIRST, needs=["answers_without_processes"])
    def test_layout_covers_parameters(self) -> None:
        """Every pattern names a parameter, and every parameter has a role on every axis of `sizes`."""
        layouts.layout_covers_parameters(Subject.of(self))

    @check(since=FIRST, needs=["layout_covers_parameters"])
    def test_layout_refuses_other_sizes(self) -> None:
        """A size that does not divide what is cut is a CapabilityError that names axis and size."""
        layouts.layout_refuses_other_sizes(Subject.of(self))

    @check(since=FIRST, needs=["layout_covers_parameters"])
    def test_layout_is_repeatable(self) -> None:
        """Asking twice gives equal answers, also for the model on meta, and leaves the model as it was."""
        layouts.layout_is_repeatable(Subject.of(self))

    @check(since=FIRST, needs=["layout_covers_parameters"])
    def test_init_names_what_it_fills(self) -> None:
        """`init_params` fills something of `make_model()`, and returns the names of exactly that."""
        layouts.init_names_what_it_fills(Subject.of(self))

    @check(since=FIRST, needs=["init_names_what_it_fills"])
    def test_init_is_repeatable(self) -> None:
        """The same seed and name give the same values, whatever state the global generators are in."""
        layouts.init_is_repeatable(Subject.of(self))

    @check(since=FIRST, needs=["init_names_what_it_fills"])
    def test_init_follows_the_seed(self) -> None:
        """Another seed gives other values. A plugin that fills constants alone exempts it."""
        layouts.init_follows_the_seed(Subject.of(self))

    @check(since=FIRST, needs=["init_names_what_it_fills"])
    def test_init_leaves_global_generators(self) -> None:
        """The global generators of torch, Python and NumPy are as they were."""
        layouts.init_leaves_global_generators(Subject.of(self))

    @check(since=FIRST, needs=["init_is_repeatable"])
    def test_init_ignores_the_plan(self) -> None:
        """The whole values are the same without and with a model axis."""
        layouts.init_ignores_the_plan(Subject.of(self))

    @check(since=FIRST, needs=["answers_without_processes"])
    def test_refusals_have_reasons(self) -> None:
        """Under plans of every kind a hook answers, declines, refuses with reason and remedy, or raises a MixleError."""
        checks.refusals_have_reasons(Subject.of(self))

    @check(since=FIRST, needs=["layout_covers_parameters"])
    def test_plans_reach_the_plugin(self) -> None:
        """`plans` has every axis of `sizes` that is declared or executed, somebody executes it, and a plugin that owns claims."""
        checks.plans_reach_the_plugin(Subject.of(self))

    @check(since=FIRST, needs=["plans_reach_the_plugin"])
    def test_one_owner_per_parameter(self) -> None:
        """Every trainable parameter has exactly one row, and one that several ranks hold belongs to the plugin that owns."""
        checks.one_owner_per_parameter(Subject.of(self))

    @check(since=FIRST, needs=["one_owner_per_parameter"])
    def test_ranks_agree(self) -> None:
        """All ranks prepare the same: layouts, table and its digest."""
        checks.ranks_agree(Subject.of(self))

    @check(since=FIRST, needs=["ranks_agree", "init_ignores_the_plan"])
    def test_starts_as_one_process(self) -> None:
        """What the ranks hold after `attach`, put together, is what one process starts with, to the bit."""
        checks.starts_as_one_process(Subject.of(self))

    @check(since=FIRST, needs=["starts_as_one_process"])
    def test_owner_reduces_once(self) -> None:
        """Every parameter is reduced exactly once in every update, also in a window that ends early."""
        checks.owner_reduces_once(Subject.of(self))

    @check(since=FIRST, needs=["owner_reduces_once"])
    def test_owner_drops_gradients(self) -> None:
        """`zero()` leaves no gradient, and nothing of an update that was given up reaches the next."""
        checks.owner_drops_gradients(Subject.of(self))

    @check(since=FIRST, needs=["owner_drops_gradients"])
    def test_owner_honours_no_sync(self) -> None:
        """An update of four backwards makes no more reductions than an update of one."""
        checks.owner_honours_no_sync(Subject.of(self))

    @check(since=FIRST, needs=["owner_reduces_once"])
    def test_owner_removes_its_hooks(self) -> None:
        """`close()` leaves no hook on parameters and modules."""
        checks.owner_removes_its_hooks(Subject.of(self))

    @check(since=FIRST, needs=["owner_drops_gradients", "starts_as_one_process"])
    def test_equals_one_process(self) -> None:
        """Gradients, norms and parameters of `plans` equal one process: accumulated, clipped, with a short trailing window."""
        checks.equals_one_process(Subject.of(self))

    @check(since=FIRST, needs=["equals_one_process"])
    def test_frozen_parameters(self) -> None:
        """A parameter without requires_grad has no row and gets no gradient; the others equal one process."""
        checks.frozen_parameters(Subject.of(self))

    @check(since=FIRST, needs=["equals_one_process"])
    def test_tied_parameters(self) -> None:
        """A tied parameter has one row, with its aliases, and equals one process."""
        checks.tied_parameters(Subject.of(self))

    @check(since=FIRST, needs=["equals_one_process"])
    def test_owner_knows_unused_parameters(self) -> None:
        """With unused_parameters=True, updates that leave parameters out, on all ranks or on some, equal one process."""
        checks.owner_knows_unused_parameters(Subject.of(self))

    @check(since=FIRST, needs=["starts_as_one_process", "owner_drops_gradients"])
    def test_state_round_trips(self) -> None:
        """What `save_state` names is whole, and after `load_state` into a new model it is named again with the same values."""
        checks.state_round_trips(Subject.of(self))

    @check(since=FIRST, needs=["owner_reduces_once"])
    def test_failure_ends_everywhere(self) -> None:
        """When one rank ends within an update, all others end within `failure_limit_s`, each with an error."""
        checks.failure_ends_everywhere(Subject.of(self))


@functools.cache
def _input(suite: Any, rows: int) -> tuple[Callable[[torch.Generator], torch.Tensor], Loss]:
    """What draws input for a suite's model, and a loss; the model is looked at once."""
    with torch.random.fork_rng(devices=[]):
        return random_input(suite().make_model(), rows, 8, "PluginConformance.batch()")


class _Called(nn.Module):
    """The module, called with further arguments."""

    def __init__(self, module: nn.Module, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.module, self.options = module, options

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs, **self.options)

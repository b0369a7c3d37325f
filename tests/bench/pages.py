"""The sections of docs/benchmarks.md, each from what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoints
import qwen
from alone import BY_NAME
from report import RIGHT, errors, is_right, machine, ratio, size, table
from traffic import KINDS

GOAL_BY_HAND, GOAL_TORCH, GOAL_CHECKS, GOAL_PLAN_S, GOAL_PLAN_MIB = 1.03, 0.7, 0.01, 1.0, 512

METHOD = (
    "All contenders of a layout live in the same processes (gloo, one thread each) on the same transformers Qwen3 and batches, and are "
    "timed alternately, there and back in one round (A B C C B A), between barriers and {steps}; a ratio is the median over the rounds "
    "of mixle's time by the other's, with its interval of at least 95 % from order statistics, and once more for the first rank's "
    "processor time, which other load on the machine changes less. Errors (the worst gradient, or their norm, against one fp32 process: "
    f"norm of the difference over norm, as one step applies it; right up to {RIGHT:.0e}), traffic and memory come from a launch of each "
    "contender by itself."
)

BY_HAND = (
    'A step is `train_batch` with one batch: forward, backward, reduction, clipping and fused AdamW. "By hand" does the same with torch: '
    "DistributedDataParallel; fully_shard of each layer and the rest; sliced weights with in-place all-reduces and one flat all-reduce of "
    "the q/k-norm gradients before the step. Its norm is taken on local tensors with one all-reduce, faster than `clip_grad_norm_`."
)

CROSSED = (
    '"By hand" is local TP under DDP or fully_shard, with the same flat all-reduce at the optimizer\'s boundary. torch is '
    "`parallelize_module` (one input conversion for q, k and v, one for gate and up) under fully_shard, or under FSDP2's `replicate`, "
    "since DistributedDataParallel refuses DTensor parameters. transformers is `from_pretrained(distributed_config=DistributedConfig("
    "tp_size=2, ...))`, Fabric is `ModelParallelStrategy` around torch's plan; both use the clipping of the loops by hand, since "
    "`clip_grad_norm_` refuses parameters on two meshes."
)

TRAFFIC = (
    "Other libraries have one group for all that goes over tp: their q/k-norm gradients count as activations. Control is the norm, and in "
    "mixle every decision too."
)

MEMORY = (
    "MiB, largest of the ranks: anonymous memory of the process above what imports left, during set-up and while steps run; and the most "
    "that torch allocates at once within a step, above its beginning. The difference of the two is parameters, optimizer state and what "
    "the C library keeps."
)

CHECKS = (
    "Microseconds of an update. Counting adds {counting:.1f} us to each collective of the process; the other contenders above are timed "
    "without it. The probe runs at the first update only."
)

PLANNING = (
    "One process for each; the models are on meta. Nothing executes ep, and no layout declares the MoE shape on tp, so its plan has data "
    "axes only."
)


CHECKPOINTS_TITLE = "Checkpoints (goals: in the table)"

CHECKPOINTS = (
    "Sharded parameters with AdamW's state, {mib:.0f} MiB in all, fully_shard over 2 and 4 ranks, local disk. torch is "
    "`dcp.save` and `dcp.load` "
    "of the same tensors into fresh directories; mixle saves generators, options and checksums too, and verifies every "
    "checksum it reads. Both "
    "make files durable. Rounds are alternate, a round is timed between barriers, a ratio is the median over {rounds} "
    "rounds with its interval. "
    "Cold: the kernel was told to drop the files. Async: until the call returns on a rank, against the sync save; its "
    "staging buffer is reused. "
    "Memory: MiB beyond the state of a rank ({held}), sampled."
)


def saving_section(found: list[dict[str, Any]]) -> str:
    """The table of checkpoints."""
    rows = []
    for one in found:
        seconds = one["seconds"]
        for what, goal in checkpoints.GOALS.items():
            base = "mixle: save" if what.startswith("async") else f"torch: {what}"
            seen = ratio(seconds[f"mixle: {what}"], seconds[base])
            met = "met" if seen["median"] <= goal else f"missed, at most {goal}"
            bounds = f"{seen['low']:.2f} to {seen['high']:.2f} ({seen['level']:.0%})"
            rows.append(
                [
                    f"{one['ranks']} ranks: {what}",
                    f"{seen['ours'] * 1e3:.0f}",
                    f"{seen['theirs'] * 1e3:.0f}",
                    f"{seen['median']:.2f}",
                    bounds,
                    met,
                ]
            )
    held = ", ".join(f"{one['held_mib']:.0f} on {one['ranks']} ranks" for one in found)
    first = found[0]
    words = CHECKPOINTS.format(mib=first["held_mib"] * first["ranks"], rounds=len(first["seconds"]["mixle: save"]), held=held)
    memory = "; ".join(f"{one['ranks']} ranks: save {one['memory']['save']:.0f}, load {one['memory']['load']:.0f}" for one in found)
    return "\n\n".join([words, table(["", "ms", "against", "ratio", "interval", "goal"], rows), f"Memory beyond the state: {memory}."])


def head(*, quick: bool) -> str:
    """Title, machine and method."""
    name = "tiny" if quick else "bench"
    shape, (rows, tokens) = qwen.SIZES[name], qwen.ROWS[name]
    fewer = "" if quick else f" ({qwen.ROWS['bench of 4'][0]} x {tokens} where four processes run)"
    model = (
        f"Model: Qwen3, hidden {shape['hidden_size']}, {shape['num_hidden_layers']} layers, {shape['num_attention_heads']} heads, "
        f"vocabulary {shape['vocab_size']}, fp32; {rows} x {tokens} tokens per data rank{fewer}."
    )
    smoke = ["**A smoke test of the suite: three rounds of a tiny model. The numbers mean nothing.**"] if quick else []
    steps = "one step at a time" if quick else "two steps at a time"
    written = "Written by `tox -e bench`; nothing here is a test. Below 1 mixle is faster."
    return "\n\n".join(["# Benchmarks", *smoke, written, machine(), model, METHOD.format(steps=steps)])


def page(where: str, layouts: list[dict[str, Any]], counting_s: float, planning: dict[str, Any], saving: list[dict[str, Any]]) -> str:
    """The whole page."""
    alone = [layout for layout in layouts if len(layout["alone"]) == 2]
    crossed = [layout for layout in layouts if len(layout["alone"]) > 2]
    parts = [
        where,
        f"## A step against loops by hand (goal: the interval reaches {GOAL_BY_HAND}x)",
        BY_HAND,
        _times(alone),
        f"## Data and tensor parallelism together (goal: at most {GOAL_TORCH}x of torch's parallelize_module)",
        CROSSED,
        _times(crossed),
        "## Collectives and payload of one update, per rank (goal: not more than by hand; two of 1 KiB for control)",
        TRAFFIC,
        _traffic(layouts),
        "## Peak memory per rank",
        MEMORY,
        _memory(layouts),
        f"## What mixle's checks take of a step (goal: under {GOAL_CHECKS:.0%} together)",
        CHECKS.format(counting=counting_s * 1e6),
        _checks(layouts, counting_s),
        f"## Plan and table of large models (goal: {GOAL_PLAN_S:.0f} s after imports and {GOAL_PLAN_MIB / 1024} GiB in all)",
        PLANNING,
        _planning(planning),
        f"## {CHECKPOINTS_TITLE}",
        saving_section(saving),
        (Path(__file__).parent / "notes.md").read_text().strip(),
    ]
    return "\n\n".join(parts) + "\n"


def _label(layout: dict[str, Any], name: str) -> str:
    label = BY_NAME[name].name
    if name.startswith("Hand") and len(layout["alone"]) > 2:
        label += " + local TP"
    return f"{layout['title']}: {label}"


def _times(layouts: list[dict[str, Any]]) -> str:
    rows, refused = [], []
    for layout in layouts:
        ours = layout["seconds"]["Mixle"]["clock"]
        for name, found in layout["alone"].items():
            title = _label(layout, name)
            if "error" in found:
                rows.append([title, "does not run", *[""] * 6])
                refused.append(f"- {title}: `{found['error']}`")
            elif not is_right(found):
                rows.append([title, "not compared", "", "", "", *errors(found), ""])
            elif name == "Mixle":
                seen = ratio(ours, ours)
                rows.append([title, f"{seen['ours'] * 1e3:.1f}", "", "", "", *errors(found), ""])
            else:
                theirs = layout["seconds"][name]
                seen = ratio(ours, theirs["clock"])
                work = ratio(layout["seconds"]["Mixle"]["processor"], theirs["processor"])["median"]
                bounds = f"{seen['low']:.3f} to {seen['high']:.3f} ({seen['level']:.0%} of {seen['pairs']})"
                goal = _verdict(layout, name, seen)
                rows.append([title, f"{seen['theirs'] * 1e3:.1f}", f"{seen['median']:.3f}", bounds, f"{work:.3f}", *errors(found), goal])
    head = [
        "",
        "ms per step",
        "mixle / this",
        "interval (level, rounds)",
        "processor time",
        "error, 1 batch per update",
        "2 batches",
        "goal",
    ]
    return "\n\n".join([table(head, rows), *(["Does not run on CPU:", "\n".join(refused)] if refused else [])])


def _verdict(layout: dict[str, Any], name: str, seen: dict[str, float]) -> str:
    """The goal of a loop by hand is its interval's, for data or tensor parallelism by itself; that of torch the median's."""
    if name in ("TorchReplicate", "TorchFSDP"):
        return "met" if seen["median"] <= GOAL_TORCH else "**missed**"
    if name.startswith("Hand") and len(layout["alone"]) == 2:
        by_median = "met" if seen["median"] <= GOAL_BY_HAND else "met by the interval, not by the median"
        return by_median if seen["low"] <= GOAL_BY_HAND else "**missed**"
    return ""


def _running(layouts: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str, dict[str, Any]]]:
    return [(layout, name, found) for layout in layouts for name, found in layout["alone"].items() if "error" not in found]


def _traffic(layouts: list[dict[str, Any]]) -> str:
    rows = []
    for layout, name, found in _running(layouts):
        counts = found["traffic"]
        goal = f"**{counts['unseen']} more**" if counts["unseen"] else ""
        if name == "Mixle":
            by_hand = next(other["traffic"] for hand, other in layout["alone"].items() if hand.startswith("Hand"))
            spent, allowed = ([sum(of[kind][i] for kind in KINDS if kind != "control") for i in (0, 1)] for of in (counts, by_hand))
            small = counts["control"][0] <= 2 and counts["control"][1] <= 2048
            goal = "met" if spent[0] <= allowed[0] and spent[1] <= allowed[1] and small else "**missed**"
        cells = [f"{calls}, {size(payload)}" if calls else "-" for calls, payload in (counts[kind] for kind in KINDS)]
        rows.append([_label(layout, name), *cells, goal])
    return table(["calls, payload", "over dp", "gradients over tp", "activations over tp", "control", "goal"], rows)


def _memory(layouts: list[dict[str, Any]]) -> str:
    keys = ("set_up_mib", "steps_mib", "tensors_mib")
    rows = [[_label(layout, name), *(f"{found[key]:.1f}" for key in keys)] for layout, name, found in _running(layouts)]
    return table(["", "process, set-up", "process, steps", "torch, within a step"], rows)


def _checks(layouts: list[dict[str, Any]], counting_s: float) -> str:
    rows = []
    for layout in layouts:
        found = layout["alone"]["Mixle"]
        step, ledger, probe = found["later"]["step"], found["later"]["ledger"], found["first"]["probe"]
        counting = counting_s * sum(found["traffic"][kind][0] for kind in KINDS)
        parts = [f"{seconds * 1e6:.0f} ({seconds / step:.2%})" for seconds in (ledger, counting, ledger + counting)]
        once = f"{probe * 1e6:.0f} ({probe / step:.0%})" if probe else "-"
        goal = "met" if (ledger + counting) / step < GOAL_CHECKS else "**missed**"
        rows.append([layout["title"], f"{step * 1e3:.0f} ms", *parts, once, goal])
    return table(["layout", "step", "ledger", "counting", "together", "probe, once", "goal"], rows)


def _planning(found: dict[str, Any]) -> str:
    rows = []
    for name, seen in found.items():
        goal = "met" if seen["plan_s"] < GOAL_PLAN_S and seen["peak_mib"] < GOAL_PLAN_MIB else "**missed**"
        title = f"{name}: {seen['parameters'] / 1e9:,.0f}e9 parameters, {seen['rows']} rows, {seen['ranks']} ranks"
        times = [f"{seen[key]:.2f} s" for key in ("import_s", "model_s", "plan_s")]
        memory = [f"{seen[key]:.0f} MiB" for key in ("imported_mib", "peak_mib")]
        rows.append([title, seen["plan"], *times, *memory, goal])
    return table(["model", "plan", "imports", "meta model", "plan and table", "memory after imports", "peak", "goal"], rows)


def put_checkpoints(path: Path, found: list[dict[str, Any]]) -> None:
    """Write the section of checkpoints into a page, in place of the one that it has or before its last section."""
    parts = path.read_text().split("\n## ")
    kept = [part for part in parts if not part.startswith("Checkpoints (")]
    kept.insert(len(kept) - 1, f"{CHECKPOINTS_TITLE}\n\n{saving_section(found)}\n")
    path.write_text("\n## ".join(kept))

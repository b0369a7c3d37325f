"""Runs inside an environment, from a copy outside the checkout: every fork answers questions, one JSON line each."""

from __future__ import annotations

import functools
import importlib
import json
import os
import pkgutil
import signal
import site
import socket
import sys
import time
from pathlib import Path
from typing import Any

SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
OPENED: list[str] = []


def qwen3() -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.device("meta"):
        return Qwen3ForCausalLM(Qwen3Config(**SIZES, use_cache=False))


def call(question: dict[str, Any]) -> dict[str, Any]:
    """The arguments that `explain`, `attach` and `verify` share."""
    import mixle_core as mx

    return {
        "plan": mx.ParallelPlan(**question.get("plan", {})),
        "backend": question.get("backend"),
        "plugins": question.get("plugins"),
    }


def explain(question: dict[str, Any]) -> Any:
    """Ownership and executors of a Qwen3 on meta."""
    import mixle_core as mx

    table = mx.explain(qwen3(), **call(question))
    return {
        "rows": {row.name: [row.owner, row.backend, row.operation, list(row.reduced)] for row in table.rows},
        "owners": list(table.owners),
        "executors": dict(table.executors),
        "digest": table.digest,
    }


def attach(question: dict[str, Any]) -> Any:
    """Attach a Qwen3: its owners, and the mean of the parameter that plugins of these tests fill."""
    import mixle_core as mx

    reduction = mx.attach(qwen3(), **call(question))
    values = dict(reduction.named_parameters())["model.norm.weight"]
    found = {"owners": list(reduction.table.owners), "filled": float(values.detach().mean())}
    reduction.close()
    return found


def verify(question: dict[str, Any]) -> Any:
    """Train beside one process: the errors, and who made collectives."""
    from mixle_core.audit import verify as compare
    from mixle_core.testing import next_token_loss, token_batch

    plan = call(question).pop("plan")
    batch = functools.partial(token_batch, length=16, vocab=SIZES["vocab_size"])
    others = {"backend": question.get("backend"), "plugins": question.get("plugins")}
    report = compare(qwen3, plan, loss=next_token_loss, batch=batch, max_grad_norm=1.0, **others)
    return {
        "error": report.error,
        "gradient_error": max(update.gradient_error for update in report.updates),
        "parameter_error": max(update.parameter_error for update in report.updates),
        "passed": report.passed(1e-5),
        "updates": len(report.updates),
        "collectives": dict(report.collectives),
    }


def load(question: dict[str, Any]) -> Any:
    """What is loaded, and what is broken."""
    import mixle_core as mx

    loaded = mx.load_plugins(question.get("plugins"))
    return {"labels": dict(loaded.labels), "versions": [list(pair) for pair in loaded.versions], "broken": dict(loaded.broken)}


def files(question: dict[str, Any]) -> Any:
    """Where every module of the installed distributions comes from, and what was opened in the checkout."""
    for package in question["packages"]:
        module = importlib.import_module(package)
        for found in pkgutil.walk_packages(module.__path__, f"{package}."):
            importlib.import_module(found.name)
    places = {name: module.__file__ or "" for name, module in sys.modules.items() if name.partition(".")[0] in question["packages"]}
    wrong = [file for file in places.values() if not file.startswith(question["site"])]
    return {"modules": sorted(places), "elsewhere": wrong, "opened": OPENED, "path": sys.path}


def join(question: dict[str, Any]) -> Any:
    """Become one of several ranks."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{question['store']}", rank=question["rank"], world_size=question["world"])
    return "joined"


def leave(question: dict[str, Any]) -> Any:
    """Stop being one."""
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
    return "left"


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Call the function of the question's kind; errors and warnings are part of the answer."""
    from structlog.testing import capture_logs

    kinds = {function.__name__: function for function in (explain, attach, verify, load, files, join, leave)}
    os.environ.pop("MIXLE_PLUGINS", None)
    if question.get("allow") is not None:
        os.environ["MIXLE_PLUGINS"] = question["allow"]
    started = time.monotonic()
    with capture_logs() as logs:
        try:
            found = {"value": kinds[question["kind"]](question)}
        except Exception as error:  # noqa: BLE001 - the answer tells it
            found = {"error": type(error).__name__, "text": str(error)}
    return {**found, "logs": logs, "seconds": time.monotonic() - started}


def watch(checkout: str) -> None:
    """Note every file of the project that this process opens; environments of a test runner may lie below the checkout."""
    parts = ("mixle_core", "plugins", "docs", "tests", "README.md", "LICENSE", "pyproject.toml")
    own = tuple(f"{checkout}/{part}" for part in parts)
    sys.addaudithook(lambda event, args: OPENED.append(args[0]) if event == "open" and str(args[0]).startswith(own) else None)


def serve(request: dict[str, Any]) -> None:
    """Be a Python of the environment: its packages at the end of the path, as its own start-up puts them."""
    with socket.socket(socket.AF_UNIX) as connection, open(request["errors"], "w") as errors:  # noqa: PTH123
        connection.connect(request["address"])
        os.dup2(errors.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        os.chdir(request["desk"])
        sys.prefix = sys.exec_prefix = request["prefix"]
        sys.executable = request["python"]
        site.addsitedir(request["site"])
        watch(request["checkout"])
        lines = connection.makefile("rw")
        for line in lines:
            lines.write(json.dumps(answer(json.loads(line)), default=str) + "\n")
            lines.flush()


def main() -> None:
    """Import what takes seconds, then fork for every line."""
    import torch.distributed.fsdp
    import torch.nn.parallel  # noqa: F401
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    assert not [name for name in sys.modules if name.startswith("mixle")]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            try:
                serve(json.loads(line))
            finally:
                os._exit(0)


if __name__ == "__main__":
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent.resolve()]
    main()

"""What holds for the repository as a whole: who imports whom, who names whom, how long files are, and what is shipped."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "mixle_core"
KERNEL = sorted(CORE.glob("*.py"))
SUBPACKAGES = sorted(directory.name for directory in CORE.iterdir() if (directory / "__init__.py").exists())
PLUGINS = sorted((ROOT / "plugins").glob("mixle-*"))
DISTRIBUTIONS = [ROOT, *PLUGINS]
GROUPS = ("mixle", "mixle.commands", "mixle.backends")
"""Entry points of hooks, and of commands."""
SOURCES = sorted([*CORE.rglob("*.py"), *(ROOT / "plugins").rglob("*.py")])


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def project(distribution: Path) -> dict[str, Any]:
    return tomllib.loads((distribution / "pyproject.toml").read_text())["project"]


def run(code: str, cwd: Path, *paths: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter with `paths` first on its path and no plugin narrowed away."""
    env = {name: value for name, value in os.environ.items() if name != "MIXLE_PLUGINS"}
    env["PYTHONPATH"] = os.pathsep.join([*map(str, paths), *filter(None, [env.get("PYTHONPATH")])])
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, check=False)


def imports(source: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(module, names taken from it) of every absolute import in a file, those inside functions included."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or "", tuple(alias.name for alias in node.names)


def public_names(init: Path) -> set[str]:
    """`__all__` of a package, read without importing it."""
    assigned = [
        node.value
        for node in ast.parse(init.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return set(ast.literal_eval(assigned[0]))


def test_importing_the_core_loads_neither_torch_nor_a_plugin_nor_a_subpackage(tmp_path):
    code = """
import sys
import mixle_core
print(mixle_core.__file__)
print(*sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "numpy", "transformers", "click")))
print(*sorted(name for name in sys.modules if name.startswith("mixle")))
"""
    result = run(code, tmp_path, ROOT)
    assert result.returncode == 0, result.stderr
    file, foreign, ours = result.stdout.split("\n")[:3]
    assert Path(file) == CORE / "__init__.py"
    assert foreign == ""
    loaded = set(ours.split())
    assert loaded <= {"mixle_core", *(f"mixle_core.{module.stem}" for module in KERNEL)}
    assert "mixle_core.ownership" in loaded


def test_the_lazy_names_of_the_front_door_are_those_of_the_runtime():
    tree = ast.parse((CORE / "__init__.py").read_text())
    lazy = next(
        ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_RUNTIME"
    )
    assert set(lazy) <= public_names(CORE / "runtime" / "__init__.py")


@pytest.fixture(scope="module")
def kernel_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the kernel's own files, its tests, and a torch that cannot be imported."""
    place = tmp_path_factory.mktemp("alone")
    (place / "mixle_core").mkdir()
    for file in [*KERNEL, CORE / "py.typed"]:
        shutil.copy(file, place / "mixle_core" / file.name)
    shutil.copytree(ROOT / "tests" / "kernel", place / "tests" / "kernel", ignore=shutil.ignore_patterns("__pycache__"))
    (place / "torch").mkdir()
    (place / "torch" / "__init__.py").write_text("raise ImportError('the kernel runs without torch')\n")
    return place


def test_the_kernel_alone_has_no_subpackage(kernel_alone):
    code = "import mixle_core, mixle_core.declarations, mixle_core.ledger; print(mixle_core.__file__)"
    result = run(code, kernel_alone, kernel_alone)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()) == kernel_alone / "mixle_core" / "__init__.py"
    for name in SUBPACKAGES:
        result = run(f"import mixle_core.{name}", kernel_alone, kernel_alone)
        assert f"ModuleNotFoundError: No module named 'mixle_core.{name}'" in result.stderr


def test_the_kernel_alone_passes_its_tests(kernel_alone):
    code = f"""
import sys
import pytest
import mixle_core
assert mixle_core.__file__ == {str(kernel_alone / "mixle_core" / "__init__.py")!r}, mixle_core.__file__
options = ["--import-mode=importlib", "-q", "-p", "no:cacheprovider", "--rootdir", "."]
status = pytest.main(["tests/kernel", *options])
assert not [name for name in sys.modules if name == "torch" or name.startswith("mixle_core.") and name.count(".") > 1]
raise SystemExit(status)
"""
    result = run(code, kernel_alone, kernel_alone)
    assert result.returncode == 0, result.stdout + result.stderr
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed is not None
    assert int(passed[1]) > 200


def test_every_kernel_module_has_its_test_file():
    expected = {f"test_{'front_door' if file.stem == '__init__' else file.stem}.py" for file in KERNEL}
    assert {file.name for file in (ROOT / "tests" / "kernel").glob("test_*.py")} == expected


def test_the_kernel_stays_small():
    lines = {file.name: len(file.read_text().splitlines()) for file in KERNEL}
    assert sum(lines.values()) <= 1700, lines


def test_no_file_is_long():
    files = [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "docs").rglob("*.py")]
    lines = {relative(file): len(file.read_text().splitlines()) for file in files}
    assert {file: number for file, number in lines.items() if number > 600} == {}


UPSTREAM = re.compile(r"megatron|qwen|nemotron|lightning", re.IGNORECASE)
PLUGIN_NAMES = re.compile(r"torch[-_]ddp|torch[-_]fsdp2|dtensor[-_]tp", re.IGNORECASE)


def test_the_core_names_no_plugin_and_no_upstream_model():
    found = [
        f"{relative(file)}:{number}: {line.strip()}"
        for file in sorted(CORE.rglob("*.py"))
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if UPSTREAM.search(line) or PLUGIN_NAMES.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_a_plugin_imports_the_core_by_its_front_doors_and_no_other_plugin(plugin):
    own = plugin.name.replace("-", "_")
    doors = {"mixle_core": public_names(CORE / "__init__.py"), "mixle_core.runtime": public_names(CORE / "runtime" / "__init__.py")}
    wrong = []
    for file in sorted((plugin / "src").rglob("*.py")):
        for module, names in imports(file):
            top = module.split(".")[0]
            if not top.startswith("mixle") or top == own:
                continue
            if module not in doors or not names or not set(names) <= doors[module]:
                wrong.append(f"{relative(file)}: {module} {', '.join(names)}")
    assert wrong == []


def entries(plugin: Path) -> dict[str, dict[str, str]]:
    return project(plugin).get("entry-points", {})


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_an_entry_point_is_named_like_its_distribution(plugin):
    assert project(plugin)["name"] == plugin.name
    assert entries(plugin)
    assert set(entries(plugin)) <= set(GROUPS)
    own = plugin.name.removeprefix("mixle-")
    named = set(entries(plugin).get("mixle", {own: ""}))
    assert own in named and all(name == own or name.startswith(f"{own}-") for name in named), named


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_an_entry_module_exists_and_imports_no_heavy_library_at_its_head(plugin):
    for group, points in entries(plugin).items():
        for value in points.values():
            module = (plugin / "src" / value.partition(":")[0].replace(".", "/")).with_suffix(".py")
            head = [node for node in ast.parse(module.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
            taken = {(node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).split(".")[0] for node in head}
            assert taken <= {"mixle_core", *sys.stdlib_module_names, *(("click",) if group == "mixle.commands" else ())}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda distribution: distribution.name)
def test_a_distribution_says_what_it_is(distribution):
    facts = project(distribution)
    assert {"name", "version", "description", "license", "readme"} <= set(facts)
    assert all(facts[key] for key in ("name", "version", "description", "license", "readme"))
    assert re.fullmatch(r"mixle-[a-z0-9]+(-[a-z0-9]+)*", facts["name"])
    assert re.fullmatch(r"\d+\.\d+\.\d+", facts["version"])
    assert (distribution / facts["readme"]).read_text().strip()


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda distribution: distribution.name)
def test_a_distribution_ships_its_types(distribution):
    package = CORE if distribution == ROOT else distribution / "src" / distribution.name.replace("-", "_")
    assert (package / "py.typed").exists()
    assert (package / "__init__.py").exists()


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_a_plugin_asks_for_a_range_of_the_core(plugin):
    assert [need for need in project(plugin)["dependencies"] if need.startswith("mixle")] == ["mixle-core>=0.1,<0.2"]


def test_the_version_of_the_core_is_the_version_of_its_distribution():
    assigned = re.search(r'^__version__ = "(.*)"$', (CORE / "__init__.py").read_text(), re.MULTILINE)
    assert assigned is not None
    assert assigned[1] == project(ROOT)["version"]

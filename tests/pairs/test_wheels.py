"""What is in the wheels, that they install with what they require, and that they need no file of the checkout."""

from __future__ import annotations

import email
import sys
import tomllib
import zipfile
from configparser import ConfigParser

import pytest
from packaging.requirements import Requirement

from .environments import CORE, NATIVE, PIP, ROOT, SOURCES, Environment, checked, link_packages

WHEELS = pytest.mark.parametrize("name", SOURCES)
PACKAGES = {name: name.replace("-", "_") for name in SOURCES}


def package_of(name):
    return SOURCES[name] / ("" if name == CORE else "src") / PACKAGES[name]


def project(name):
    return tomllib.loads((SOURCES[name] / "pyproject.toml").read_text())["project"]


def entry_points(name):
    """Group -> entry -> object reference, as the project says."""
    facts = project(name)
    return facts.get("entry-points", {}) | ({"console_scripts": facts["scripts"]} if "scripts" in facts else {})


@pytest.fixture(scope="module")
def contents(wheels):
    """Distribution -> path in its wheel -> bytes."""
    found = {}
    for name in SOURCES:
        (wheel,) = wheels.glob(f"{name.replace('-', '_')}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            found[name] = {path: archive.read(path) for path in archive.namelist()}
    return found


def metadata(contents, name):
    (path,) = (path for path in contents[name] if path.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(contents[name][path])


@WHEELS
def test_a_wheel_holds_its_package_whole_and_nothing_else(contents, name):
    package = package_of(name)
    shipped = {path: content for path, content in contents[name].items() if ".dist-info/" not in path}
    expected = {
        f"{package.name}/{file.relative_to(package).as_posix()}": file.read_bytes()
        for file in package.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert shipped == expected
    assert f"{package.name}/py.typed" in shipped


@WHEELS
def test_a_wheel_holds_no_test(contents, name):
    parts = {part for path in contents[name] for part in path.split("/")}
    assert not parts & {"tests", "test", "conftest.py", "pyproject.toml", "tox.ini"}
    assert not [part for part in parts if part.startswith("test_")]


@WHEELS
def test_a_wheel_holds_the_licence(contents, name):
    licences = [content for path, content in contents[name].items() if path.endswith(".dist-info/licenses/LICENSE")]
    assert licences == [(ROOT / "LICENSE").read_bytes()]


@WHEELS
def test_the_metadata_says_what_the_project_says(contents, name):
    said, facts = metadata(contents, name), project(name)
    assert (said["Name"], said["Version"], said["Requires-Python"]) == (name, facts["version"], ">=3.11")
    assert (said["License-Expression"], said["Description-Content-Type"]) == ("BSD-3-Clause", "text/markdown")
    assert said.get_payload().strip() == (SOURCES[name] / "README.md").read_text().strip()


@WHEELS
def test_a_wheel_requires_ranges_and_no_other_plugin(contents, name):
    always = {Requirement(need) for need in metadata(contents, name).get_all("Requires-Dist") if ";" not in need}
    assert always == {Requirement(need) for need in project(name)["dependencies"]}
    ours = [need for need in always if need.name.startswith("mixle")]
    assert ours == ([] if name == CORE else [Requirement("mixle-core>=0.1,<0.2")])
    assert all("<" in str(need.specifier) for need in always if need.name in {"torch", "transformers", "pluggy"})
    assert name != CORE or not {need.name for need in always} & {"torch", "numpy", "click", "rich"}


def test_the_extras_of_the_core(contents):
    said = metadata(contents, CORE)
    needs = {extra: set() for extra in said.get_all("Provides-Extra")}
    for need in said.get_all("Requires-Dist"):
        requirement, _, extra = need.partition(";")
        if extra:
            needs[extra.split("==")[1].strip(" '\"")].add(requirement.strip())
    torch = {"torch<2.15,>=2.11", "numpy>=2"}
    own = {"torch": set(), "cli": {"click<9,>=8.1", "rich>=13.9"}, "testing": {"pytest>=8.3"}}
    whole = {extra: found - {"mixle-core[torch]"} | torch for extra, found in needs.items()}  # build backends may write it out
    assert whole == {extra: torch | mine for extra, mine in own.items()}
    assert all("mixle-core[torch]" in found or found >= torch for found in needs.values())


@WHEELS
def test_the_entry_points_name_modules_that_are_in_the_wheel(contents, name):
    (text,) = (content.decode() for path, content in contents[name].items() if path.endswith(".dist-info/entry_points.txt"))
    points = ConfigParser()
    points.read_string(text)
    found = {section: dict(points[section]) for section in points.sections()}
    assert found == entry_points(name)
    assert name not in (CORE, *(f"mixle-{plugin}" for plugin in NATIVE)) or found == (
        {"console_scripts": {"mixle": "mixle_core.cli:main"}}
        if name == CORE
        else {"mixle": {name.removeprefix("mixle-"): f"{PACKAGES[name]}.plugin"}}
    )
    for reference in (reference for group in found.values() for reference in group.values()):
        module = reference.partition(":")[0].replace(".", "/")
        assert {f"{module}.py", f"{module}/__init__.py"} & contents[name].keys()


@WHEELS
def test_a_wheel_is_for_every_platform(contents, name):
    (text,) = (content.decode() for path, content in contents[name].items() if path.endswith(".dist-info/WHEEL"))
    assert ("Root-Is-Purelib: true" in text, "Tag: py3-none-any" in text) == (True, True)


FROM_SOURCES = """
import os, sys, tarfile
from pathlib import Path
from hatchling.build import build_sdist, build_wheel
into = Path(sys.argv[1])
for project in sys.argv[2:]:
    os.chdir(project)
    with tarfile.open(into / build_sdist(str(into))) as archive:
        archive.extractall(into / "unpacked", filter="data")
for folder in sorted((into / "unpacked").iterdir()):
    os.chdir(folder)
    build_wheel(str(into / "wheels"))
"""


def test_a_source_distribution_gives_the_same_wheel(contents, tmp_path):
    checked([sys.executable, "-I", "-c", FROM_SOURCES, tmp_path, *SOURCES.values()])
    assert len(list(tmp_path.glob("*.tar.gz"))) == len(SOURCES)
    for name in SOURCES:
        (wheel,) = (tmp_path / "wheels").glob(f"{name.replace('-', '_')}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            assert {path: archive.read(path) for path in archive.namelist()} == contents[name], name


@pytest.fixture(scope="module")
def user(fresh):
    """What the README tells a user to install, with all that it requires."""
    return fresh().install("mixle-core[cli]", *(name for name in SOURCES if name != CORE), resolve=True)


def test_what_the_wheels_require_is_met_by_what_is_tested_here(user):
    done = user.pip("check", check=False)
    assert not [line for line in done.stdout.splitlines() if "mixle" in line], done.stdout


def test_the_installed_command_lists_what_is_installed(user):
    plugins = sorted(plugin for name in SOURCES for plugin in entry_points(name).get("mixle", {}))
    assert set(NATIVE) <= set(plugins)
    assert user.states() == dict.fromkeys(plugins, "enabled")
    assert user.states("--check") == dict.fromkeys(plugins, "enabled, imports")
    version = user.mixle("--version")
    assert (version.returncode, version.stdout) == (0, "mixle, version 0.1.0\n")


def test_everything_comes_from_the_wheels_and_no_file_of_the_checkout_is_opened(user):
    for kind in ("explain", "attach"):
        assert "value" in user.ask(kind)
    everything = user.ask("files", packages=list(PACKAGES.values()), site=str(user.site))
    found = everything["value"]
    assert found["elsewhere"] == []
    assert found["opened"] == []
    assert not [entry for entry in found["path"] if entry in {str(package_of(name).parent) for name in SOURCES}]
    shipped = {
        ".".join(file.relative_to(package_of(name).parent).with_suffix("").parts).removesuffix(".__init__")
        for name in SOURCES
        for file in package_of(name).rglob("*.py")
    }
    assert set(found["modules"]) == shipped


def test_the_installed_python_imports_the_core_from_the_environment_and_without_torch(user):
    code = "import sys, mixle_core; print(mixle_core.__file__); print('torch' in sys.modules)"
    assert user.run(user.python, "-c", code).stdout.split() == [str(user.site / "mixle_core" / "__init__.py"), "False"]


@pytest.fixture(scope="module")
def lean(tmp_path_factory, wheels):
    """The core alone, and nothing to be seen but what its metadata requires."""
    packages = link_packages(tmp_path_factory.mktemp("lean") / "packages", only=("attrs", "pluggy", "structlog", "pip"))
    return Environment(tmp_path_factory.mktemp("e"), packages, wheels).install("mixle-core", resolve=True)


def test_the_core_needs_only_what_it_requires(lean):
    code = "import mixle_core as mx; print(mx.ParallelPlan(tp=2).describe(), mx.installed_plugins(), dict(mx.load_plugins().labels))"
    assert lean.run(lean.python, "-I", "-c", code).stdout == "tp=2 () {}\n"


def test_the_command_without_its_extra_says_what_to_install(lean):
    done = lean.mixle("plugins")
    assert (done.returncode, done.stderr) == (2, "mixle: click is missing; pip install 'mixle-core[cli]'\n")


def test_a_plugin_does_not_install_where_what_it_requires_is_missing(lean):
    done = lean.run(lean.python, *PIP, "install", "--no-index", "--find-links", str(lean.wheels), "mixle-torch-fsdp2", check=False)
    assert done.returncode == 1
    assert "torch<2.15,>=2.13" in done.stderr
    assert lean.run(lean.python, "-I", "-c", "import mixle_core as mx; print(mx.installed_plugins())").stdout == "()\n"


def test_a_plugin_of_another_range_of_the_core_does_not_install(fresh, wheels, tmp_path):
    """The range holds what it promises: the next minor version of the core may change what a plugin imports."""
    newer = tmp_path / "mixle_core-0.2.0-py3-none-any.whl"
    with zipfile.ZipFile(newer, "w") as archive:
        archive.writestr("mixle_core-0.2.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: mixle-core\nVersion: 0.2.0\n")
        archive.writestr("mixle_core-0.2.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("mixle_core-0.2.0.dist-info/RECORD", "")
    place = fresh()
    done = place.pip("install", "--no-index", "--find-links", str(wheels), str(newer), "mixle-torch-ddp", check=False)
    assert done.returncode == 1
    assert "mixle-torch-ddp 0.1.0 depends on mixle-core<0.2 and >=0.1" in done.stdout + done.stderr

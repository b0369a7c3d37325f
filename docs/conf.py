"""Sphinx configuration: MyST pages, the furo theme, docstrings of the installed distributions; nothing from the network."""

import re
from pathlib import Path

from docutils import nodes
from sphinx.domains.python import PyXRefRole

ROOT = Path(__file__).parents[1]

project = "mixle"
author = "the mixle developers"
copyright = "the mixle developers, BSD-3-Clause"  # noqa: A001 - Sphinx's name
version = release = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"mixle {version}"
html_copy_source = False
highlight_language = "none"

# Docstrings are Google style, with plain backticks. A backtick that names something documented becomes a link.
default_role = "backticks"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
add_module_names = False
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True

# A reference that does not resolve is a warning, and warnings are errors. Excepted are words in backticks, which are mostly
# code, and what other projects document: nothing is fetched here.
nitpicky = True
nitpick_ignore_regex = [
    ("py:obj", r".*"),
    ("py:.*", r"(torch|nn|dist|np|attrs|numpy|collections|contextlib|pathlib|typing|pluggy|importlib|multiprocessing)\..*"),
]

NOT_CONSTRUCTED = tuple(
    f"mixle_core.{name}"
    for name in (
        "Reduction",
        "Session",
        "cli.extension.CommandContext",
        "runtime.Reduced",
        "runtime.Owner",
        "runtime.AxisExecutor",
        "runtime.SaveHandle",
        "checkpoint.Checkpoint",
    )
)
"""Classes whose objects a user gets, or writes anew: the arguments of their constructors are internal."""


def plain_signature(app, what, name, found, options, signature, returns):
    """Leave the signature of these classes out, and show defaults as one writes them (an attrs factory makes a dict)."""
    if what == "class" and name in NOT_CONSTRUCTED:
        return "", None
    for pattern, plain in (
        ("NOTHING", "{}"),
        (r"<(?:class|function) '?(?:\w+\.)*(\w+)'?>", r"\1"),
        (r"<RedOpType\.(\w+): \d+>", r"ReduceOp.\1"),
    ):
        signature = signature and re.sub(pattern, plain, signature)
    return signature, returns


def backticks(name, rawtext, text, lineno, inliner, options=None, content=()):
    """A link to what is documented under a dotted name; anything else is code, and keeps its dots and brackets."""
    if re.fullmatch(r"[A-Za-z_][\w.]*", text):
        return PyXRefRole()("py:obj", rawtext, text, lineno, inliner, options or {}, content)
    return [nodes.literal(rawtext, text)], []


def setup(app):
    """Register the handlers."""
    app.connect("autodoc-process-signature", plain_signature)
    app.add_role("backticks", backticks)

# SPDX-License-Identifier: Apache-2.0
"""Sphinx configuration of the site. `tools/docs` builds it."""
from __future__ import annotations

import pathlib
import re
import sys
from typing import Any

import docutils.nodes
from docutils.utils.math import latex2mathml

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "adapters/python"))

project = "remat"
copyright = "the authors of remat, Apache-2.0"
release = re.findall(r"version: '([^']+)'", (ROOT / "meson.build").read_text())[0]
extensions = ["myst_parser", "sphinx.ext.autodoc", "breathe"]
exclude_patterns = ["snippets", "pictures"]
html_theme = "furo"
html_math_renderer = "mathml"
html_title = f"remat {release}"

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

#: The compiled parts of the package are not needed for its signatures and docstrings.
autodoc_mock_imports = ["remat._core", "remat._torch"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
default_role = "code"  # single backticks in docstrings

breathe_projects = {"remat": str(ROOT / "build-docs/doxygen/xml")}
breathe_default_project = "remat"
breathe_default_members = ("members", "undoc-members")


def readable(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turns the parameters of our docstrings, `name: text` with hanging indents, into a list."""
    found: list[str] = []
    in_item = False
    for line in lines:
        item = re.match(r"([a-z_]+(?:, [a-z_]+)*): (.*)", line)
        if item:
            found += [] if in_item else [""]
            found.append(f"- **{item[1]}**: {item[2]}")
        elif in_item and line.startswith(" "):
            found.append("  " + line.strip())
        elif line.startswith(" ") and found and found[-1].strip() and not found[-1].startswith(" "):
            found[-1] += " " + line.strip()  # the rest of a sentence
        else:
            found += [""] if in_item else []
            found.append(line)
        in_item = bool(item) or in_item and line.startswith(" ")
    lines[:] = found


def mathml(translator: Any, node: docutils.nodes.Element) -> None:
    """Writes formulas as MathML: the site needs no scripts from elsewhere."""
    translator.body.append(latex2mathml.tex2mathml(node.astext().replace("\n", " "), as_block=isinstance(node, docutils.nodes.math_block)))
    raise docutils.nodes.SkipNode


def setup(app: Any) -> None:
    app.add_html_math_renderer("mathml", (mathml, None), (mathml, None))
    app.connect("autodoc-process-docstring", readable)

"""Imports go down only: the layers, computed from the source of every file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fastbcd
from helpers.import_graph import cycle, import_graph, layer, modules, upward

ROOT = Path(__file__).parent.parent

# From top to bottom. A file imports from its own layer or from a lower one.
LAYERS = (
    ("fastbcd.__main__", "fastbcd.cli", "fastbcd.info"),  # these use the public names
    ("fastbcd",),  # fastbcd/__init__.py, which lists the public names
    ("fastbcd.report",),
    ("fastbcd.starts", "fastbcd.descent", "fastbcd.private"),
    ("fastbcd.training", "fastbcd.scoring"),
    ("fastbcd.graph", "fastbcd.masking", "fastbcd.models", "fastbcd.data", "fastbcd.runs"),
    ("fastbcd.ops",),
    ("fastbcd.kernels", "fastbcd.runtime"),
)
NAMESPACES = ("ops", "models", "private", "report")  # these list public names

FILES = {**modules(ROOT / "fastbcd", "fastbcd"), **modules(ROOT / "kernels", "fastbcd.kernels")}
GRAPH = import_graph(FILES)
ROOMS = sorted({name.split(".")[1] for name in FILES if name.count(".") > 1} - {"kernels"})


def test_imports_go_down() -> None:
    assert upward(GRAPH, LAYERS) == set()


def test_no_cycles() -> None:
    assert cycle(GRAPH) == []


def test_kernels_import_only_kernels_and_runtime() -> None:
    targets = {t for m in GRAPH if layer(m, LAYERS) == len(LAYERS) - 1 for t in GRAPH[m]}
    assert {t for t in targets if not t.startswith(LAYERS[-1])} == set()


@pytest.mark.parametrize("room", [r for r in ROOMS if r not in NAMESPACES])
def test_a_room_lists_no_names(room) -> None:
    """Only the public namespaces do; elsewhere names are imported from their file."""
    for path in (ROOT / "fastbcd" / room).rglob("__init__.py"):
        body = ast.parse(path.read_text()).body
        assert len(body) == 1, path
        assert isinstance(body[0], ast.Expr), path
        assert isinstance(body[0].value, ast.Constant), path


def test_tab_shows_public_names_only() -> None:
    assert [n for n in dir(fastbcd) if not n.startswith("__")] == fastbcd.__all__
    assert all(hasattr(fastbcd, name) for name in dir(fastbcd))


# --------------------------------------------------------------------- the checks themselves

TREE = {
    "top/__init__.py": "from top.high.a import f",
    "top/high/__init__.py": "",
    "top/high/a.py": "import os\nfrom top.low import b",
    "top/low/__init__.py": "",
    "top/low/b.py": "",
    "top/low/c.py": "",
}
TREE_LAYERS = (("top",), ("top.high",), ("top.low",))


def graph_of(folder: Path, **changed: str):
    for name, text in {**TREE, **changed}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return import_graph(modules(folder / "top", "top"))


def test_a_clean_tree_passes(tmp_path) -> None:
    graph = graph_of(tmp_path)
    assert graph["top"] == {"top.high.a"}
    assert graph["top.high.a"] == {"top.low.b"}
    assert upward(graph, TREE_LAYERS) == set()
    assert cycle(graph) == []


@pytest.mark.parametrize(
    "source",
    [
        "from top.high.a import f",
        "from top.high import a",
        "import top.high.a",
        "from ..high import a",
        "from ..high.a import f",
        "def g():\n    from top.high import a",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from top.high.a import f",
        "import importlib\nimportlib.import_module('top.high.a')",
    ],
)
def test_an_upward_import_is_found(source, tmp_path) -> None:
    graph = graph_of(tmp_path, **{"top/low/b.py": source})
    assert upward(graph, TREE_LAYERS) == {"top.low.b -> top.high.a"}
    assert set(cycle(graph)) == {"top.high.a", "top.low.b"}


def test_an_import_of_the_package_itself_is_found(tmp_path) -> None:
    graph = graph_of(tmp_path, **{"top/low/c.py": "import top"})
    assert upward(graph, TREE_LAYERS) == {"top.low.c -> top"}


def test_a_cycle_inside_a_layer_is_found(tmp_path) -> None:
    files = {"top/low/b.py": "from . import c", "top/low/c.py": "from .b import f"}
    graph = graph_of(tmp_path, **files)
    assert upward(graph, TREE_LAYERS) == set()
    assert set(cycle(graph)) == {"top.low.b", "top.low.c"}


def test_a_room_without_a_layer_is_found() -> None:
    with pytest.raises(AssertionError, match="is in no layer"):
        layer("elsewhere.x", TREE_LAYERS)

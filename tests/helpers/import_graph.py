"""The import graph of a package, read from its source files.

Every import statement counts, also inside functions and under `if TYPE_CHECKING:`, and so does
`importlib.import_module("...")` with a literal name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

Graph = dict[str, set[str]]


def modules(folder: Path, package: str) -> dict[str, Path]:
    """File by module name; a package stands for its `__init__.py`."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = [package, *path.relative_to(folder).with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
        found[".".join(parts)] = path
    return found


def _imported(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            base = parts[: len(parts) - node.level + is_package] if node.level else []
            origin = ".".join([*base, *filter(None, [node.module])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (a.value for a in node.args[:1] if isinstance(a, ast.Constant))


def import_graph(files: dict[str, Path]) -> Graph:
    """The modules among `files` that each of them imports."""
    graph: Graph = {}
    for module, path in files.items():
        tree = ast.parse(path.read_text(), filename=str(path))
        graph[module] = set()
        for name in _imported(tree, module, path.name == "__init__.py"):
            # `from a.b import c`: the module a.b.c if there is one, else a.b, which defines c
            target = name if name in files else name.rpartition(".")[0]
            if target in files and target != module:
                graph[module].add(target)
    return graph


def layer(module: str, layers: tuple[tuple[str, ...], ...]) -> int:
    """The index of the layer that lists `module` or the closest package that holds it."""
    name = module
    while name:
        for index, members in enumerate(layers):
            if name in members:
                return index
        name = name.rpartition(".")[0]
    raise AssertionError(f"{module} is in no layer: add its package to the list")


def upward(graph: Graph, layers: tuple[tuple[str, ...], ...]) -> set[str]:
    """Imports of a higher layer, each as "importer -> imported"."""
    return {
        f"{importer} -> {imported}"
        for importer, targets in graph.items()
        for imported in targets
        if layer(imported, layers) < layer(importer, layers)
    }


def cycle(graph: Graph) -> list[str]:
    """The modules of one import cycle; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []

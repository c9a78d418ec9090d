"""Mutants: one small change of the code at a time, which the tests of its room should notice.

    python tests/mutants.py                            # `make mutants`: 10 of each room, hours
    python tests/mutants.py --rooms decisions --count 3 --seed 7

Changed is an expression or a call inside a function, in a copy of the tree. At least 85 % should be
caught of those that are not in EQUIVALENT; survivors are printed.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PATIENCE = 600  # seconds at least, before a mutant that runs on counts as caught
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "*.egg-info", "__pycache__", ".*_cache")

# By room: a folder and its files, and the tests, the quickest first.
ROOMS = {
    "search": (
        "fastbcd/descent", "search",
        "descent/test_callbacks descent/test_misuse descent/test_metric descent/test_bcd",
    ),
    "decisions": (
        "fastbcd/scoring", "decision exact confident evidence answers metric accuracy plan",
        "scoring/test_choose scoring/test_confidence scoring/test_accuracy scoring/test_metric "
        "scoring/test_score scoring/test_gpu descent/test_confidence",
    ),
    "engines": (
        "fastbcd/scoring", "sequential stacked program collapsed/*",
        "scoring/test_score scoring/test_emptied scoring/collapsed/* scoring/test_gpu",
    ),
    "budgets": (
        "fastbcd/descent", "budget goals proposals blocks",
        "descent/test_targets descent/test_proposals descent/test_blocks descent/test_returns",
    ),
    "training": ("fastbcd/training", "*", "training/*"),
    "journal": ("fastbcd/runs", "*", "runs/* hostile/test_crash_points descent/test_bcd"),
    "kernels": ("kernels", "geometry triton/*", "kernels/test_interpreter"),
}  # fmt: skip
PAIRS = "Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn, Add Sub, Mult Div, And Or, min max, any all"
SWAPS = {a: b for pair in PAIRS.split(", ") for a, b in (pair.split(), pair.split()[::-1])}

# By what is changed: why no test can notice.
EQUIVALENT = {
    "fastbcd/descent/search.py _rest: nothing = torch.zeros(0, 1, dtype=torch.int64)  [1 -> 2]": (
        "it has no hypothesis"
    )
}


def mutate(node) -> bool:
    """Change a node in place; False if there is nothing to change."""
    name = type(node).__name__
    if name == "Compare":
        node.ops[0] = getattr(ast, SWAPS[type(node.ops[0]).__name__])()
    elif name in ("BinOp", "BoolOp") and type(node.op).__name__ in SWAPS:
        node.op = getattr(ast, SWAPS[type(node.op).__name__])()
    elif name == "Constant" and isinstance(node.value, bool):
        node.value = not node.value
    elif name == "Constant" and isinstance(node.value, int | float):
        node.value += 1
    elif name == "Name" and node.id in SWAPS:
        node.id = SWAPS[node.id]
    elif name == "Expr" and isinstance(node.value, ast.Call):
        node.value = ast.Constant(None)
    elif name in ("If", "IfExp") and not isinstance(node.test, ast.Compare):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    else:
        return False
    return True


def places(node, name: str = "", inside: bool = False) -> Iterator[tuple[str, ast.AST]]:
    """(function, node) of the bodies of functions; without errors, texts and signatures."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise | ast.JoinedStr | ast.arguments):
            continue
        full = f"{name}.{getattr(child, 'name', '')}".strip(".")
        if inside:
            yield full, child
        yield from places(child, full, inside or isinstance(child, ast.FunctionDef))


def mutant(path: Path, number: int) -> tuple[str, str] | None:
    """What is changed at a place, and the code with it; None if nothing can be."""
    code = path.read_text()
    tree = ast.parse(code)
    function, node = [*places(tree)][number]
    before = ast.unparse(node)
    if not mutate(node):
        return None
    line = code.splitlines()[node.lineno - 1].strip()  # type: ignore[attr-defined]
    change = (
        f"{before} -> {ast.unparse(node)}" if isinstance(node, ast.expr) else "not, or left out"
    )
    return f"{path.relative_to(ROOT)} {function}: {line}  [{change}]", ast.unparse(tree)


def passes(tree: Path, tests: list[Path], seconds: float | None = None) -> bool:
    command = [sys.executable, "-m", "pytest", "-qx", "-m", "not long", *map(str, tests)]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, timeout=seconds, capture_output=True
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def survivors(tree: Path, room: str, count: int, seed: int) -> list[bool]:
    """For each of some mutants of a room: did it survive?"""
    folder, names, globs = ROOMS[room]
    files = [path for name in names.split() for path in sorted((ROOT / folder).glob(f"{name}.py"))]
    tests = [path for name in globs.split() for path in sorted((tree / "tests").glob(f"{name}.py"))]
    begin = time.monotonic()
    if not passes(tree, tests):
        sys.exit(f"the tests of {room} fail without any mutant: {globs}")
    seconds = max(PATIENCE, 10 * (time.monotonic() - begin))
    every = [(path, i) for path in files for i, _ in enumerate(places(ast.parse(path.read_text())))]
    random.Random(seed).shuffle(every)
    results: list[bool] = []
    for path, number in every:
        made = mutant(path, number)
        if made is None or made[0] in EQUIVALENT or len(results) == count:
            continue
        copy = tree / path.relative_to(ROOT)
        copy.write_text(made[1])
        results.append(passes(tree, tests, seconds))
        copy.write_text(path.read_text())
        print("SURVIVED" if results[-1] else "caught  ", made[0], flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=list(ROOMS))
    parser.add_argument("--count", type=int, default=10, help="of each room (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    o = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
        (tree / "fastbcd" / "kernels").symlink_to("../kernels")  # not the installed ones
        results = [one for room in o.rooms for one in survivors(tree, room, o.count, o.seed)]
    caught = results.count(False)
    print(f"caught {caught} of {len(results)}, {100 * caught / len(results):.0f} %")
    sys.exit(caught < 0.85 * len(results))


if __name__ == "__main__":
    main()

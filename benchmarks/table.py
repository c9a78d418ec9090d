"""Run the benchmarks and print one table: `make bench`, or `python benchmarks/table.py -k 14x14`.

Arguments go to pytest. A row is a case; the columns are fastbcd's median time and each peer's as
a multiple of it in the same run (above 1: fastbcd is faster).
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import torch

import engines

HERE = Path(__file__).parent


def machine() -> str:
    """CPU, GPU and versions in one line."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    gpu = (
        f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ", no GPU"
    )
    return (
        f"{model}, {torch.get_num_threads()} threads{gpu}; torch {torch.__version__}, "
        f"Python {platform.python_version()}"
    )


def run(arguments: list[str]) -> list[dict]:
    """Run pytest-benchmark and return its results."""
    if not any(a.endswith(".py") for a in arguments):
        arguments = [str(HERE), *arguments]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "results.json"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--benchmark-only", "--benchmark-quiet",
             f"--benchmark-json={output}", *arguments],
            stdout=sys.stderr, cwd=HERE.parent,
        )  # fmt: skip
        if done.returncode:
            sys.exit(done.returncode)
        return json.loads(output.read_text())["benchmarks"]


def rows(results: list[dict]) -> dict[str, dict[str, dict]]:
    """Results by group and implementation."""
    table: dict[str, dict[str, dict]] = defaultdict(dict)
    for result in results:
        table[result["group"]][result["extra_info"]["implementation"]] = result
    return table


def per_item(result: dict) -> float:
    """The median in seconds per item; a round may handle many items."""
    return result["stats"]["median"] / result["extra_info"].get("divide", 1)


def print_table(table: dict[str, dict[str, dict]]) -> None:
    """One block for each set of peers: fastbcd's median, and the peers' as multiples of it."""
    blocks: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for group, implementations in table.items():
        blocks[tuple(implementations)].append(group)
    for names, groups in blocks.items():
        peers = [p for p in names if p != "fastbcd"]
        width = max(map(len, groups))
        heads = "".join(f"  {p:>{len(p) + 1}}" for p in peers)
        print(f"\n{'':<{width}}  {'fastbcd ms':>10}{heads}")
        for group in groups:
            times = {p: 1e3 * per_item(r) for p, r in table[group].items()}
            ratios = "".join(
                f"  {times[p] / times['fastbcd']:>{len(p)}.2f}x" for p in peers
            )
            print(f"{group:<{width}}  {times['fastbcd']:>10.2f}{ratios}")
            memory = {p: r["extra_info"].get("memory") for p, r in table[group].items()}
            if memory["fastbcd"] is not None:
                sizes = "".join(f"  {memory[p]:>{len(p) + 1}.0f}" for p in peers)
                print(
                    f"{'  peak memory, MiB':<{width}}  {memory['fastbcd']:>10.0f}{sizes}"
                )


if __name__ == "__main__":
    print(machine())
    found = rows(run(sys.argv[1:]))
    print_table(found)
    engines.print_calls(found, per_item)
    picture = engines.plot(found, per_item, HERE / "engines.png", machine())
    if picture:
        print(f"\n{picture}: time for one hypothesis and image against the ReLUs left")

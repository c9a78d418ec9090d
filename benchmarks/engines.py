"""Time of the engines by the number of ReLUs left: whole calls, and the plot of `make bench`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

HYPOTHESES, IMAGES = 50, 2_000  # of a whole call
NAMES = {"authors": "authors' loop", "stacked": "stacked", "fastbcd": "collapsed"}
MARKS = {"authors": "s--", "stacked": "^-.", "fastbcd": "o-"}

Table = dict[str, dict[str, dict]]
PerItem = Callable[[dict], float]


def cases(table: Table) -> list[dict[str, dict]]:
    """The groups of test_collapsed.py, by net and number of ReLUs."""
    found = [
        g for g in table.values() if "build" in next(iter(g.values()))["extra_info"]
    ]
    return sorted(found, key=lambda g: (info(g)["net"], info(g)["relus"]))


def info(group: dict[str, dict]) -> dict:
    return next(iter(group.values()))["extra_info"]


def calls(group: dict[str, dict], per_item: PerItem) -> dict[str, float]:
    """Seconds of a whole call with each engine, from what was measured of its parts.

    The loops: (K+1) N forwards. collapsed: the build, the affine part of N images (what `first
    pass` takes longer), and (K+1) N hypothesis-images.
    """
    work = (HYPOTHESES + 1) * IMAGES
    times = {name: work * per_item(group[name]) for name in ("authors", "stacked")}
    affine = per_item(group["first pass"]) - per_item(group["fastbcd"])
    affine *= (
        group["fastbcd"]["extra_info"]["divide"]
        / group["fastbcd"]["extra_info"]["images"]
    )
    times["collapsed"] = (
        info(group)["build"] + IMAGES * affine + work * per_item(group["fastbcd"])
    )
    return times


def print_calls(table: Table, per_item: PerItem) -> None:
    """Print the times of builds and whole calls, and the engine that auto takes."""
    groups = cases(table)
    if not groups:
        return
    print(
        f"\nA call of {HYPOTHESES} hypotheses x {IMAGES:,} images, from its measured parts"
    )
    print(f"{'':<24}{'build s':>9}{'forwards':>10}{'authors s':>11}{'stacked s':>11}"
          f"{'collapsed s':>13}{'x authors':>11}  auto takes")  # fmt: skip
    for group in groups:
        what, times = info(group), calls(group, per_item)
        taken = what["auto"]
        slower = times[taken] / min(times["stacked"], times["collapsed"]) - 1
        print(
            f"{what['net'] + ', ' + format(what['relus'], ','):<24}{what['build']:>9.1f}"
            f"{what['build'] / per_item(group['authors']):>10,.0f}{times['authors']:>11,.0f}"
            f"{times['stacked']:>11,.0f}{times['collapsed']:>13,.0f}"
            f"{times['authors'] / times['collapsed']:>10.1f}x  {taken} ({slower:+.0%})"
        )


def plot(table: Table, per_item: PerItem, path: Path, machine: str) -> Path | None:
    """Time for one hypothesis and image against the number of ReLUs, all engines."""
    groups = [g for g in cases(table) if info(g)["net"] == "resnet18"]
    if len(groups) < 2:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), constrained_layout=True)
    relus = [info(g)["relus"] for g in groups]
    for name, label in NAMES.items():
        times = [1e3 * per_item(g[name]) for g in groups]
        axes.plot(relus, times, MARKS[name], label=label, markersize=5)
    axes.set(xscale="log", yscale="log", xlabel="ReLUs left", ylabel="ms")
    axes.set_xticks(relus, [f"{r // 1000}K" for r in relus], minor=False)
    axes.minorticks_off()
    axes.set_title(
        "One hypothesis on one image: ResNet18, 32×32, 100 classes", fontsize=11
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.text(0.99, 0.01, machine, ha="right", va="bottom", fontsize=5, color="0.4")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path

"""Accuracy against seconds of private inference: SNL, BCD by count, and BCD for a target.

    FASTBCD_DATA=folder python benchmarks/latency.py      # ResNet-20 on CIFAR-10
    python benchmarks/latency.py --quick                  # a tiny version, one minute

The folder holds `cifar10-12k.npz` and `resnet20-cifar10.safetensors`. The arms, with every seed:

    SNL                 down to 20,000, 13,000 and 8,000 of ResNet-20's 188,416 ReLUs
    BCD by count        to the same counts, by `fastbcd.linearize`: hypotheses by saliency
    BCD for a target    by `fastbcd.linearize` too, to seconds under CrypTen, three on a LAN
                        (1 Gbit/s, 1 ms) and three on a WAN (100 Mbit/s, 40 ms)
    BCD for garbled     to the seconds that the net of BCD by count takes under Delphi's garbled
    circuits            circuits, with seed 0 and the second count: on the LAN and the WAN
                        with a round for each site in use, and with a constant number of rounds

Each arm has the same number of epochs on the same images in the same batches and distills from the
dense net: SNL trains masks until `--final` epochs are left for the fine-tune, linearize divides the
epochs by itself. Nets of the first two do not depend on setting and protocol: they are trained
once, and their cost is computed for all. With a constant number of rounds the target must find the
same masks as the count does, bit by bit: the other counts and seeds are not run twice. With a round
for each site it may empty some, which are worth 25 ReLUs on the WAN, against 9,000 under CrypTen.

Every arm has run directories of its own below `--out`; the same command resumes. The seeds may run
at the same time (`--seeds 0`, `--seeds 1`); the same command with both then reports.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import fastbcd
from arms import Arm, Problem, add_options, problem_of
from fastbcd import MaskSet, private
from fastbcd.report.figures import LOOKS as FIGURES
from table import machine

SETTINGS: dict[str, dict[str, Any]] = {
    "LAN": {"bandwidth": "1Gbit", "rtt": "1ms"},
    "WAN": {"bandwidth": "100Mbit", "rtt": "40ms"},
}
PLACES = [
    (protocol, setting) for protocol in ("crypten", "delphi-gc") for setting in SETTINGS
]
COUNTS = (20_000 / 188_416, 13_000 / 188_416, 8_000 / 188_416)
# Shares of the dense net's seconds: 0.16, 0.12, 0.085 s and 3.5, 2.7, 2.0 s of ResNet-20.
TARGETS = {"LAN": (0.1245, 0.0934, 0.0662), "WAN": (0.2456, 0.1895, 0.1404)}
GARBLED = private.PROTOCOLS["delphi-gc"]
CONSTANT = replace(
    GARBLED,
    name="constant rounds",
    relu_rounds=private.Constant(0, "sent with the rounds of the linear layers"),
)
SNL, COUNT, TARGET = "SNL", "BCD by count", "BCD for a target"
LOOKS = {
    SNL: {"marker": "x", "color": FIGURES["methods"]["SNL"]["color"]},
    COUNT: {"marker": "s", "color": FIGURES["methods"]["BCD"]["color"]},
    TARGET: {"marker": "o", "color": "black"},
}


class Net(NamedTuple):
    """The result of one arm with one seed."""

    way: str  # SNL, COUNT or TARGET
    goal: str  # what it was to reach
    where: str  # the protocol and the setting of a target; "" for those of a count
    seed: int
    accuracy: float
    epochs: int
    masks: MaskSet

    def seconds(self, protocol: str, setting: str) -> float:
        return private.cost(self.masks, protocol, **SETTINGS[setting]).known_seconds

    @property
    def relus(self) -> int:
        return self.masks.count()

    @property
    def sites(self) -> int:
        return sum(n > 0 for n in self.masks.counts().values())


# ------------------------------------------------------------------------------------- arms


def nets(problem: Problem, o: argparse.Namespace) -> Iterator[Net]:
    """Seeds first: an interrupted experiment then has whole comparisons."""
    full = fastbcd.masks(problem.dense)
    counts = [round(share * full.total) for share in COUNTS]
    for seed in o.seeds:
        run = partial(_net, problem, o, seed=seed)
        by_count = {}
        for count in counts:
            yield run(SNL, count)
            yield (found := run(COUNT, count))
            by_count[count] = found
        for setting, connection in reversed(SETTINGS.items()):
            dense = private.cost(full, "crypten", **connection).known_seconds
            for share in TARGETS[setting]:
                seconds = float(f"{share * dense:.2g}")
                yield run(
                    TARGET,
                    private.Target(seconds, **connection, activations_only=True),
                    f"crypten {setting}",
                )
        garbled = [(GARBLED, "LAN"), (GARBLED, "WAN"), (CONSTANT, "WAN")]
        for protocol, setting in garbled if seed == 0 else ():
            connection = {"protocol": protocol, **SETTINGS[setting]}
            cost = private.cost(by_count[counts[1]].masks, **connection)
            target = private.Target(cost.seconds, **connection, activations_only=True)
            yield run(TARGET, target, f"{protocol.name} {setting}")


def _net(
    problem: Problem,
    o: argparse.Namespace,
    way: str,
    goal: Any,
    where: str = "",
    *,
    seed: int,
) -> Net:
    """Run an arm, or read its result."""
    text = f"{goal:,} ReLUs" if isinstance(goal, int) else f"{goal.seconds:.4g} s"
    name = " ".join(filter(None, (way, where, text.replace(",", "")))).replace(",", "")
    arm = Arm(problem, o, name, seed)

    def work(arm: Arm) -> dict[str, Any]:
        if way == SNL:
            arm.snl(goal, o.epochs - o.final)
        else:
            arm.linearize(goal)
        return {"arm": way, "where": where}

    r = arm.result(work)
    masks = MaskSet.load(arm.folder / "masks.safetensors")
    net = Net(way, text, where, seed, r["accuracy"], r["epochs"], masks)
    wan = net.seconds("crypten", "WAN")
    print(f"{name}, seed {seed}: {net.accuracy:.2f} %, {masks.count():,} ReLUs in {net.sites} "
          f"sites, {wan:.2f} s under CrypTen on the WAN; {r['epochs']} epochs in "
          f"{r['seconds']:.0f} s", flush=True)  # fmt: skip
    return net


# ------------------------------------------------------------------------------------ report


class Row(NamedTuple):
    """The results of an arm with all seeds."""

    way: str
    goal: str
    where: str
    nets: list[Net]

    @property
    def accuracy(self) -> float:
        return mean(net.accuracy for net in self.nets)

    def seconds(self, protocol: str, setting: str) -> float:
        return mean(net.seconds(protocol, setting) for net in self.nets)


def rows_of(found: list[Net]) -> list[Row]:
    keys = dict.fromkeys((net.way, net.goal, net.where) for net in found)
    return [Row(*key, [net for net in found if net[:3] == key]) for key in keys]


def print_table(rows: list[Row]) -> None:
    """Accuracy, sites, ReLUs and rounds, and the seconds in each setting; means over the seeds."""
    heads = "".join(f"{f'{p} {s}':>15}" for p, s in PLACES)
    print(
        f"\n{'arm':<48}{'test %':>8}{'sites':>7}{'ReLUs':>9}{'rounds':>8}{heads}   each seed, %"
    )
    for row in rows:
        title = ", ".join(filter(None, (row.way, row.where, row.goal)))
        sites, relus = (
            mean(getattr(n, name) for n in row.nets) for name in ("sites", "relus")
        )
        rounds = mean(private.cost(n.masks, "crypten").rounds or 0 for n in row.nets)
        seconds = "".join(f"{row.seconds(p, s):>13.3f} s" for p, s in PLACES)
        seeds = " / ".join(f"{n.accuracy:.2f}" for n in row.nets)
        cells = (
            f"{row.accuracy:>8.2f}{sites:>7.1f}{relus:>9,.0f}{rounds:>8.0f}{seconds}"
        )
        print(f"{title:<48}{cells}   {seeds}")


def print_gains(rows: list[Row]) -> None:
    """The fastest BCD for a target whose accuracy is at most one point below each net of SNL."""
    print("\nseconds of SNL over those of BCD for a target, accuracy within one point:")
    for setting in SETTINGS:
        place = ("crypten", setting)
        found = [r for r in rows if r.way == TARGET and r.where == " ".join(place)]
        for snl in (r for r in rows if r.way == SNL):
            name = f"  crypten {setting}, SNL {snl.goal}: {snl.accuracy:.2f} %"
            name += f", {snl.seconds(*place):.3f} s"
            good = [r for r in found if r.accuracy >= snl.accuracy - 1]
            if not good:
                print(f"{name}; no target is as accurate")
                continue
            best = min(good, key=lambda row: row.seconds(*place))
            gain = snl.seconds(*place) / best.seconds(*place)
            print(
                f"{name}; {best.accuracy:.2f} %, {best.seconds(*place):.3f} s: {gain:.2f} times"
            )


def print_garbled(found: list[Net]) -> None:
    """Whether the targets under garbled circuits find the nets of BCD by count."""
    print(
        "\nBCD for a target under garbled circuits, and BCD by count with as many ReLUs:"
    )
    for net in (n for n in found if n.where and "crypten" not in n.where):
        counts = [n for n in found if n.way == COUNT and n.seed == net.seed]
        other = min(counts, key=lambda n: abs(n.relus - net.relus))
        same = "the same masks" if net.masks == other.masks else "other masks"
        print(f"  {net.where}: {same}, |both| / |smaller| {net.masks.iou(other.masks):.4f}, "
              f"{net.relus:,} and {other.relus:,} ReLUs, {net.sites} and "
              f"{other.sites} sites, {net.accuracy:.2f} and {other.accuracy:.2f} %")  # fmt: skip


def plot(o: argparse.Namespace, rows: list[Row]) -> str:
    """Accuracy against seconds: lines through means, and a small mark for each seed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        return f"no picture: {error}"
    figure = Figure(figsize=(10, 8), layout="constrained")
    panels = figure.subplots(2, 2, sharey=True)
    for axes, (p, s) in zip(panels.flat, PLACES, strict=True):
        for way, look in LOOKS.items():
            mine = [r for r in rows if r.way == way and r.where in ("", f"{p} {s}")]
            mine.sort(key=lambda row: row.seconds(p, s))
            axes.plot(
                [r.seconds(p, s) for r in mine],
                [r.accuracy for r in mine],
                label=way,
                **look,
            )
            for net in (net for row in mine for net in row.nets):
                axes.plot(net.seconds(p, s), net.accuracy, markersize=3, **look)
        axes.set(
            xscale="log",
            xlabel="seconds for the ReLUs of one image",
            title=f"{p}, {s}: {', '.join(SETTINGS[s].values())}",
            ylabel="test accuracy, %",
        )
        axes.grid(alpha=0.3)
    panels[0, 0].legend()
    figure.savefig(o.out / "latency.png", dpi=120)
    return str(o.out / "latency.png")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, batch=25)
    parser.set_defaults(samples=500)
    o = parser.parse_args()
    if o.quick:
        vars(o).update(
            images=128, samples=64, epochs=4, final=1, seeds=[0], dense_epochs=2, rt=2
        )
    if o.epochs - o.final < 1:
        parser.error("--epochs must leave a step of BCD beside --final")
    o.out = o.out or Path("runs") / f"latency-{'quick' if o.quick else 'cifar10'}"
    return o


def main() -> None:
    o = options()
    problem = problem_of(o)
    print(machine())
    print(f"{fastbcd.masks(problem.dense).total:,} ReLUs, "
          f"{fastbcd.accuracy(problem.dense, problem.test):.2f} % on {len(problem.test):,} test "
          f"images; {vars(o)}", flush=True)  # fmt: skip
    found = list(nets(problem, o))
    rows = rows_of(found)
    print_table(rows)
    print_gains(rows)
    print_garbled(found)
    print(f"\n{plot(o, rows)}")


if __name__ == "__main__":
    main()

"""Runs as the report reads them."""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from fastbcd import models
from fastbcd.masking.masks import MaskSet
from fastbcd.runs import fingerprint
from fastbcd.runs.read import load_run, replacement
from fastbcd.runs.step import encode

TARGETS = ("seconds", "bytes", "rounds")
TITLES = {
    "bcd": "BCD",
    "dense": "dense",
    "snl": "SNL",
    "autorep": "AutoReP",
    "deepreduce": "DeepReDuce",
    "senet": "SENet",
    "relupruner": "ReLUPruner",
}


class Point(NamedTuple):
    """A net on the way of a run, with its accuracy in percent."""

    relus: int
    accuracy: float
    sites: list[int] | None  # ReLUs kept at each site; None: older versions did not record it


@dataclass
class SavedRun:
    """One run directory as it is after its last finished step or epoch.

    `masks` and `weights` are None while a starting point trains masks; there is no net yet then.
    """

    path: Path
    kind: str  # one of TITLES
    config: dict[str, Any]  # config.json
    history: list[dict[str, Any]]  # one record per step or epoch
    start: MaskSet  # before the first step
    start_accuracy: float | None  # test accuracy of BCD's start in percent, if it was measured
    masks: MaskSet | None
    poly: tuple[str, ...]  # sites whose removed ReLUs are quadratics
    weights: dict[str, Tensor] | None = field(repr=False, default=None)
    begin: list[float] | None = None  # of BCD with a target: the cost and the sites of the start

    @cached_property
    def model(self) -> nn.Module:
        """The run's net with its weights and masks, on the CPU, in eval mode."""
        arch, weights = self.config["net"]["arch"], self.weights or {}
        if arch is None or "name" not in arch:
            made = "a net of its own" if arch is None else f"the net of {arch['model']}"
            raise ValueError(
                f"{self.path} is a run of {made}, which cannot be built from the run alone: build "
                f"it as for the run and pass it, load_run(path, model=net)"
            )
        try:
            with torch.device("meta"):  # first without memory, as the record may be wrong
                fingerprint.check_fits(models.build(**arch), weights)
        except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
            raise ValueError(
                f"{self.path}: the recorded net {arch} does not fit: {error}"
            ) from error
        dtypes = (t.dtype for t in weights.values() if t.is_floating_point())
        return self.fill(models.build(**arch).to(next(dtypes, torch.float32)))

    def fill(self, net: nn.Module) -> nn.Module:
        """Write the run's weights and masks into the net; returns it in eval mode."""
        if self.weights is None:
            raise ValueError(
                f"{self.path} has no final net yet: {self.title} is still training masks; let it "
                f"finish"
            )
        try:
            fingerprint.restore(net, self.weights)
        except ValueError as error:
            kind = replacement(self.weights, self.config["net"]["sites"])
            words = {"identity": "", "line": "lines", "poly": "quadratics"}[kind]
            hint = f" (it has {words}: give a net with replacement={kind!r})" if words else ""
            what = f"{self.path} does not fit {type(net).__name__}: {error}{hint}"
            raise ValueError(what) from error
        return net.eval()

    @property
    def settings(self) -> dict[str, Any]:
        return self.config["settings"]

    @property
    def title(self) -> str:
        return TITLES[self.kind]

    @property
    def count(self) -> int:
        """ReLUs kept; while masks are being trained, as of the last epoch."""
        if self.masks is not None:
            return self.masks.count()
        return next((r["count"] for r in self.history[::-1] if "count" in r), self.start.count())

    def values(self) -> list[float]:
        """Of BCD: the cost, or without a target the ReLUs, at the start and after each step."""
        if isinstance(self.settings["budget"], dict):
            costs = (step.get("cost", math.inf) for step in self.history)
            return [(self.begin or [math.inf])[0], *costs]
        return [*(step["before"] for step in self.history), self.count]

    @property
    def goal(self) -> float:
        """What the last of `values` is at most once BCD is finished."""
        budget = self.settings["budget"]
        return (
            next(budget[q] for q in TARGETS if q in budget) if isinstance(budget, dict) else budget
        )

    @property
    def done(self) -> bool:
        """Whether the run is finished."""
        if self.kind == "bcd":
            used = sum(n > 0 for n in self.masks.counts().values()) if self.masks else 0
            budget, most = self.settings["budget"], self.settings.get("max_sites", math.inf)
            relus = budget.get("relus", math.inf) if isinstance(budget, dict) else math.inf
            spent = sum(record.get("epochs", 1) for record in self.history)  # older: one per step
            if spent + 1e-6 < self.settings.get("linearize", {}).get("epochs", 0):
                return False
            return self.values()[-1] <= self.goal and self.count <= relus and used <= most
        if self.kind == "dense":
            return len(self.history) >= self.settings["epochs"]
        return bool(self.history) and self.history[-1].get("phase") == "final"

    @property
    def accuracy(self) -> float | None:
        """Test accuracy in percent; None if it was not measured."""
        if self.config.get("test") is None or not self.history:
            return None
        last = self.history[-1]
        return last["accuracy"].get("final") if "accuracy" in last else last.get("test_accuracy")

    def point(self) -> Point | None:
        """The run's result; None if it is not finished or was not tested."""
        if self.masks is None or not self.done or self.accuracy is None:
            return None
        return Point(self.count, self.accuracy, list(self.masks.counts().values()))

    def sites(self) -> list[list[int] | None]:
        """ReLUs kept at each site before the first step of BCD and after each one."""
        kept = [list(self.start.counts().values()), *(s.get("sites") for s in self.history)]
        if self.masks is not None and self.history:
            kept[-1] = list(self.masks.counts().values())
        return kept

    def masks_at(self, point: Point) -> MaskSet:
        """Some masks with as many ReLUs at each site as the point's net: they cost as much."""
        kept = zip(self.start.sites, point.sites or (), strict=True)
        bits = torch.cat([torch.arange(site.numel) < n for site, n in kept])
        return MaskSet(self.start.sites, bits)

    def seconds(self) -> dict[str, float]:
        """Seconds spent, by phase, over all finished steps."""
        spent: Counter[str] = Counter()
        for record in self.history:
            spent.update(record.get("seconds", {}))
        return dict(spent)

    def steps_to_go(self) -> int | None:
        """An estimate of the number of steps that BCD has left; None before its first step.

        Without a fixed DRC every step is assumed to leave the share r of the ReLUs, or of the cost,
        that the last one left: the smallest n with value·r^n <= goal.
        """
        values, drc = self.values(), self.settings["drc"]
        if self.done:
            return 0
        if isinstance(drc, int) and isinstance(self.settings["budget"], int):
            return max(1, math.ceil((values[-1] - self.goal) / drc))
        if len(values) < 2:
            return None
        left = values[-1] / values[-2]
        if left == 1:
            return None
        least = 1 if isinstance(self.settings["budget"], int) else 1e-3 * values[0]
        steps = math.log(max(self.goal, least) / values[-1], left) if left else 1
        return max(1, math.ceil(steps - 1e-9))


@dataclass(frozen=True)
class Stages:
    """The runs in one folder, in their order: the stages of a recipe, or a single run."""

    name: str
    stages: tuple[SavedRun, ...]
    recipe: dict[str, Any] | None  # of a recipe's folder

    def stage(self, *kinds: str) -> SavedRun | None:
        """The stage of one of these kinds, if it has begun."""
        return next((s for s in self.stages if s.kind in kinds), None)

    @property
    def dense(self) -> SavedRun | None:
        return self.stage("dense")

    @property
    def start(self) -> SavedRun | None:
        """The stage that trained the masks that BCD started from."""
        return next((s for s in self.stages if s.kind not in ("dense", "bcd")), None)

    @property
    def bcd(self) -> SavedRun | None:
        return self.stage("bcd")

    @property
    def last(self) -> SavedRun:
        return self.stages[-1]

    @property
    def method(self) -> str:
        """The method that made the last stage: a title, "BCD on AutoReP" or "linearize"."""
        if "linearize" in self.last.settings:
            return "linearize"
        on = self.last.kind == "bcd" and self.start is not None and self.start.kind == "autorep"
        return "BCD on AutoReP" if on else self.last.title

    def curve(self) -> list[Point]:
        """The start, if it was tested, and the net after each step of BCD."""
        if self.bcd is None:
            return []
        sites = self.bcd.sites()
        curve = [
            Point(step["after"], step["test_accuracy"], kept)
            for step, kept in zip(self.bcd.history, sites[1:], strict=True)
            if step["test_accuracy"] is not None
        ]
        start = self.start.point() if self.start else None
        if self.bcd.start_accuracy is not None:
            start = Point(self.bcd.start.count(), self.bcd.start_accuracy, sites[0])
        return [start, *curve] if curve and start else curve

    def train_curve(self) -> list[Point]:
        """The net before each step of BCD, with its accuracy on the train images that score."""
        steps = zip(self.bcd.history, self.bcd.sites(), strict=False) if self.bcd else ()
        return [Point(step["before"], step["base_accuracy"], kept) for step, kept in steps]


def read(path: str | os.PathLike[str]) -> Stages:
    """The run in a folder."""
    run = load_run(path)
    config = msgspec.to_builtins(run.config)
    history = []
    for record in run.history:
        fields = encode(record)
        fields |= fields.pop("notes", {})
        history.append({k: v for k, v in fields.items() if v is not None or k == "test_accuracy"})
    kind = "dense" if run.kind == "train" else run.kind
    if "epochs" in run.settings and kind == "bcd":
        config["settings"]["linearize"] = {"epochs": run.settings["epochs"]}
    saved = SavedRun(
        run.path,
        kind,
        config,
        history,
        run.start,
        run.begin.test_accuracy,
        run.masks,
        run.poly,
        run.weights,
        [run.begin.value, run.begin.sites],
    )
    return Stages(run.path.name or run.path.resolve().name, (saved,), None)

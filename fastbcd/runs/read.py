"""What a run directory holds, as plain data: nothing is written, a run that is at work is no harm.

    chain = read("runs/15k")            # a recipe's folder with its stages, or one run directory
    chain.bcd.history[-1]["after"]      # ReLUs left after the last finished step

A stage is one run directory: dense training, a starting point (SNL, AutoReP), or BCD.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastbcd.masking.masks import MaskSet, make_sites
from fastbcd.runs.directory import (
    State,
    finished_records,
    newest_state,
    read_state,
)

KINDS = {"fastbcd.run": "bcd", "fastbcd.dense": "dense", "fastbcd.snl": "snl",
         "fastbcd.autorep": "autorep"}  # fmt: skip
TITLES = {"bcd": "BCD", "dense": "dense", "snl": "SNL", "autorep": "AutoReP"}
RECIPE = "fastbcd.recipe"


@dataclass(frozen=True)
class Stage:
    """One run directory as it stands after its last finished step (or epoch)."""

    path: Path
    kind: str  # "bcd" | "dense" | "snl" | "autorep"
    config: dict[str, Any]
    history: list[dict[str, Any]]
    start: MaskSet  # before the first step
    masks: MaskSet | None  # now; None while masks are being trained
    poly: tuple[str, ...]  # sites whose removed ReLUs are quadratics

    @property
    def settings(self) -> dict[str, Any]:
        return self.config["settings"]

    @property
    def title(self) -> str:
        """The method's name: BCD, SNL, …"""
        return TITLES[self.kind]

    @property
    def count(self) -> int:
        """ReLUs kept now; while masks are being trained, as of the last epoch."""
        if self.masks is not None:
            return self.masks.count()
        counts = [record["count"] for record in self.history if "count" in record]
        return counts[-1] if counts else self.start.count()

    @property
    def done(self) -> bool:
        """Has it come to its end?"""
        if self.kind == "bcd":
            return self.count <= self.settings["budget"]
        if self.kind == "dense":
            return len(self.history) >= self.settings["epochs"]
        return bool(self.history) and self.history[-1].get("phase") == "final"

    @property
    def accuracy(self) -> float | None:
        """Test accuracy now, percent; None where it was not measured."""
        if self.config.get("test") is None or not self.history:
            return None
        last = self.history[-1]
        return last["accuracy"].get("final") if "accuracy" in last else last.get("test_accuracy")

    def seconds(self) -> dict[str, float]:
        """Seconds spent, by phase, over all finished steps."""
        spent: dict[str, float] = {}
        for record in self.history:
            for phase, value in record.get("seconds", {}).items():
                spent[phase] = spent.get(phase, 0.0) + value
        return spent

    def steps_to_go(self) -> int | None:
        """How many steps BCD has before it, as far as the last one tells; None: it has not begun.

        A fixed DRC: ceil((count - budget) / DRC). Otherwise the last step's share r of the ReLUs
        is taken to go on: the smallest n with count·(1 - r)^n <= budget.
        """
        left, drc = self.count - self.settings["budget"], self.settings["drc"]
        if left <= 0:
            return 0
        if isinstance(drc, int):
            return math.ceil(left / drc)
        if not self.history:
            return None
        share = self.history[-1]["drc"] / self.history[-1]["before"]
        if share == 1:
            return 1
        return math.ceil(math.log(max(self.settings["budget"], 1) / self.count, 1 - share) - 1e-9)


@dataclass(frozen=True)
class Chain:
    """The stages found at one path, in their order; a lone run is a chain of one."""

    name: str
    stages: tuple[Stage, ...]
    recipe: dict[str, Any] | None  # of a recipe's folder

    def stage(self, *kinds: str) -> Stage | None:
        """The stage of one of these kinds, if it has begun."""
        return next((s for s in self.stages if s.kind in kinds), None)

    @property
    def dense(self) -> Stage | None:
        return self.stage("dense")

    @property
    def start(self) -> Stage | None:
        return self.stage("snl", "autorep")

    @property
    def bcd(self) -> Stage | None:
        return self.stage("bcd")

    @property
    def last(self) -> Stage:
        return self.stages[-1]

    def curve(self) -> list[tuple[int, float]]:
        """(ReLUs, test accuracy) of the start, if it was measured, and after each step of BCD."""
        history = self.bcd.history if self.bcd else []
        steps = [
            (s["after"], s["test_accuracy"]) for s in history if s["test_accuracy"] is not None
        ]
        if steps and self.start and self.start.done and self.start.accuracy is not None:
            return [(self.start.count, self.start.accuracy), *steps]
        return steps

    def train_curve(self) -> list[tuple[int, float]]:
        """(ReLUs, accuracy on the train images that score), before each step of BCD."""
        return [(s["before"], s["base_accuracy"]) for s in (self.bcd.history if self.bcd else ())]


def read(path: str | os.PathLike[str]) -> Chain:
    """The run, or a recipe's stages, in a directory; ValueError or OSError if there is none.

    >>> import tempfile
    >>> net = nn.Sequential(nn.Flatten(), fastbcd.MaskedReLU(4), nn.Linear(4, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = fastbcd.bcd(net, data, budget=1, drc=2, finetune=None, run_dir=folder)
    ...     read(folder).last.masks.count()
    1
    """
    place = Path(path)
    if not place.exists():
        raise FileNotFoundError(f"there is nothing at {place}; name a run directory")
    if not place.is_dir():
        raise NotADirectoryError(f"{place} is a file; name the run directory it is in")
    config = _config(place) if (place / "config.json").exists() else None
    folders = [place]
    if config is None or _kind(config) == RECIPE:
        folders = [p for p in sorted(place.glob("[0-9]-*")) if (p / "config.json").exists()]
    stages = [stage for folder in folders if (stage := _stage(folder)) is not None]
    if not stages:
        raise ValueError(
            f"{place} holds no run that has begun: a run directory has config.json and "
            f"start.safetensors in it, as `fastbcd bcd --run-dir` writes them"
        )
    name = place.name or place.resolve().name
    return Chain(name, tuple(stages), config.get("recipe") if config else None)


def _stage(folder: Path) -> Stage | None:
    """A run directory; None if it was claimed but nothing was saved yet."""
    config = _config(folder)
    kind = KINDS.get(_kind(config))
    if kind is None:
        raise ValueError(
            f"{folder / 'config.json'} is of format {config.get('format')!r}; expected one of "
            f"{', '.join(KINDS)}"
        )
    state = newest_state(folder)
    if state is None:
        return None
    path = folder / "history.jsonl"  # read after the state: it is never behind by more than one
    history = finished_records(path, path.read_bytes() if path.exists() else b"", state)
    start = masks_of(_start(folder, state).tensors, config)
    if start is None:
        raise ValueError(f"{folder / 'start.safetensors'} holds no masks for the sites of the net")
    now = masks_of(state.tensors, config)
    poly = quadratics(state.tensors, list(config["net"]["sites"]))
    stage = Stage(folder, kind, config, history, start, now, poly)
    _check_nested(stage)
    return stage


def _start(folder: Path, state: State) -> State:
    path = folder / "start.safetensors"
    if not state.step:
        return state
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: without it nobody knows where the run began")
    return read_state(path)


def masks_of(tensors: dict[str, Tensor], config: dict[str, Any]) -> MaskSet | None:
    """The masks in a state; None if it has none for some site.

    >>> config = {"net": {"sites": {"act": [2]}}}
    >>> masks_of({"act.mask": torch.tensor([True, False])}, config).counts()
    {'act': 1}
    """
    shapes = {name: tuple(shape) for name, shape in config["net"]["sites"].items()}
    if any(f"{name}.mask" not in tensors for name in shapes):
        return None
    bits = [tensors[f"{name}.mask"].flatten().bool() for name in shapes]
    return MaskSet(make_sites(shapes), torch.cat(bits))


def quadratics(tensors: dict[str, Tensor], sites: list[str]) -> tuple[str, ...]:
    """The sites that have coefficients: their removed ReLUs are quadratics."""
    return tuple(name for name in sites if f"{name}.coef" in tensors)


def _check_nested(stage: Stage) -> None:
    """BCD never gives a ReLU back: the masks now must lie within those of the start."""
    if stage.masks is None:
        return
    added = int((stage.masks.bits & ~stage.start.bits).sum())
    if added:
        raise ValueError(
            f"{stage.path} keeps {added:,} ReLUs that its start does not: these states are not of "
            f"one run"
        )


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not readable as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is no run's: it holds a {type(config).__name__}, no object")
    return config


def _kind(config: dict[str, Any]) -> str:
    """The format without its version."""
    return str(config.get("format", "")).rpartition(" ")[0]

"""Recipe: an experiment of the paper, and plan: what it takes to run it.

Names are net-data-budget (wrn22-8-tiny-200k), net-data-autorep-budget, and ablation-setting-value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import resources
from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from fastbcd import models

_ROWS = json.loads((resources.files("fastbcd.recipes") / "rows.json").read_text("utf-8"))


class DataShape(NamedTuple):
    """The size of a data set.

    >>> DATA["cifar100"]
    DataShape(classes=100, image_size=32, channels=3, train=50000)
    """

    classes: int
    image_size: int
    channels: int
    train: int  # images


DATA: dict[str, DataShape] = {name: DataShape(*row) for name, row in _ROWS["data"].items()}


@dataclass(frozen=True)
class Recipe:
    """One experiment: a dense net, a starting point with b_ref ReLUs, BCD down to budget.

    >>> settings = {"drc": 100, "adt": 0.3, "rt": 50, "epochs": 20, "optimizer": "sgd", "lr": 1e-3}
    >>> plan(Recipe("mine", "resnet18", "cifar10", "snl", 30_000, 9_000, **settings)).steps
    210
    """

    name: str
    arch: str  # of fastbcd.models
    data: str  # of fastbcd.load
    start: str  # "snl" | "autorep"
    b_ref: int
    budget: int
    drc: int
    adt: float  # percentage points
    rt: int
    epochs: int  # of fine-tuning per step
    optimizer: str  # "sgd" | "adam"
    lr: float
    published_start: float | None = None  # SNL's or AutoReP's accuracy at `budget`, percent
    published: float | None = None  # BCD's accuracy, percent
    source: str = ""  # the table or figure of the paper
    note: str = ""

    def __post_init__(self) -> None:
        if self.start not in ("snl", "autorep"):
            raise ValueError(f"{self.name}: start={self.start!r}; choose 'snl' or 'autorep'")
        if self.data not in DATA:
            raise ValueError(f"{self.name}: data={self.data!r}; choose from {', '.join(DATA)}")
        if not 0 <= self.budget <= self.b_ref:
            bounds = f"must lie between 0 and b_ref={self.b_ref:,}"
            raise ValueError(f"{self.name}: budget={self.budget:,} {bounds}")

    @property
    def shape(self) -> DataShape:
        """The data set's classes, image size and number of images."""
        return DATA[self.data]


def get(name: str) -> Recipe:
    """The recipe of that name.

    >>> get("wrn22-8-tiny-200k").b_ref
    300000
    """
    if name not in RECIPES:
        near = get_close_matches(name, RECIPES, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"there is no recipe {name!r}; {hint}`fastbcd recipes` lists them all")
    return RECIPES[name]


_FIELDS = [dict(zip(_ROWS["recipe columns"], row, strict=True)) for row in _ROWS["recipes"]]
RECIPES: dict[str, Recipe] = {fields["name"]: Recipe(**fields) for fields in _FIELDS}
DENSE_EPOCHS = 160  # SNL's recipe for the dense net
SNL_EPOCHS = 300 + 100  # about 300 for the masks at 30K, 100 of fine-tuning
AUTOREP_EPOCHS = {"tiny-imagenet": 80}  # 200 elsewhere


@dataclass(frozen=True)
class Plan:
    """The work of a recipe in PFLOP, 10¹⁵ FLOP; a multiply-add is 2 FLOP.

    With F = 2 · multiply-adds of one image, N train images, T steps:
        scoring       at most T · RT passes, each N · F
        fine-tuning   T · epochs · N · 4 F: forward, backward (2 F) and the teacher's forward
        dense         160 epochs · N · 3 F
        start         its epochs · N · 4 F

    >>> print(str(plan(get("resnet18-cifar100-15k"))).splitlines()[1])
    1  dense        160 epochs: 26.7 PFLOP
    """

    recipe: Recipe
    multiply_adds: int  # of one image, forward
    steps: int
    epochs: int  # of fine-tuning, over all steps
    passes: int  # over the train set for scoring, at most
    start_epochs: int
    scoring: float  # PFLOP
    finetuning: float
    dense: float
    start: float

    @property
    def total(self) -> float:
        """PFLOP of all stages."""
        return self.scoring + self.finetuning + self.dense + self.start

    def __str__(self) -> str:
        r, steps = self.recipe, max(self.steps, 1)
        lines = [
            f"{r.name} ({r.source or 'not published'}): {r.arch} on {r.data}, "
            f"{r.shape.train:,} images, {self.multiply_adds / 1e9:.3g} G multiply-adds each",
            f"1  dense        {DENSE_EPOCHS} epochs: {self.dense:,.1f} PFLOP",
            f"2  {r.start:<12} to {r.b_ref:,} ReLUs, about {self.start_epochs} epochs: "
            f"{self.start:,.1f} PFLOP",
            f"3  bcd          to {r.budget:,} ReLUs in {self.steps:,} steps of {r.drc}, "
            f"ADT {r.adt:g}, RT {r.rt}",
            f"   scoring      at most {self.passes:,} passes, and {self.steps:,} of the base net: "
            f"{self.scoring:,.1f} PFLOP, {self.scoring / steps:.2f} per step",
            f"   fine-tuning  {self.epochs:,} epochs, {r.epochs} per step, {r.optimizer} {r.lr:g}: "
            f"{self.finetuning:,.1f} PFLOP, {self.finetuning / steps:.2f} per step",
            f"total           about {self.total:,.0f} PFLOP",
        ]
        if r.published is not None and r.published_start is not None:
            start = f"{'SNL' if r.start == 'snl' else 'AutoReP'} {r.published_start:.2f} %"
            lines.append(f"published       {start}, BCD {r.published:.2f} %")
        return "\n".join([*lines, f"note            {r.note}"] if r.note else lines)


def plan(recipe: Recipe) -> Plan:
    """Steps, epochs, scoring passes and estimated PFLOP of a recipe.

    >>> p = plan(get("resnet18-cifar100-15k"))
    >>> p.steps, p.epochs, p.passes, round(p.scoring / p.steps, 2), round(p.finetuning / p.steps, 2)
    (150, 3000, 7500, 2.78, 4.44)
    """
    shape = recipe.shape
    macs = multiply_adds(recipe.arch, shape.classes, shape.image_size, channels=shape.channels)
    epoch = 2 * macs * shape.train / 1e15  # one forward pass over the train set
    steps = math.ceil((recipe.b_ref - recipe.budget) / recipe.drc)
    start_epochs = SNL_EPOCHS if recipe.start == "snl" else AUTOREP_EPOCHS.get(recipe.data, 200)
    return Plan(
        recipe, macs, steps, steps * recipe.epochs, steps * recipe.rt, start_epochs,
        scoring=steps * recipe.rt * epoch,
        finetuning=steps * recipe.epochs * 4 * epoch,
        dense=DENSE_EPOCHS * 3 * epoch,
        start=start_epochs * 4 * epoch,
    )  # fmt: skip


@cache
def multiply_adds(arch: str, classes: int, image_size: int, *, channels: int = 3) -> int:
    """Multiply-adds of one image, forward; nothing is computed.

    >>> multiply_adds("resnet18", 100, 32)
    555468800
    """
    with torch.device("meta"):
        net = models.build(arch, classes, image_size, in_channels=channels).eval()
        image = torch.zeros(1, channels, image_size, image_size)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        net(image)
    return counter.get_total_flops() // 2


def table(recipes: Iterable[Recipe]) -> str:
    """A table of recipes with their plans and published accuracies.

    >>> table([get("resnet18-cifar100-15k")]).splitlines()[1].split()[:3]
    ['resnet18-cifar100-15k', '30,000', '15,000']
    """
    lines = [
        f"{'recipe':<32}{'B_ref':>9}{'budget':>9}{'DRC':>5}{'ADT':>5}{'RT':>4}{'epochs':>7}  "
        f"{'optimizer':<13}{'steps':>6}{'PFLOP':>8}{'start':>8}{'BCD':>7}  source"
    ]
    for r in recipes:
        p = plan(r)
        start, bcd = (f"{v:.2f}" if v else "-" for v in (r.published_start, r.published))
        lines.append(
            f"{r.name:<32}{r.b_ref:>9,}{r.budget:>9,}{r.drc:>5}{r.adt:>5g}{r.rt:>4}{r.epochs:>7}  "
            f"{f'{r.optimizer} {r.lr:g}':<13}{p.steps:>6,}{p.total:>8,.0f}{start:>8}{bcd:>7}  "
            f"{r.source}"
        )
    return "\n".join(lines)

"""run_recipe: dense net, starting point, BCD. Every stage is a run directory of its own.

    recipe = fastbcd.recipes.get("resnet18-cifar100-15k")
    run = run_recipe(recipe, "runs/15k", data, test=test)

    runs/15k/config.json     the recipe and the seed
    runs/15k/1-dense/        the stages
    runs/15k/2-snl/          (or 2-autorep)
    runs/15k/3-bcd/

The same call again resumes an interrupted recipe: a finished stage is read, not run.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastbcd import models
from fastbcd.data.images import ImageData
from fastbcd.descent.bcd import Run, bcd
from fastbcd.masking.masks import masks
from fastbcd.recipes.recipe import AUTOREP_EPOCHS, Recipe
from fastbcd.runs.config import check_same_config
from fastbcd.runtime import ranks
from fastbcd.runtime.atomic_files import write_atomically
from fastbcd.scoring.engine import Engine
from fastbcd.starts.autorep import autorep
from fastbcd.starts.snl import snl
from fastbcd.training.dense import train
from fastbcd.training.settings import Finetune


def run_recipe(
    recipe: Recipe, run_dir: str | os.PathLike[str], data: ImageData, *,
    test: ImageData | None = None, dense: nn.Module | None = None, seed: int = 0,
    samples: int | None = None, engine: str | Engine = "auto", progress: bool = False,
    dense_options: dict[str, Any] | None = None, start_options: dict[str, Any] | None = None,
) -> Run:  # fmt: skip
    """Run or resume the stages of a recipe in run_dir; returns the run of BCD.

    Args:
        data, test: train and test split of the recipe's data set, on the device to work on.
        dense: a trained net of the recipe's architecture; the first stage is skipped. It is the
            teacher of the other two stages and is not changed.
        samples, engine: as for `bcd`.
        dense_options, start_options: arguments of `train`, and of `snl` or `autorep`, that replace
            the published values.
    """
    classes, size, channels, _ = recipe.shape
    for what, given in (("train", data), ("test", data if test is None else test)):
        if given.images.shape[1:] != (channels, size, size) or given.classes != classes:
            needs = f"{recipe.data}: images {channels}×{size}×{size}, {classes} classes"
            raise ValueError(f"the {what} data is {given!r}; {recipe.name} needs {needs}")
    place, say = Path(run_dir), progress and ranks.rank() == 0
    shared: dict[str, Any] = {"test": test, "seed": seed, "progress": progress}
    ranks.on_first(lambda: _claim(place, recipe, seed))
    if dense is None:
        net = build(recipe, seed).to(data.device)
        if say:
            print(f"1 of 3: {recipe.arch} with all {masks(net).total:,} ReLUs", flush=True)
        options = {**shared, "run_dir": place / "1-dense", **(dense_options or {})}
        dense = train(net, data, **options).model.eval()
    else:
        _check_net(recipe, dense)
    if say:
        print(f"2 of 3: {recipe.start} to {recipe.b_ref:,} ReLUs", flush=True)
    method: Any = snl
    options = {**shared, "teacher": dense, "run_dir": place / f"2-{recipe.start}"}
    if recipe.start == "autorep":
        method, options["epochs"] = autorep, AUTOREP_EPOCHS.get(recipe.data, 200)
    options |= start_options or {}
    start = method(copy.deepcopy(dense), data, recipe.b_ref, **options)
    if say:
        print(f"3 of 3: bcd to {recipe.budget:,} ReLUs", flush=True)
    return bcd(
        start.model, data, recipe.budget, drc=recipe.drc, rt=recipe.rt, adt=recipe.adt,
        finetune=Finetune(epochs=recipe.epochs, lr=recipe.lr, optimizer=recipe.optimizer),
        teacher=dense, samples=samples, run_dir=place / "3-bcd", engine=engine, **shared,
    )  # fmt: skip


def build(recipe: Recipe, seed: int = 0) -> nn.Module:
    """The recipe's dense net, with initial weights that depend only on the seed."""
    classes, size, channels, _ = recipe.shape
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return models.build(recipe.arch, classes, size, in_channels=channels)


def _check_net(recipe: Recipe, dense: nn.Module) -> None:
    """Raise if the net has another architecture or does not keep all its ReLUs."""
    with torch.device("meta"):
        wanted = {k: tuple(v.shape) for k, v in build(recipe).state_dict().items()}
    found = {k: tuple(v.shape) for k, v in dense.state_dict().items()}
    if found != wanted:
        first = min(k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k))
        raise ValueError(
            f"the dense net is not the {recipe.arch} of {recipe.name}: {first} is "
            f"{found.get(first, 'missing')}, expected {wanted.get(first, 'no such name')}"
        )
    kept = masks(dense)
    if kept.count() < kept.total:
        some = f"{kept.count():,} of {kept.total:,} ReLUs"
        raise ValueError(f"the dense net keeps {some}; give one that keeps all")


def _claim(place: Path, recipe: Recipe, seed: int) -> str:
    """Write config.json into a new directory; raise if it belongs to another recipe."""
    facts = {"published_start", "published", "source", "note"}  # these do not decide the outcome
    settings = {k: v for k, v in dataclasses.asdict(recipe).items() if k not in facts}
    config = {"format": "fastbcd.recipe 1", "recipe": settings, "seed": seed}
    if not (place / "config.json").exists():
        text = json.dumps(config, indent=2) + "\n"
        place.mkdir(parents=True, exist_ok=True)
        write_atomically(place / "config.json", lambda file: file.write(text.encode()))
    check_same_config(place, config)
    return ""

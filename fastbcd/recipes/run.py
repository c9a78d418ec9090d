"""A whole recipe: dense net → starting point → BCD. Every stage is resumable on its own.

    recipe = fastbcd.recipes.get("resnet18-cifar100-15k")
    run = fastbcd.recipes.run.run_recipe(recipe, "runs/15k", data, test)

    runs/15k/config.json     the recipe and the seed
    runs/15k/1-dense/        each stage's run directory
    runs/15k/2-snl/          (or 2-autorep)
    runs/15k/3-bcd/

The same call again goes on where it was stopped: a stage that is done is read, not run.
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
from fastbcd.runs.directory import check_same_config
from fastbcd.runtime import ranks
from fastbcd.runtime.atomic_files import write_atomically
from fastbcd.scoring.engine import Engine
from fastbcd.starts.autorep import autorep
from fastbcd.starts.snl import snl
from fastbcd.training.dense import train
from fastbcd.training.finetune import Finetune


def run_recipe(
    recipe: Recipe,
    run_dir: str | os.PathLike[str],
    data: ImageData,
    test: ImageData | None = None,
    *,
    dense: nn.Module | None = None,
    seed: int = 0,
    samples: int | None = None,
    engine: str | Engine = "auto",
    progress: bool = False,
    dense_options: dict[str, Any] | None = None,
    start_options: dict[str, Any] | None = None,
) -> Run:
    """Run the recipe's stages in run_dir, or go on with them; returns the run of BCD.

    Args:
        data, test: the recipe's data set, train and test split, on the device to work on.
        dense: a net of the recipe's architecture that is trained already: the first stage is
            left out. It is the teacher of the other two and is not changed.
        samples, engine: of `bcd`.
        dense_options, start_options: for `train`, and for `snl` or `autorep`, in place of the
            published values.
    """
    check_data(recipe, data, "the train data")
    if test is not None:
        check_data(recipe, test, "the test data")
    place = Path(run_dir)
    ranks.on_first(lambda: _claim(place, recipe, seed))
    if dense is None:
        dense = _dense(recipe, place / "1-dense", data, test, seed, progress, dense_options or {})
    else:
        _check_net(recipe, dense)
    start = _start(recipe, place, dense, data, test, seed, progress, start_options or {})
    _say(progress, f"3 of 3: bcd to {recipe.budget:,} ReLUs")
    return bcd(
        start, data, recipe.budget, drc=recipe.drc, rt=recipe.rt, adt=recipe.adt,
        finetune=Finetune(epochs=recipe.epochs, lr=recipe.lr, optimizer=recipe.optimizer),
        teacher=dense, test=test, samples=samples, seed=seed, run_dir=place / "3-bcd",
        engine=engine, progress=progress,
    )  # fmt: skip


def build(recipe: Recipe, seed: int = 0) -> nn.Module:
    """The recipe's dense net with initial weights that depend on the seed alone."""
    shape = recipe.shape
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return models.build(recipe.arch, shape.classes, shape.image_size, shape.channels)


def check_data(recipe: Recipe, data: ImageData, what: str) -> None:
    """Refuse images or classes that are not those of the recipe's data set."""
    shape = recipe.shape
    wanted = (shape.channels, shape.image_size, shape.image_size)
    if tuple(data.images.shape[1:]) != wanted or data.classes != shape.classes:
        raise ValueError(
            f"{what} is {data!r}; {recipe.name} is about {recipe.data}: images "
            f"{'×'.join(map(str, wanted))}, {shape.classes} classes"
        )


def _check_net(recipe: Recipe, dense: nn.Module) -> None:
    """Refuse a dense net of another architecture, or one that is not dense."""
    with torch.device("meta"):
        wanted = {k: tuple(v.shape) for k, v in build(recipe).state_dict().items()}
    found = {k: tuple(v.shape) for k, v in dense.state_dict().items()}
    if found != wanted:
        first = min(k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k))
        raise ValueError(
            f"the dense net is not the {recipe.arch} of {recipe.name}: {first} is "
            f"{found.get(first, 'missing')}, expected {wanted.get(first, 'nothing of that name')}"
        )
    if masks(dense).count() < masks(dense).total:
        raise ValueError(
            f"the dense net keeps {masks(dense).count():,} of {masks(dense).total:,} ReLUs; the "
            f"first stage's net keeps them all"
        )


def _claim(place: Path, recipe: Recipe, seed: int) -> str:
    """Write config.json into a new directory; refuse one that belongs to another recipe."""
    settings = dataclasses.asdict(recipe)
    for name in ("published_start", "published", "source", "note"):
        del settings[name]  # what decides the outcome is the rest
    config = {"format": "fastbcd.recipe 1", "recipe": settings, "seed": seed}
    if not (place / "config.json").exists():
        text = json.dumps(config, indent=2) + "\n"
        place.mkdir(parents=True, exist_ok=True)
        write_atomically(place / "config.json", lambda file: file.write(text.encode()))
    check_same_config(place, config)
    return ""


def _dense(
    recipe: Recipe,
    place: Path,
    data: ImageData,
    test: ImageData | None,
    seed: int,
    progress: bool,
    options: dict[str, Any],
) -> nn.Module:
    """Stage 1: the net with all its ReLUs, trained as SNL trains it."""
    net = build(recipe, seed).to(data.device)
    _say(progress, f"1 of 3: {recipe.arch} with all {masks(net).total:,} ReLUs")
    common = {"test": test, "seed": seed, "run_dir": place, "progress": progress}
    return train(net, data, **{**common, **options}).model.eval()


def _start(
    recipe: Recipe,
    place: Path,
    dense: nn.Module,
    data: ImageData,
    test: ImageData | None,
    seed: int,
    progress: bool,
    options: dict[str, Any],
) -> nn.Module:
    """Stage 2: b_ref ReLUs, by SNL or AutoReP."""
    _say(progress, f"2 of 3: {recipe.start} to {recipe.b_ref:,} ReLUs")
    net = copy.deepcopy(dense)
    common = {
        "teacher": dense, "test": test, "seed": seed, "run_dir": place / f"2-{recipe.start}",
        "progress": progress,
    }  # fmt: skip
    if recipe.start == "autorep":
        epochs = AUTOREP_EPOCHS.get(recipe.data, 200)
        return autorep(net, data, recipe.b_ref, **{"epochs": epochs, **common, **options}).model
    return snl(net, data, recipe.b_ref, **{**common, **options}).model


def _say(progress: bool, text: str) -> None:
    if progress and ranks.rank() == 0:
        print(text, flush=True)

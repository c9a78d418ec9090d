"""The commands that make runs: linearize, bcd, train and the starting points."""

from __future__ import annotations

import dataclasses
import inspect
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastbcd
from fastbcd.cli.inputs import Inputs, budget_of
from fastbcd.cli.options import call
from fastbcd.runs.read import run_folders
from fastbcd.runtime.settings import with_settings
from fastbcd.runtime.show import say

NONE = fastbcd.Finetune(epochs=0)


def linearize(
    options: Namespace, start: Path | None = None, teacher: Path | None = None
) -> None:
    """The whole job: a budget of ReLUs in a given number of epochs.

    From a trained net to --budget ReLUs in --epochs epochs of training in all. The plan is printed
    first. The same command resumes an interrupted run. Several budgets, such as
    --budget 100000,20000,8000, have a folder each in --run-dir; `fastbcd report` draws one curve.

    Args:
        start: a run, or weights with masks; the net of --weights is then the teacher only
        teacher: weights of another teacher (the net itself)
    """
    _search(fastbcd.linearize, options, teacher, start=_net(options, start))


def bcd(
    options: Namespace, precision: str | None = None, teacher: Path | None = None
) -> None:
    """Remove ReLUs by Block Coordinate Descent, with the paper's values as defaults.

    The same command resumes an interrupted run, also on another number of ranks (torchrun -m
    fastbcd bcd …).

    Args:
        precision: of scoring, "float32" or "mixed" (on a GPU "mixed", on a CPU "float32")
        teacher: weights of a net to distil from (none)
    """
    engine = fastbcd.Engine(getattr(options, "engine", "auto"), precision=precision)
    finetune = call(fastbcd.Finetune, options)
    _search(fastbcd.bcd, options, teacher, finetune=finetune, engine=engine)


def train(options: Namespace) -> None:
    """Train a dense net, as a starting point and as a teacher.

    As SNL does: SGD, with the learning rate divided by 10 after a half and after three quarters of
    the epochs. The same command resumes an interrupted run.
    """
    _run(fastbcd.train, options)


def starting_point(name: str) -> Callable[[Namespace], None]:
    """The command of a starting point; the module of its method describes it."""
    method: Any = getattr(fastbcd, name)
    default = inspect.signature(method).parameters["finetune"].default

    def work(options: Namespace, teacher: Path | None = None) -> None:
        _search(
            method, options, teacher, finetune=call(tuned, options, default or NONE)
        )

    about = inspect.getdoc(inspect.getmodule(method)) or ""
    teacher = "Args:\n    teacher: weights of another teacher (the net itself)"
    work.__doc__ = f"{about.removeprefix(f'{name}: ')}\n\n{teacher}"
    return work


@with_settings(fastbcd.Finetune, without=("epochs", "lr"))
def tuned(
    default: fastbcd.Finetune,
    finetune_epochs: int | None = None,
    finetune_lr: float | None = None,
    **settings: Any,
) -> fastbcd.Finetune:
    """The fine-tune of a starting point.

    Args:
        finetune_epochs: after the masks are fixed (as published)
        finetune_lr: learning rate at their start (as published)
    """
    if finetune_epochs is not None:
        settings["epochs"] = finetune_epochs
    if finetune_lr is not None:
        settings["lr"] = finetune_lr
    return dataclasses.replace(default, **settings)


def _search(method: Any, options: Namespace, teacher: Path | None, **more: Any) -> None:
    """Run a method that has a budget and a teacher."""
    budget = budget_of(options)
    _run(method, options, budget=budget, teacher=_net(options, teacher), **more)


def _net(options: Namespace, weights: Path | None) -> Any:
    """The net of the options with other weights; None without any."""
    if weights is None:
        return None
    inputs = call(Inputs, options)
    return inputs.net(inputs.split("train"), weights).eval()


def _run(function: Any, options: Namespace, **more: Any) -> None:
    """Load data and net, run the function, and print its result."""
    inputs = call(Inputs, options)
    data = inputs.split("train")
    net = inputs.net(data, inputs.weights)
    if (
        inputs.weights is None
        and inputs.model is None
        and function is not fastbcd.train
    ):
        say("no --weights: the net is untrained")
    call(function, options, net, data, test=inputs.split("test"), **more)
    if getattr(options, "dry_run", False):
        return
    for folder in run_folders(options.run_dir):
        run = fastbcd.load_run(folder)
        tested = "not tested"
        if run.accuracy is not None:
            tested = f"test {run.accuracy:.2f} %"
        say(f"{run.count:,} ReLUs kept, {tested}; weights and masks: {run.path}")

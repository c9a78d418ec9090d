"""Reading runs: nothing is written, and a run may be read while it is working."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastbcd import models
from fastbcd.masking.masks import MaskSet
from fastbcd.runs import fingerprint
from fastbcd.runs.config import TITLES, Config, read_config
from fastbcd.runs.directory import State, masks_in, read_start, read_state
from fastbcd.runs.step import Epoch, Start, Step, decode

REPLACEMENT_OF = {0: "identity", 2: "line", 3: "poly"}  # by coefficients per channel


@dataclass
class SavedRun:
    """One run directory as it is after its last finished step or epoch.

    `masks` and `weights` are None while a starting point trains masks; there is no net yet then.
    """

    path: Path
    config: Config
    history: list[Any]  # `Step` of bcd and linearize, `Epoch` of everything else
    done: bool
    begin: Start  # facts about the start
    start: MaskSet  # before the first step
    masks: MaskSet | None
    weights: dict[str, Tensor] | None = field(repr=False)

    @property
    def kind(self) -> str:
        """The function that made it: "bcd" (also for linearize), "train", "snl", …"""
        return self.config.kind

    @property
    def title(self) -> str:
        """The name of the method."""
        if "epochs" in self.config.settings and self.kind == "bcd":
            return "linearize"
        return TITLES[self.kind]

    @property
    def settings(self) -> dict[str, Any]:
        """What decided the outcome."""
        return self.config.settings

    @property
    def count(self) -> int:
        """ReLUs kept; while masks are being trained, as of the last epoch."""
        if self.masks is not None:
            return self.masks.count()
        counts = [epoch.count for epoch in self.history if epoch.count is not None]
        return counts[-1] if counts else self.start.count()

    @property
    def accuracy(self) -> float | None:
        """The last test accuracy in percent; None if it was not measured."""
        tested = [r.test_accuracy for r in self.history if r.test_accuracy is not None]
        return tested[-1] if tested else None

    @property
    def replacement(self) -> str:
        """What the removed ReLUs are: "identity", "line" or "poly"."""
        return replacement(self.weights or {}, self.config.net.sites)

    @property
    def poly(self) -> tuple[str, ...]:
        """The sites whose removed ReLUs are quadratics."""
        return quadratics(self.weights or {}, self.config.net.sites)

    @cached_property
    def model(self) -> nn.Module:
        """The run's net with its weights and masks, on the CPU, in eval mode."""
        arch = self.config.net.arch
        weights = self.weights or {}
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
        dtypes = [t.dtype for t in weights.values() if t.is_floating_point()]
        net = models.build(**arch).to(dtypes[0] if dtypes else torch.float32)
        return self.fill(net)

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
            hint = ""
            if self.replacement != "identity":
                hint = f" (give a net with replacement={self.replacement!r})"
            raise ValueError(
                f"{self.path} does not fit {type(net).__name__}: {error}{hint}"
            ) from error
        return net.eval()


def load_run(path: str | os.PathLike[str], model: nn.Module | None = None) -> SavedRun:
    """Load a run directory of `bcd`, `train` or a starting point: net, masks, history, config.

    Nets of fastbcd.models are built again: `load_run(path).model`. For another net pass one of
    the same structure as `model`: it is filled with the run's weights and masks, in place. An
    unfinished run is loaded as it is after its last finished step.

    >>> import tempfile
    >>> net = fastbcd.models.resnet20(3, image_size=4, in_channels=1, width=2, blocks=1)
    >>> data = torch.randn(50, 1, 4, 4), torch.arange(50) % 3
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = fastbcd.bcd(net, data, budget=90, drc=30, finetune=None, run_dir=folder)
    ...     run = fastbcd.load_run(folder)
    >>> run.masks.count(), run.history[-1].after, run.config.settings["budget"]
    (90, 90, 90)
    >>> torch.equal(run.model(data[0]), net.eval()(data[0]))
    True
    """
    folder = Path(path)
    if not folder.exists():
        raise FileNotFoundError(f"there is nothing at {folder}; name a run directory")
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; name the run directory it is in")
    state = read_state(folder) if (folder / "config.json").exists() else None
    before = read_start(folder)
    if state is None or before is None:
        raise ValueError(
            f"{folder} holds no run that has begun: a run directory has config.json and "
            f"start.safetensors in it, as `fastbcd bcd --run-dir` writes them"
        )
    run = _saved_run(folder, read_config(folder), state, before)
    if model is not None:
        run.__dict__["model"] = run.fill(model)
    return run


def _saved_run(folder: Path, config: Config, state: State, before: State) -> SavedRun:
    kind: Any = Step if config.kind == "bcd" else Epoch
    history = [decode(kind, record, str(folder)) for record in state.history]
    start = masks_in(before.tensors, config.net.sites, str(folder))
    weights = None
    now = None
    if not history or getattr(history[-1], "phase", "") != "masks":
        weights = {name: state.tensors[name] for name in config.net.tensors}
        now = masks_in(weights, config.net.sites, str(folder))
        added = int((now.bits & ~start.bits).sum())
        if added:  # no method adds a ReLU
            raise ValueError(
                f"{folder} keeps {added:,} ReLUs that its start does not: these states are not of "
                f"one run"
            )
    return SavedRun(
        path=folder,
        config=config,
        history=history,
        done=state.done,
        begin=decode(Start, state.start, str(folder)),
        start=start,
        masks=now,
        weights=weights,
    )


def quadratics(tensors: dict[str, Tensor], sites: Iterable[str]) -> tuple[str, ...]:
    """The sites with three coefficients per channel: their removed ReLUs are quadratics."""
    return tuple(name for name in sites if len(tensors.get(f"{name}.coef", ())) == 3)


def replacement(tensors: dict[str, Tensor], sites: Iterable[str]) -> str:
    """What the removed ReLUs of these sites are: "identity", "line" or "poly"."""
    rows = [len(tensors.get(f"{name}.coef", ())) for name in sites]
    return REPLACEMENT_OF[max(rows, default=0)]

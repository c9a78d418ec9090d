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
from fastbcd.masking.activations import MaskedActivation
from fastbcd.masking.convert import convert
from fastbcd.masking.masks import MaskSet, make_sites
from fastbcd.runs import fingerprint
from fastbcd.runs.config import CONFIG, TITLES, Config, read_config
from fastbcd.runs.directory import read_start, read_state
from fastbcd.runs.step import Epoch, Start, Step, decode
from fastbcd.runtime.dtypes import device_of, dtype_of

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
        return [self.start.count(), *counts][-1]

    @property
    def accuracy(self) -> float | None:
        """The last test accuracy in percent; None if it was not measured."""
        if self.config.test is None:
            return None
        for record in reversed(self.history):
            if getattr(record, "phase", "") == "final":
                return record.accuracy["final"]
            if record.test_accuracy is not None:
                return record.test_accuracy
        return None

    @property
    def replacement(self) -> str:
        """What the removed ReLUs are: "identity", "line" or "poly"."""
        return replacement(self.weights or {}, self.config.net.sites)

    @property
    def poly(self) -> tuple[str, ...]:
        """The sites whose removed ReLUs are quadratics."""
        return self._sites_with(3)

    @property
    def line(self) -> tuple[str, ...]:
        """The sites whose removed ReLUs are lines."""
        return self._sites_with(2)

    def _sites_with(self, count: int) -> tuple[str, ...]:
        rows = coefficients(self.weights or {}, self.config.net.sites)
        return tuple(name for name, row in rows.items() if row == count)

    @cached_property
    def model(self) -> nn.Module:
        """The run's net with its weights and masks, on the CPU, in eval mode."""
        arch = self.config.net.arch or {}
        if "name" not in arch:
            raise ValueError(
                f"{self.path} is a run of {arch.get('model', 'a net of its own')}, which cannot be "
                f"built from the run alone: build it as for the run and pass it, "
                f"load_run(path, model=net), or on the command line --model MODULE:FUNCTION"
            )
        weights = self.final_weights
        try:
            self._check_numbers(arch)
            # First without memory, as the record may be wrong.
            with torch.device("meta"):
                fingerprint.check_fits(models.build(**arch), weights)
        except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
            raise ValueError(
                f"{self.path}: the recorded net {arch} does not fit: {error}"
            ) from error
        dtypes = [t.dtype for t in weights.values() if t.is_floating_point()]
        return self.fill(models.build(**arch).to(dtypes[0]))

    def fill(self, net: nn.Module) -> nn.Module:
        """The net, or a converted copy of one without masks, with the run's weights and masks.

        It is in eval mode.
        """
        weights = self.final_weights
        try:
            if not any(isinstance(part, MaskedActivation) for part in net.modules()):
                net = self._converted(net)
            fingerprint.restore(net, weights)
        except ValueError as error:
            raise ValueError(
                f"{self.path} does not fit {type(net).__name__}: {error} "
                f"(give a net with replacement={self.replacement!r})"
            ) from error
        return net.eval()

    def _converted(self, model: nn.Module) -> nn.Module:
        """A copy of a model that has no masks, with the replacement of the run."""
        size = (2, *self.config.data.shape)
        example = torch.zeros(size, dtype=dtype_of(model), device=device_of(model))
        return convert(model, example, replacement=self.replacement)

    @property
    def final_weights(self) -> dict[str, Tensor]:
        """The weights; ValueError while masks are being trained."""
        if self.weights is None:
            raise ValueError(
                f"{self.path} has no final net yet: {self.title} is still training masks; let it "
                f"finish"
            )
        return self.weights

    def _check_numbers(self, arch: dict[str, Any]) -> None:
        """Refuse numbers that no net of these weights and images has, before it is built."""
        sizes = [len(self.final_weights), *self.config.data.shape]
        for tensor in self.final_weights.values():
            sizes += tensor.shape
        for name, value in arch.items():
            if isinstance(value, int | float) and not 0 <= value <= max(sizes):
                raise ValueError(f"{name}={value} is out of bounds")


def load_run(path: str | os.PathLike[str], model: nn.Module | None = None) -> SavedRun:
    """Load a run directory of `bcd`, `train` or a starting point: net, masks, history, config.

    Nets of fastbcd.models are built again: `load_run(path).model`. For another net pass the model
    that the run began with, as `model`: a copy is converted with the run's replacement and filled
    with its weights and masks. A net that has masks, such as one that `convert` made with other
    options, is filled in place. An unfinished run is loaded as it is after its last finished step.

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
    run = saved_run(folder)
    if run is None:
        raise ValueError(
            f"{folder} holds no run that has begun: name a run directory; it has config.json and "
            f"start.safetensors in it, as `fastbcd bcd --run-dir` writes them"
        )
    if model is not None:
        run.__dict__["model"] = run.fill(model)
    return run


def run_folders(path: str | os.PathLike[str]) -> list[Path]:
    """The directory of a run; of a folder with the runs of several budgets, theirs.

    The run that began with the most ReLUs is the first.
    """
    folder = Path(path)
    inner = sorted(config.parent for config in folder.glob(f"*/{CONFIG}"))
    if (folder / CONFIG).exists() or not inner:
        return [folder]
    return sorted(inner, key=lambda each: load_run(each).start.count(), reverse=True)


def saved_run(folder: Path) -> SavedRun | None:
    """The run in a folder; None if nothing was saved yet."""
    if not (folder / CONFIG).exists():
        return None
    config = read_config(folder)
    state = read_state(folder)
    before = read_start(folder)
    if state is None or before is None:
        return None
    kind: Any = Step if config.kind == "bcd" else Epoch
    run = SavedRun(
        path=folder,
        config=config,
        history=[decode(kind, record, str(folder)) for record in state.history],
        done=state.done,
        begin=decode(Start, state.start, str(folder)),
        start=_masks_in(before.tensors, config),
        masks=None,
        weights=None,
    )
    last = run.history[-1] if run.history else None
    if getattr(last, "phase", None) != "masks":
        run.weights = {name: state.tensors[name] for name in config.net.tensors}
        run.masks = _masks_in(run.weights, config)
    return run


def _masks_in(tensors: dict[str, Tensor], config: Config) -> MaskSet:
    """The masks among the tensors of a state."""
    shapes = {name: tuple(shape) for name, shape in config.net.sites.items()}
    bits = [tensors[f"{name}.mask".lstrip(".")].flatten().bool() for name in shapes]
    return MaskSet(make_sites(shapes), torch.cat(bits))


def replacement(tensors: dict[str, Tensor], sites: Iterable[str]) -> str:
    """What the removed ReLUs of these sites are: "identity", "line" or "poly"."""
    return REPLACEMENT_OF[max(coefficients(tensors, sites).values(), default=0)]


def coefficients(tensors: dict[str, Tensor], sites: Iterable[str]) -> dict[str, int]:
    """Of each site, how many coefficients per channel it has."""
    return {name: len(tensors.get(f"{name}.coef", ())) for name in sites}

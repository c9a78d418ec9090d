"""load_snl, load_autorep, load_relupruner: official checkpoints as networks ready for `bcd`.

    net = fastbcd.load_snl("snl_best_checkpoint_resnet18_in_cifar100_30000.pth.tar")
    print(net.import_report)          # what was read, what was ignored

A format says where masks lie and what they mean; `load_foreign` reads all of them. Architecture,
width, number of classes and image size are read from the file; those that the caller states are
compared with it. The file is loaded with weights_only=True, and every name and shape is checked.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastbcd.masking.masks import masks
from fastbcd.runtime.settings import Settings, setting, with_settings
from fastbcd.starts.checkpoints import files
from fastbcd.starts.checkpoints.architecture import SiteTensors, build_net, title
from fastbcd.starts.checkpoints.files import State

Path = str | os.PathLike[str]
_log = logging.getLogger("fastbcd")


class Activations:
    """The tensors that belong to activations, by short names; each is checked when it is taken."""

    def __init__(self, tensors: State, path: str) -> None:
        self.tensors = tensors
        self.path = path
        self.left = set(tensors)  # that no site took

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor of this shape, of finite values, in float32."""
        files.check_shape(self.tensors, name, shape, self.path)
        self.left.discard(name)
        return self.tensors[name].float()

    def mask(self, name: str) -> Tensor:
        """A tensor [C, H, W], which may lie as [1, C, H, W]."""
        shape = tuple(self.tensors[name].shape)
        plain = shape[-3:]
        files.require(
            shape in (plain, (1, *plain)) and len(plain) == 3 and 0 not in plain,
            f"{self.path}: {name} has shape {shape}; expected [channels, height, width]",
        )
        return self.take(name, shape).reshape(plain)


@dataclass(frozen=True, kw_only=True)
class ForeignFormat(Settings):
    """A kind of checkpoint, and what the caller knows of the file.

    entries: under which the state_dict lies. activation: a pattern of the names of activations'
    tensors; its group is the name without the prefix of a module that is saved under many.
    mask: the pattern of those that are masks; its group is the site, by name, or by number in
    execution order. renamed: patterns of parts of the names of weights, and what replaces them.
    """

    name: ClassVar[str]
    loader: ClassVar[str]
    entries: ClassVar[tuple[str, ...]] = ("state_dict",)
    activation: ClassVar[str]
    mask: ClassVar[str]
    renamed: ClassVar[dict[str, str]] = {}

    arch: str | None = setting(None, "a name in fastbcd.models that the file must have")
    num_classes: int | None = setting(None, "that the file must have")
    image_size: int | None = setting(None, "the side of images that the file must have")

    def site(self, key: str, mask: Tensor, activations: Activations) -> SiteTensors:
        """The site with this mask [C, H, W] of floats."""
        raise NotImplementedError

    def notes(self, activations: Activations) -> list[str]:
        """What a user should know."""
        return []


@dataclass(frozen=True, kw_only=True)
class SnlFormat(ForeignFormat):
    """y = a·relu(x) + (1-a)·x with alphas [1, C, H, W]."""

    name = "SNL"
    loader = "load_snl"
    activation = r"(.+\.alphas)"
    mask = r"(.+)\.alphas"

    threshold: float = setting(1e-2, "ReLUs with a larger alpha are kept")

    def site(self, key: str, mask: Tensor, activations: Activations) -> SiteTensors:
        return SiteTensors(mask > self.threshold)

    def notes(self, activations: Activations) -> list[str]:
        alphas = activations.tensors.values()
        soft = sum(int(((a != 0) & (a != 1)).sum()) for a in alphas)
        if not soft:
            return []
        return [
            f"{soft:,} alphas are neither 0 nor 1: the file was written before SNL binarised them, "
            f"so fine-tune the net"
        ]


@dataclass(frozen=True, kw_only=True)
class ReluPrunerFormat(ForeignFormat):
    """Masks of 0 and 1 [C, H, W] in execution order, beside the weights."""

    name = "ReLUPruner"
    loader = "load_relupruner"
    entries = ("model", "state_dict")
    activation = r"(masks\[\d+\])"
    mask = r"masks\[(\d+)\]"
    renamed: ClassVar[dict[str, str]] = {
        r"\bconv_sc\.": "shortcut.0.",
        r"\bbn_sc\.": "shortcut.1.",
    }

    def site(self, key: str, mask: Tensor, activations: Activations) -> SiteTensors:
        files.require(
            torch.equal(mask, mask.bool().float()),
            f"{activations.path}: masks[{key}] holds values other than 0 and 1",
        )
        return SiteTensors(mask.bool())


@dataclass(frozen=True, kw_only=True)
class AutoRepFormat(ForeignFormat):
    """One activation, saved under each of its names, with tensors for every site."""

    name = "AutoReP"
    loader = "load_autorep"
    activation = r"(?:.*\.)?((?:alpha_mask|alpha_aux|poly_para)_\d{1,6}_\d{1,6}|bn_\d+\..+|itr_cnt)"
    mask = r"alpha_mask_(\d+)_0"
    renamed: ClassVar[dict[str, str]] = {r"^model\.": ""}

    scale_x2: float | None = setting(
        None,
        "--scale_x2, the factor of the quadratic term: 0.1 unless it was changed (CIFAR), 2 for "
        "Wide-ResNet on Tiny ImageNet. Must be stated",
    )
    clip2: float | None = setting(
        None, "--clip_x2 if --clip_x2_bool was on (1 on Tiny ImageNet)"
    )
    threshold: float = setting(
        3e-3, "--threshold of the hysteresis, as in the published scripts"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale_x2 is None:
            raise ValueError(
                "the factor of quadratic terms is not in the file: pass scale_x2=0.1 (AutoReP's "
                "default), or what --scale_x2 was"
            )

    def site(self, key: str, mask: Tensor, activations: Activations) -> SiteTensors:
        aux = activations.take(f"alpha_aux_{key}_0", tuple(mask.shape))
        bits = torch.where(mask > 0.5, aux > -self.threshold, aux > self.threshold)
        shape = (1, len(mask), 1, 1)
        rows = [activations.take(f"poly_para_{key}_{n}", shape) for n in range(3)]
        coef = torch.stack(rows).view(3, -1)
        if self.clip2 is not None:
            coef[2].clamp_(-self.clip2, self.clip2)
        coef[2] *= self.scale_x2 or 0.0
        return SiteTensors(bits, coef)

    def notes(self, activations: Activations) -> list[str]:
        return [
            "the indicators alpha_aux are dropped: a ReLU that is removed stays removed"
        ]


FORMATS: tuple[type[ForeignFormat], ...] = (SnlFormat, AutoRepFormat, ReluPrunerFormat)


@with_settings(SnlFormat)
def load_snl(path: Path, **settings: Any) -> nn.Module:
    """The net of a checkpoint of SNL, or of BCD's own code: MaskedReLU sites, in eval mode.

    A ReLU is kept where alpha > threshold, as SNL binarises. A file from before that step has soft
    alphas: the net is the binarised one, as the report states. `net.import_report` says what was
    read and ignored.

    >>> net = load_snl("snl_best_checkpoint.pth.tar", image_size=32)  # doctest: +SKIP
    >>> fastbcd.bcd(net, data, budget=15_000)  # doctest: +SKIP
    """
    return load_foreign(path, SnlFormat(**settings))


@with_settings(ReluPrunerFormat)
def load_relupruner(path: Path, **settings: Any) -> nn.Module:
    """The net of a checkpoint of ReLUPruner: MaskedReLU sites, in eval mode; `net.import_report`.

    >>> net = load_relupruner("pruned.pth", arch="resnet18")  # doctest: +SKIP
    >>> fastbcd.bcd(net, data, budget=15_000)  # doctest: +SKIP
    """
    return load_foreign(path, ReluPrunerFormat(**settings))


@with_settings(AutoRepFormat)
def load_autorep(path: Path, **settings: Any) -> nn.Module:
    """The net of a checkpoint of AutoReP: MaskedPoly sites, in eval mode, ready for `bcd`.

    The file does not hold all of AutoReP's settings: those below that begin with -- must be as they
    were in training.

    A ReLU is kept as AutoReP's own forward would have it, in eval mode too:
    m·[aux > -threshold] + (1-m)·[aux > threshold]. aux is dropped then, so that a ReLU that BCD
    removes never comes back. `net.import_report` says what was read and ignored.

    >>> net = load_autorep("checkpoint.pth.tar", scale_x2=0.1)  # doctest: +SKIP
    >>> fastbcd.bcd(net, data, budget=15_000)  # doctest: +SKIP
    """
    return load_foreign(path, AutoRepFormat(**settings))


@dataclass(frozen=True, kw_only=True)
class ImportReport:
    """What an importer read from a file, and what it left out."""

    path: str
    format: str  # "SNL", "AutoReP", "ReLUPruner"
    arch: str
    kept: int
    total: int
    ignored: list[str]  # entries that the net does not use
    notes: list[str]  # what a user should know

    def __str__(self) -> str:
        about = f"{self.path}: {self.format} checkpoint of {self.arch}"
        lines = [f"{about}, {self.kept:,} of {self.total:,} ReLUs kept"]
        lines += [f"  note: {note}" for note in self.notes]
        if self.ignored:
            lines.append(f"  ignored: {files.listed(self.ignored, 12)}")
        return "\n".join(lines)


def load_foreign(path: Path, form: ForeignFormat) -> nn.Module:
    """The net of a checkpoint of this format, with `import_report`."""
    where = str(path)
    content = files.read(path)
    beside = content.pop("masks", None)
    state, ignored = files.state_of(content, where, form.entries)
    if isinstance(beside, list):
        named = {f"masks[{number}]": mask for number, mask in enumerate(beside)}
        state |= files.checked(named, where)
    weights, activations = _separated(state, form, where)
    sites = {}
    for name in activations.tensors:
        if match := re.fullmatch(form.mask, name):
            key = match[1]
            sites[key] = form.site(key, activations.mask(name), activations)
    if not sites:
        raise files.CheckpointError(
            f"{where} has no masks of {form.name}{_advice(state)}"
        )
    expected = {
        key: getattr(form, key) for key in ("arch", "num_classes", "image_size")
    }
    net: Any = build_net(weights, sites, expected, where)
    net.import_report = ImportReport(
        path=where,
        format=form.name,
        arch=title(net),
        kept=masks(net).count(),
        total=masks(net).total,
        ignored=[*ignored, *sorted(activations.left)],
        notes=form.notes(activations),
    )
    _log.info("%s", net.import_report)
    return net


def _separated(
    state: State, form: ForeignFormat, path: str
) -> tuple[State, Activations]:
    """The weights, and the activations' tensors without prefixes and repetitions."""
    weights: State = {}
    tensors: State = {}
    for name, value in state.items():
        match = re.fullmatch(form.activation, name)
        if match is None:
            for pattern, replacement in form.renamed.items():
                name = re.sub(pattern, replacement, name)
            weights[name] = value
            continue
        files.require(
            torch.equal(tensors.setdefault(match[1], value), value),
            f"{path}: {name!r} and another name of {match[1]!r} differ, and {form.name} saves one "
            f"tensor under both; the file is damaged or was edited",
        )
    return weights, Activations(tensors, path)


def _advice(state: State) -> str:
    """What a file without masks of a format is instead."""
    for other in FORMATS:
        if any(re.fullmatch(other.activation, name) for name in state):
            return f": it is a checkpoint of {other.name}, use {other.loader}"
    return (
        f": it holds {files.listed(state, files.SHOWN)}; load a dense net's weights with "
        f"load_state_dict into one of fastbcd.models"
    )

"""load_snl, load_autorep, load_relupruner: official checkpoints as networks ready for `bcd`.

    net = fastbcd.load_snl("snl_best_checkpoint_resnet18_in_cifar100_30000.pth.tar")
    print(net.import_report)          # what was read, what was ignored

A format says where masks lie and what they mean; `load_foreign` reads all of them. Architecture,
width, number of classes and image size are read from the file; those that the caller states are
compared with it. The file is loaded with weights_only=True, and every name and shape is checked.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastbcd.starts.checkpoints import files
from fastbcd.starts.checkpoints.architecture import ImportReport, SiteTensors, build_net
from fastbcd.starts.checkpoints.files import State

Path = str | os.PathLike[str]


def load_snl(
    path: Path,
    *,
    arch: str | None = None,
    num_classes: int | None = None,
    image_size: int | None = None,
    threshold: float = 1e-2,
) -> nn.Module:
    """The net of a checkpoint of SNL, or of BCD's own code: MaskedReLU sites, in eval mode.

    A ReLU is kept where alpha > threshold, as SNL binarises. A file from before that step has soft
    alphas: the net is the binarised one, as the report states. `net.import_report` says what was
    read and ignored.

    >>> net = load_snl("snl_best_checkpoint.pth.tar", image_size=32)  # doctest: +SKIP
    >>> fastbcd.bcd(net, data, budget=15_000)  # doctest: +SKIP
    """
    expected = {"arch": arch, "num_classes": num_classes, "image_size": image_size}
    return load_foreign(path, SnlFormat(threshold), expected)


def load_relupruner(
    path: Path,
    *,
    arch: str | None = None,
    num_classes: int | None = None,
    image_size: int | None = None,
) -> nn.Module:
    """The net of a checkpoint of ReLUPruner: MaskedReLU sites, in eval mode; `net.import_report`.

    >>> net = load_relupruner("pruned.pth", arch="resnet18")  # doctest: +SKIP
    >>> fastbcd.bcd(net, data, budget=15_000)  # doctest: +SKIP
    """
    expected = {"arch": arch, "num_classes": num_classes, "image_size": image_size}
    return load_foreign(path, ReluPrunerFormat(), expected)


def load_autorep(
    path: Path,
    *,
    scale_x2: float | None = None,
    clip2: float | None = None,
    threshold: float = 3e-3,
    arch: str | None = None,
    num_classes: int | None = None,
    image_size: int | None = None,
) -> nn.Module:
    """The net of a checkpoint of AutoReP: MaskedPoly sites, in eval mode, ready for `bcd`.

    The file does not hold all of AutoReP's settings. These must be as they were in training:
        scale_x2: --scale_x2, the factor of the quadratic term: 0.1 unless it was changed (CIFAR),
            2 for Wide-ResNet on Tiny ImageNet.
        clip2: --clip_x2 if --clip_x2_bool was on (1 on Tiny ImageNet), else None.
        threshold: --threshold of the hysteresis; 0.003 in the published scripts.

    A ReLU is kept as AutoReP's own forward would have it, in eval mode too:
    m·[aux > -threshold] + (1-m)·[aux > threshold]. aux is dropped then, so that a ReLU that BCD
    removes never comes back. `net.import_report` says what was read and ignored.

    >>> net = load_autorep("checkpoint.pth.tar", scale_x2=0.1)  # doctest: +SKIP
    >>> fastbcd.bcd(net, data, budget=15_000)  # doctest: +SKIP
    """
    if scale_x2 is None:
        raise ValueError(
            "the factor of quadratic terms is not in the file: pass scale_x2=0.1 (AutoReP's "
            "default), or what --scale_x2 was"
        )
    expected = {"arch": arch, "num_classes": num_classes, "image_size": image_size}
    return load_foreign(path, AutoRepFormat(scale_x2, clip2, threshold), expected)


class Activations:
    """The tensors that belong to activations, by short names; each is checked when it is taken."""

    def __init__(self, tensors: State, path: str) -> None:
        self.tensors = tensors
        self.path = path
        self.left = set(tensors)  # that no site took

    def names(self, pattern: str) -> list[str]:
        """The group of the pattern, in each name that it matches."""
        matches = [re.fullmatch(pattern, name) for name in self.tensors]
        return [match[1] for match in matches if match]

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor of this shape, of finite values, in float32."""
        files.check_shape(self.tensors, name, shape, self.path)
        self.left.discard(name)
        return self.tensors[name].float()

    def mask(self, name: str) -> Tensor:
        """A tensor [C, H, W], which may lie as [1, C, H, W]."""
        files.require(
            name in self.tensors, f"{self.path}: {name} is missing; sites need one each"
        )
        shape = tuple(self.tensors[name].shape)
        plain = shape[-3:]
        files.require(
            shape in (plain, (1, *plain)) and len(plain) == 3 and 0 not in plain,
            f"{self.path}: {name} has shape {shape}; expected [channels, height, width]",
        )
        return self.take(name, shape).reshape(plain)


class ForeignFormat:
    """What is to be known of a kind of checkpoint.

    entries: under which the state_dict lies. activation: a pattern of the names of activations'
    tensors; its group is the name without the prefix of a module that is saved under many.
    renamed: patterns of parts of the names of weights, and what replaces them.
    """

    name: ClassVar[str]
    loader: ClassVar[str]
    entries: ClassVar[tuple[str, ...]] = ("state_dict",)
    activation: ClassVar[str]
    renamed: ClassVar[dict[str, str]] = {}

    def sites(self, activations: Activations) -> dict[str, SiteTensors]:
        """By name, or by number in execution order."""
        raise NotImplementedError

    def notes(self, activations: Activations) -> list[str]:
        """What a user should know."""
        return []


@dataclass(frozen=True)
class SnlFormat(ForeignFormat):
    """y = a·relu(x) + (1-a)·x with alphas [1, C, H, W]."""

    threshold: float

    name = "SNL"
    loader = "load_snl"
    activation = r"(.+\.alphas)"

    def sites(self, activations: Activations) -> dict[str, SiteTensors]:
        sites = {}
        for name in activations.names(r"(.+)\.alphas"):
            alpha = activations.mask(f"{name}.alphas")
            sites[name] = SiteTensors(alpha > self.threshold)
        return sites

    def notes(self, activations: Activations) -> list[str]:
        soft = sum(
            int(((a != 0) & (a != 1)).sum()) for a in activations.tensors.values()
        )
        if not soft:
            return []
        return [
            f"{soft:,} alphas are neither 0 nor 1: the file was written before SNL binarised them, "
            f"so fine-tune the net"
        ]


class ReluPrunerFormat(ForeignFormat):
    """Masks of 0 and 1 [C, H, W] in execution order, beside the weights."""

    name = "ReLUPruner"
    loader = "load_relupruner"
    entries = ("model", "state_dict")
    activation = r"(masks\[\d+\])"
    renamed: ClassVar[dict[str, str]] = {
        r"\bconv_sc\.": "shortcut.0.",
        r"\bbn_sc\.": "shortcut.1.",
    }

    def sites(self, activations: Activations) -> dict[str, SiteTensors]:
        sites = {}
        for number in activations.names(r"masks\[(\d+)\]"):
            mask = activations.mask(f"masks[{number}]")
            files.require(
                bool(((mask == 0) | (mask == 1)).all()),
                f"{activations.path}: masks[{number}] holds values other than 0 and 1",
            )
            sites[number] = SiteTensors(mask.bool())
        return sites


@dataclass(frozen=True)
class AutoRepFormat(ForeignFormat):
    """One activation, saved under each of its names, with tensors for every site."""

    scale_x2: float
    clip2: float | None
    threshold: float

    name = "AutoReP"
    loader = "load_autorep"
    activation = r"(?:.*\.)?((?:alpha_mask|alpha_aux|poly_para)_\d{1,6}_\d{1,6}|bn_\d+\..+|itr_cnt)"
    renamed: ClassVar[dict[str, str]] = {r"^model\.": ""}

    def sites(self, activations: Activations) -> dict[str, SiteTensors]:
        sites = {}
        for number in range(len(activations.names(r"alpha_mask_(\d+)_0"))):
            mask = activations.mask(f"alpha_mask_{number}_0")
            aux = activations.take(f"alpha_aux_{number}_0", tuple(mask.shape))
            bits = torch.where(mask > 0.5, aux > -self.threshold, aux > self.threshold)
            c0, c1, c2 = (
                activations.take(
                    f"poly_para_{number}_{degree}", (1, len(mask), 1, 1)
                ).flatten()
                for degree in range(3)
            )
            if self.clip2 is not None:
                c2 = c2.clamp(-self.clip2, self.clip2)
            sites[str(number)] = SiteTensors(
                bits, torch.stack([c0, c1, self.scale_x2 * c2])
            )
        return sites

    def notes(self, activations: Activations) -> list[str]:
        return [
            "the indicators alpha_aux are dropped: a ReLU that is removed stays removed"
        ]


FORMATS: tuple[type[ForeignFormat], ...] = (SnlFormat, AutoRepFormat, ReluPrunerFormat)


def load_foreign(
    path: Path, form: ForeignFormat, expected: dict[str, Any]
) -> nn.Module:
    """The net of a checkpoint of this format; expected: what the caller knows of it, or None."""
    where = str(path)
    content = files.read(path)
    beside = content.pop("masks", None)
    state, ignored = files.state_of(content, where, form.entries)
    if isinstance(beside, list):
        named = {f"masks[{number}]": mask for number, mask in enumerate(beside)}
        state |= files.checked(named, where)
    weights, activations = _separated(state, form, where)
    sites = form.sites(activations)
    if not sites:
        raise files.CheckpointError(
            f"{where} has no masks of {form.name}{_advice(state)}"
        )
    report = ImportReport(where, form.name)
    report.ignored = [*ignored, *sorted(activations.left)]
    report.notes = form.notes(activations)
    return build_net(report, weights, sites, expected)


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

"""load_snl, load_autorep, load_relupruner: official checkpoints as networks ready for `bcd`.

    net = fastbcd.load_snl("snl_best_checkpoint_resnet18_in_cifar100_30000.pth.tar")
    print(net.import_report)          # what was read, what was ignored

Each format is a description; `load_foreign` reads all of them. Architecture, width, number of
classes and image size are read from the file; those that the caller states are compared with it.
The file is loaded with weights_only=True, and every name and shape is checked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastbcd.starts.checkpoints import files
from fastbcd.starts.checkpoints.architecture import ImportReport, SiteTensors, build_net
from fastbcd.starts.checkpoints.files import State

REFRESHED = 508  # iterations in which AutoReP refreshes coefficients; itr_cnt stops there
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
    scale_x1: float = 1.0,
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
        scale_x1: --scale_x1, the factor of the linear term of degree 1.
        threshold: --threshold of the hysteresis; 0.003 in the published scripts.

    A ReLU is kept as AutoReP's own forward would have it, in eval mode too:
    m·[aux > -threshold] + (1-m)·[aux > threshold]. aux is dropped then, so that a ReLU that BCD
    removes never comes back. `net.import_report` says what was read and ignored.

    >>> net = load_autorep("checkpoint.pth.tar", scale_x2=0.1)  # doctest: +SKIP
    >>> fastbcd.bcd(net, data, budget=15_000)  # doctest: +SKIP
    """
    expected = {"arch": arch, "num_classes": num_classes, "image_size": image_size}
    return load_foreign(path, AutoRepFormat(scale_x2, clip2, scale_x1, threshold), expected)


class ForeignFormat:
    """What is to be known of a kind of checkpoint; {} stands for a site's name or number.

    entries: under which the state_dict lies. mask_entries: under which masks lie beside it.
    activation: a pattern of the names that belong to activations; its group is the name without
    the prefix of a module that is saved under many. mask, maps, terms: the names of a site's mask,
    of other tensors of its shape, and of its coefficients [1, C, 1, 1] by degree. renamed: patterns
    of parts of the names of weights, and what replaces them. refused: a pattern of names that no
    net here has, and why.
    """

    name: ClassVar[str]
    loader: ClassVar[str]
    entries: ClassVar[tuple[str, ...]] = ("state_dict",)
    mask_entries: ClassVar[tuple[str, ...]] = ()
    activation: ClassVar[str]
    mask: ClassVar[str]
    maps: ClassVar[tuple[str, ...]] = ()
    terms: ClassVar[tuple[str, ...]] = ()
    renamed: ClassVar[dict[str, str]] = {}
    refused: ClassVar[tuple[str, str] | None] = None

    def bits(self, mask: Tensor, *maps: Tensor) -> Tensor:
        """Where a ReLU is kept."""
        raise NotImplementedError

    def coefficients(self, terms: Sequence[Tensor]) -> Tensor | None:
        """c0, c1 and c2, [3, C], from the site's own coefficients by degree."""
        return None

    def notes(self, activations: State) -> list[str]:
        """What a user should know of the tensors of the activations."""
        return []


@dataclass(frozen=True)
class SnlFormat(ForeignFormat):
    """y = a·relu(x) + (1-a)·x with alphas [1, C, H, W]."""

    threshold: float

    name = "SNL"
    loader = "load_snl"
    activation = r"(.+\.alphas)"
    mask = "{}.alphas"
    refused = (
        r"(?:.*\.)?alpha\d?\.(?:beta|gamma)s?(?:\..*)?",
        "a variant of SNL that mixes ReLUs by learned beta and gamma: its activation is not a "
        "masked ReLU and cannot be imported; give a checkpoint with alphas alone",
    )

    def bits(self, mask: Tensor, *maps: Tensor) -> Tensor:
        return mask > self.threshold

    def notes(self, activations: State) -> list[str]:
        soft = sum(int(((a != 0) & (a != 1)).sum()) for a in activations.values())
        if not soft:
            return []
        return [
            f"{soft:,} alphas are neither 0 nor 1: the file was written before SNL binarised them, "
            f"so fine-tune the net"
        ]


@dataclass(frozen=True)
class ReluPrunerFormat(ForeignFormat):
    """Masks of 0 and 1 [C, H, W] in execution order, beside the weights."""

    name = "ReLUPruner"
    loader = "load_relupruner"
    entries = ("model", "state_dict")
    mask_entries = ("masks", "mask_epoch")
    activation = r"(masks\[\d+\])"
    mask = "masks[{}]"
    renamed: ClassVar[dict[str, str]] = {r"\bconv_sc\.": "shortcut.0.", r"\bbn_sc\.": "shortcut.1."}

    def bits(self, mask: Tensor, *maps: Tensor) -> Tensor:
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise ValueError("holds values other than 0 and 1")
        return mask.bool()


@dataclass(frozen=True)
class AutoRepFormat(ForeignFormat):
    """One activation, saved under each of its names, with tensors for every site."""

    scale_x2: float | None
    clip2: float | None
    scale_x1: float
    threshold: float

    name = "AutoReP"
    loader = "load_autorep"
    activation = r"(?:.*\.)?((?:alpha_mask|alpha_aux|poly_para)_\d{1,6}_\d{1,6}|bn_\d+\..+|itr_cnt)"
    mask = "alpha_mask_{}_0"
    maps = ("alpha_aux_{}_0",)
    terms = ("poly_para_{}_0", "poly_para_{}_1", "poly_para_{}_2")
    renamed: ClassVar[dict[str, str]] = {r"^model\.": ""}

    def bits(self, mask: Tensor, *maps: Tensor) -> Tensor:
        (aux,) = maps
        return torch.where(mask > 0.5, aux > -self.threshold, aux > self.threshold)

    def coefficients(self, terms: Sequence[Tensor]) -> Tensor | None:
        """s2·c2·x² + c1·x + c0, or s1·c1·x + c0."""
        if len(terms) < 2:
            raise ValueError(
                "has no poly_para_…_1: it was not trained with a polynomial activation (--act_type "
                "ReLU_masked_dapa_relay or ReLU_masked_autopoly_relay)"
            )
        c0, c1, *quadratic = (term.flatten() for term in terms)
        if not quadratic:
            return torch.stack([c0, self.scale_x1 * c1, torch.zeros_like(c0)])
        if self.scale_x2 is None:
            raise ValueError(
                "has quadratic terms, and their factor is not in the file: pass scale_x2=0.1 "
                "(AutoReP's default), or what --scale_x2 was"
            )
        c2 = quadratic[0]
        if self.clip2 is not None:
            c2 = c2.clamp(-self.clip2, self.clip2)
        return torch.stack([c0, c1, self.scale_x2 * c2])

    def notes(self, activations: State) -> list[str]:
        notes = ["the indicators alpha_aux are dropped: a ReLU that is removed stays removed"]
        iteration = activations.get("itr_cnt")
        if iteration is not None and iteration.numel() == 1 and float(iteration) < REFRESHED:
            notes.append(
                f"written at iteration {float(iteration):.0f}, while AutoReP still refreshes its "
                f"coefficients (the first {REFRESHED}): those of the file are used"
            )
        return notes


FORMATS: tuple[type[ForeignFormat], ...] = (SnlFormat, AutoRepFormat, ReluPrunerFormat)


def load_foreign(path: Path, form: ForeignFormat, expected: dict[str, Any]) -> nn.Module:
    """The net of a checkpoint of this format; expected: what the caller knows of it, or None."""
    where = str(path)
    content = files.read(path)
    state, ignored = files.state_of(content, where, form.entries)
    for entry in form.mask_entries:
        state |= _numbered(content.get(entry), form.mask, where)
    weights, activations = _separated(state, form, where)
    names = _site_names(activations, form)
    if not names:
        raise files.CheckpointError(f"{where} has no masks of {form.name}{_advice(state, form)}")
    terms = _terms(activations, names, form)
    sites = {}
    used: set[str] = set()
    for name in names:
        shapes = _shapes(activations, name, terms, form, where)
        for tensor, shape in shapes.items():
            files.check_shape(activations, tensor, shape, where)
        used |= shapes.keys()
        sites[name] = _site([activations[tensor] for tensor in shapes], form, f"{where}: {name}")
    ignored = [name for name in ignored if name not in form.mask_entries]
    ignored += sorted(activations.keys() - used)
    report = ImportReport(where, form.name, ignored=ignored, notes=form.notes(activations))
    return build_net(report, weights, sites, expected)


def _numbered(masks: Any, name: str, path: str) -> State:
    """The tensors of a list, or of a dictionary by number, each with a name."""
    if isinstance(masks, Mapping):
        masks = [masks[key] for key in sorted(masks, key=lambda key: (len(str(key)), str(key)))]
    if not isinstance(masks, list) or not all(isinstance(mask, Tensor) for mask in masks):
        return {}
    named = {name.format(number): mask for number, mask in enumerate(masks)}
    for key, mask in named.items():
        files.check_tensor(mask, key, path)
    return named


def _separated(state: State, form: ForeignFormat, path: str) -> tuple[State, State]:
    """The weights, and the activations' tensors without prefixes and repetitions."""
    weights: State = {}
    activations: State = {}
    first: dict[str, str] = {}
    for name, value in state.items():
        if form.refused and re.fullmatch(form.refused[0], name):
            raise files.CheckpointError(f"{path} has {name}, so it comes from {form.refused[1]}")
        match = re.fullmatch(form.activation, name)
        if match is None:
            weights[_renamed(name, form.renamed)] = value
            continue
        short = match[1]
        same = torch.equal(activations.setdefault(short, value), value)
        files.require(
            same or name == first.get(short, name),
            f"{path}: {first.get(short)!r} and {name!r} differ, and {form.name} saves one tensor "
            f"under both names; the file is damaged or was edited",
        )
        first.setdefault(short, name)
    return weights, activations


def _renamed(name: str, parts: Mapping[str, str]) -> str:
    for pattern, replacement in parts.items():
        name = re.sub(pattern, replacement, name)
    return name


def _site_names(activations: State, form: ForeignFormat) -> list[str]:
    """Names of the sites that have a mask; 0, 1, 2, … if they are numbers."""
    pattern = re.escape(form.mask).replace(r"\{\}", "(.+)")
    matches = [re.fullmatch(pattern, name) for name in activations]
    names = [match[1] for match in matches if match]
    if all(name.isdecimal() for name in names):
        return [str(number) for number in range(len(names))]
    return names


def _advice(state: State, form: ForeignFormat) -> str:
    """What a file without masks of this format is instead."""
    for other in FORMATS:
        if other.name != form.name and any(re.fullmatch(other.activation, name) for name in state):
            return f": it is a checkpoint of {other.name}, use {other.loader}"
    return (
        f": it holds {files.listed(state, files.SHOWN)}; load a dense net's weights with "
        f"load_state_dict into one of fastbcd.models"
    )


def _terms(activations: State, sites: list[str], form: ForeignFormat) -> tuple[str, ...]:
    """The names of the coefficients up to the highest degree that any site has."""
    degrees = [
        degree
        for degree, name in enumerate(form.terms)
        if any(name.format(site) in activations for site in sites)
    ]
    return form.terms[: max(degrees, default=-1) + 1]


def _shapes(
    activations: State, site: str, terms: tuple[str, ...], form: ForeignFormat, path: str
) -> dict[str, tuple[int, ...]]:
    """The names of the tensors of a site, and their shapes: its mask, maps and coefficients."""
    name = form.mask.format(site)
    files.require(name in activations, f"{path}: {name} is missing; expected one for every site")
    shape = tuple(activations[name].shape)
    plain = shape[-3:]
    files.require(
        shape in (plain, (1, *plain)) and len(plain) == 3 and 0 not in plain,
        f"{path}: {name} has shape {shape}; expected [channels, height, width]",
    )
    shapes = {name: shape}
    for map_name in form.maps:
        shapes[map_name.format(site)] = plain
    for term in terms:
        shapes[term.format(site)] = (1, plain[0], 1, 1)
    return shapes


def _site(tensors: list[Tensor], form: ForeignFormat, where: str) -> SiteTensors:
    """A site from its mask, its maps and its coefficients."""
    mask = tensors[0].float()
    maps = [tensor.float() for tensor in tensors[1 : 1 + len(form.maps)]]
    terms = [tensor.float() for tensor in tensors[1 + len(form.maps) :]]
    try:
        bits = form.bits(mask, *maps)
        coef = form.coefficients(terms)
    except ValueError as error:
        raise files.CheckpointError(f"{where} {error}") from error
    return SiteTensors(bits.reshape(mask.shape[-3:]), coef)

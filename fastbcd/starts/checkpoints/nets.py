"""From the tensors of a foreign checkpoint to a net: built, checked, filled and reported."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastbcd import models
from fastbcd.masking.masks import mask_modules
from fastbcd.starts.checkpoints.architecture import recognise
from fastbcd.starts.checkpoints.files import (
    CheckpointError,
    ImportReport,
    State,
    load_weights,
)

_log = logging.getLogger("fastbcd")


class Expected(NamedTuple):
    """What the caller says about the file; None: whatever the file says."""

    arch: str | None
    num_classes: int | None
    image_size: int | None


def make_net(
    path: str,
    weights: State,
    shapes: list[tuple[int, ...]],
    replacement: str,
    expected: Expected,
    extra: bool | None = None,
) -> tuple[nn.Module, str]:
    """The net for these weights and for masks of these shapes, and its description.

    It has random weights and all ReLUs yet: `fill` is the second half, after the masks are found.
    extra: has it the ReLU that the published net leaves out? None: the number of masks tells.
    """
    arch = recognise(weights, path)
    _check(expected, path, "arch", arch.name, "say so, or leave arch out", models.NAMES)
    _check(expected, path, "num_classes", arch.num_classes, "it was trained on other data")
    if not shapes or any(len(shape) != 3 for shape in shapes):
        raise CheckpointError(
            f"{path} has masks of shapes {sorted(set(shapes))[:4]}; expected one of "
            f"[channels, height, width] for each site"
        )
    side = max(shape[2] for shape in shapes)  # the first site has the image's size
    _check(expected, path, "image_size", side, "masks belong to one image size")
    if extra is None:
        with torch.device("meta"):
            sites = len(mask_modules(arch.build(side, False, replacement)))
        extra = bool(arch.extra) and len(shapes) == sites + 1
        if len(shapes) != sites + extra:
            raise CheckpointError(
                f"{path} has {len(shapes)} masks, but {arch.name} has {sites} sites of ReLUs: "
                f"masks are {'missing' if len(shapes) < sites else 'left over'}"
            )
    return arch.build(side, extra, replacement), arch.describe(extra)


def _check(
    expected: Expected,
    path: str,
    name: str,
    found: object,
    hint: str,
    choices: tuple[str, ...] = (),
) -> None:
    """Refuse a file that is not what the caller says it is."""
    wanted = getattr(expected, name)
    if choices and wanted is not None and wanted not in choices:
        raise ValueError(f"{name}={wanted!r}; choose from {', '.join(choices)}, or leave it out")
    if wanted is not None and wanted != found:
        raise CheckpointError(f"{path} has {name}={found!r}, expected {wanted!r}; {hint}")


def fill(net: nn.Module, weights: State, bits: list[Tensor], report: ImportReport) -> nn.Module:
    """Write weights and masks, bits [*shape] of each site, into the net; put it in eval mode."""
    load_weights(net, weights, report.path)
    for mask, (site, module) in zip(bits, mask_modules(net).items(), strict=True):
        if mask.shape != module.mask.shape:
            raise CheckpointError(
                f"{report.path}: the mask of {site} has shape {tuple(mask.shape)}, expected "
                f"{tuple(module.mask.shape)}"
            )
        module.mask.copy_(mask)
    report.total = sum(mask.numel() for mask in bits)
    report.kept = sum(int(mask.sum()) for mask in bits)
    net.import_report = report  # type: ignore[assignment]
    _log.info("%s", report)
    return net.eval()

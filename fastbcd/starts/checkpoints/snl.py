"""Official checkpoints of SNL, AutoReP and ReLUPruner as nets that are ready for `bcd`.

    net = fastbcd.load_snl("snl_best_checkpoint_resnet18_in_cifar100_30000.pth.tar")
    print(net.import_report)          # what was found, what was ignored

Architecture, width, number of classes and image size are read from the file; those that are
given are compared with it. Files are loaded with weights_only=True, every name and shape is
checked, and what a file holds beyond the net (an optimizer, say) is listed in the report.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from fastbcd.masking.masks import mask_modules
from fastbcd.starts.checkpoints.autorep import load_autorep
from fastbcd.starts.checkpoints.files import (
    CheckpointError,
    ImportReport,
    State,
    listed,
    read,
    state_of,
)
from fastbcd.starts.checkpoints.nets import Expected, fill, make_net

__all__ = ["CheckpointError", "ImportReport", "load_autorep", "load_relupruner", "load_snl"]


def load_snl(
    path: str | os.PathLike[str],
    *,
    arch: str | None = None,
    num_classes: int | None = None,
    image_size: int | None = None,
    threshold: float = 1e-2,
) -> nn.Module:
    """The net of a checkpoint of SNL, or of BCD's own code, a fork of it: MaskedReLU sites.

    A ReLU is kept where alpha > threshold, as SNL binarises. While alphas are still soft (a file
    from before that step), the net is the binarised one; the report says so.
    `net.import_report` says what was found and ignored.

    >>> net = load_snl("snl_best_checkpoint.pth.tar", image_size=32)  # doctest: +SKIP
    >>> fastbcd.bcd(net, data, budget=15_000)  # doctest: +SKIP
    """
    where = str(path)
    state, ignored = state_of(read(path), where, ("state_dict",))
    _refuse_variants(state, where)
    alphas = {k.removesuffix(".alphas"): v for k, v in state.items() if k.endswith(".alphas")}
    weights = {k: v for k, v in state.items() if not k.endswith(".alphas")}
    shapes = [tuple(a.shape[1:]) for a in alphas.values()]
    expected = Expected(arch, num_classes, image_size)
    net, described = make_net(where, weights, shapes, "identity", expected, extra="alpha" in alphas)
    sites = mask_modules(net).keys()
    for what, names in (("misses the masks", sites - alphas), ("has extra masks", alphas - sites)):
        if names:
            raise CheckpointError(
                f"{where} {what} {listed(sorted(f'{name}.alphas' for name in names), 4)} of "
                f"{described}"
            )
    report = ImportReport(where, "SNL", described, ignored=ignored)
    for name, alpha in alphas.items():
        if alpha.shape[0] != 1 or not bool(alpha.isfinite().all()):
            raise CheckpointError(
                f"{where}: {name}.alphas has shape {tuple(alpha.shape)} or values that are not "
                f"finite; expected (1, channels, height, width)"
            )
    soft = sum(int(((a != 0) & (a != 1)).sum()) for a in alphas.values())
    if soft:
        report.notes.append(
            f"{soft:,} alphas are neither 0 nor 1: the file was written before SNL binarised them, "
            f"so fine-tune the net"
        )
    return fill(net, weights, [alphas[site][0] > threshold for site in sites], report)


def load_relupruner(
    path: str | os.PathLike[str],
    *,
    arch: str | None = None,
    num_classes: int | None = None,
    image_size: int | None = None,
) -> nn.Module:
    """The net of a checkpoint of ReLUPruner, with its list of masks: MaskedReLU sites.

    `net.import_report` says what was found and ignored.

    >>> net = load_relupruner("pruned.pth", arch="resnet18")  # doctest: +SKIP
    >>> fastbcd.bcd(net, data, budget=15_000)  # doctest: +SKIP
    """
    where = str(path)
    content = read(path)
    state, ignored = state_of(content, where, ("model", "state_dict"))
    masks = _mask_list(content, where)
    weights = {
        name.replace("conv_sc.", "shortcut.0.").replace("bn_sc.", "shortcut.1."): value
        for name, value in state.items()
    }
    shapes = [tuple(mask.shape) for mask in masks]
    expected = Expected(arch, num_classes, image_size)
    net, described = make_net(where, weights, shapes, "identity", expected)
    ignored = [name for name in ignored if name not in ("masks", "mask_epoch")]
    report = ImportReport(where, "ReLUPruner", described, ignored=ignored)
    return fill(net, weights, [mask.bool() for mask in masks], report)


def _refuse_variants(state: State, path: str) -> None:
    """Files that hold no SNL masks, each with what to do instead."""
    learned = [k for k in state if re.search(r"(^|\.)alpha\d?\.(beta|gamma)s?(\.|$)", k)]
    if learned:
        raise CheckpointError(
            f"{path} comes from a variant of SNL that mixes ReLUs by learned beta and gamma "
            f"({listed(learned, 2)}): its activation is not a masked ReLU and cannot be imported; "
            f"give a checkpoint with alphas alone"
        )
    if not any(k.endswith(".alphas") for k in state):
        raise CheckpointError(
            f"{path} is an AutoReP checkpoint: use load_autorep"
            if any("alpha_mask_" in k for k in state)
            else f"{path} has no alphas, so no masks of SNL; load a dense net's weights with "
            f"load_state_dict into one of fastbcd.models"
        )


def _mask_list(content: dict[str, Any], path: str) -> list[Tensor]:
    """ReLUPruner's masks [C,H,W] in execution order: a list, or (older files) a dictionary."""
    found = content.get("masks", content.get("mask_epoch"))
    if isinstance(found, Mapping):
        found = [found[key] for key in sorted(found)]
    if not isinstance(found, list) or not all(isinstance(m, Tensor) for m in found):
        raise CheckpointError(
            f"{path} has no list of masks: it holds {listed(map(str, content), 8)}; a pruned net "
            f"of ReLUPruner has 'masks'"
        )
    masks = [m[0] if m.ndim == 4 and m.shape[0] == 1 else m for m in found]
    for i, mask in enumerate(masks):
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise CheckpointError(f"{path}: mask {i} holds values other than 0 and 1")
    return masks

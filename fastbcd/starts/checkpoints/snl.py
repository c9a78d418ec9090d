"""Checkpoints of SNL, and of BCD's own code, a fork of it.

    net = fastbcd.load_snl("snl_best_checkpoint_resnet18_in_cifar100_30000.pth.tar")
    print(net.import_report)          # what was found, what was ignored

Architecture, width, number of classes and image size are read from the file; those that are
given are compared with it. The file is loaded with weights_only=True, and every name and shape is
checked.
"""

from __future__ import annotations

import os
import re

from torch import nn

from fastbcd.starts.checkpoints.architecture import Expected, import_net
from fastbcd.starts.checkpoints.files import (
    CheckpointError,
    ImportReport,
    State,
    listed,
    read,
    state_of,
)


def load_snl(
    path: str | os.PathLike[str], *, arch: str | None = None, num_classes: int | None = None,
    image_size: int | None = None, threshold: float = 1e-2,
) -> nn.Module:  # fmt: skip
    """The net of a checkpoint of SNL or BCD: MaskedReLU sites, in eval mode, ready for `bcd`.

    A ReLU is kept where alpha > threshold, as SNL binarises. A file from before that step has soft
    alphas: the net is the binarised one, as the report states. `net.import_report` says what was
    found and ignored.

    >>> net = load_snl("snl_best_checkpoint.pth.tar", image_size=32)  # doctest: +SKIP
    >>> fastbcd.bcd(net, data, budget=15_000)  # doctest: +SKIP
    """
    where = str(path)
    state, ignored = state_of(read(path), where, ("state_dict",))
    _refuse_variants(state, where)
    alphas = {k.removesuffix(".alphas"): v for k, v in state.items() if k.endswith(".alphas")}
    for name, alpha in alphas.items():
        if alpha.ndim != 4 or alpha.shape[0] != 1 or not bool(alpha.isfinite().all()):
            raise CheckpointError(
                f"{where}: {name}.alphas has shape {tuple(alpha.shape)} or values that are not "
                f"finite; expected (1, channels, height, width)"
            )
    report = ImportReport(where, "SNL", ignored=ignored)
    soft = sum(int(((a != 0) & (a != 1)).sum()) for a in alphas.values())
    if soft:
        report.notes.append(
            f"{soft:,} alphas are neither 0 nor 1: the file was written before SNL binarised them, "
            f"so fine-tune the net"
        )
    weights = {k: v for k, v in state.items() if not k.endswith(".alphas")}
    bits = {site: alpha[0] > threshold for site, alpha in alphas.items()}
    return import_net(report, weights, bits, expected=Expected(arch, num_classes, image_size))


def _refuse_variants(state: State, path: str) -> None:
    """Refuse files without SNL's masks, and say what to do instead."""
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

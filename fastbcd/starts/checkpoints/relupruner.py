"""Checkpoints of ReLUPruner."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from fastbcd.starts.checkpoints.architecture import Expected, import_net
from fastbcd.starts.checkpoints.files import (
    CheckpointError,
    ImportReport,
    check_tensor,
    listed,
    read,
    state_of,
)


def load_relupruner(
    path: str | os.PathLike[str], *, arch: str | None = None, num_classes: int | None = None,
    image_size: int | None = None,
) -> nn.Module:  # fmt: skip
    """The net of a checkpoint of ReLUPruner: MaskedReLU sites, in eval mode, ready for `bcd`.

    `net.import_report` says what was found and ignored.

    >>> net = load_relupruner("pruned.pth", arch="resnet18")  # doctest: +SKIP
    >>> fastbcd.bcd(net, data, budget=15_000)  # doctest: +SKIP
    """
    where = str(path)
    content = read(path)
    state, ignored = state_of(content, where, ("model", "state_dict"))
    weights = {
        name.replace("conv_sc.", "shortcut.0.").replace("bn_sc.", "shortcut.1."): value
        for name, value in state.items()
    }
    ignored = [name for name in ignored if name not in ("masks", "mask_epoch")]
    report = ImportReport(where, "ReLUPruner", ignored=ignored)
    bits = _bits(content, where)
    return import_net(report, weights, bits, expected=Expected(arch, num_classes, image_size))


def _bits(content: dict[str, Any], path: str) -> list[Tensor]:
    """The masks [C,H,W] in execution order: a list, or (older files) a dictionary."""
    found = content.get("masks", content.get("mask_epoch"))
    if isinstance(found, Mapping):  # by number
        found = [found[key] for key in sorted(found, key=lambda k: (len(str(k)), str(k)))]
    if not isinstance(found, list) or not all(isinstance(m, Tensor) for m in found):
        raise CheckpointError(
            f"{path} has no list of masks: it holds {listed(map(str, content), 8)}; a pruned net "
            f"of ReLUPruner has 'masks'"
        )
    for i, mask in enumerate(found):
        check_tensor(mask, f"mask {i}", path)
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise CheckpointError(f"{path}: mask {i} holds values other than 0 and 1")
    return [(m[0] if m.ndim == 4 and m.shape[0] == 1 else m).bool() for m in found]

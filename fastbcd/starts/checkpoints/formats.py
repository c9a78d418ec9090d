"""load_snl, load_autorep, load_relupruner: official checkpoints as networks ready for `bcd`.

    net = fastbcd.load_snl("snl_best_checkpoint_resnet18_in_cifar100_30000.pth.tar")
    print(net.import_report)          # what was found, what was ignored

Architecture, width, number of classes and image size are read from the file; those that are
given are compared with it. The file is loaded with weights_only=True, and every name and shape is
checked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fastbcd.starts.checkpoints import files
from fastbcd.starts.checkpoints.architecture import import_net

_SHARED = re.compile(r"(?:(.*)\.)?((?:alpha_mask|alpha_aux|poly_para)_\d+_\d+|bn_\d+\..+|itr_cnt)$")
_REFRESHED = 508  # iterations in which AutoReP refreshes coefficients; itr_cnt stops there


def load_snl(
    path: str | os.PathLike[str], *, arch: str | None = None, num_classes: int | None = None,
    image_size: int | None = None, threshold: float = 1e-2,
) -> nn.Module:  # fmt: skip
    """The net of a checkpoint of SNL, or of BCD's own code: MaskedReLU sites, in eval mode.

    A ReLU is kept where alpha > threshold, as SNL binarises. A file from before that step has soft
    alphas: the net is the binarised one, as the report states. `net.import_report` says what was
    found and ignored.

    >>> net = load_snl("snl_best_checkpoint.pth.tar", image_size=32)  # doctest: +SKIP
    >>> fastbcd.bcd(net, data, budget=15_000)  # doctest: +SKIP
    """
    where = str(path)
    state, ignored = files.state_of(files.read(path), where, ("state_dict",))
    learned = [k for k in state if re.search(r"(^|\.)alpha\d?\.(beta|gamma)s?(\.|$)", k)]
    files.require(
        not learned,
        f"{where} comes from a variant of SNL that mixes ReLUs by learned beta and gamma "
        f"({files.listed(learned, 2)}): its activation is not a masked ReLU and cannot be "
        f"imported; give a checkpoint with alphas alone",
    )
    alphas = {k.removesuffix(".alphas"): v for k, v in state.items() if k.endswith(".alphas")}
    files.require(
        bool(alphas),
        f"{where} is an AutoReP checkpoint: use load_autorep"
        if any("alpha_mask_" in k for k in state)
        else f"{where} has no alphas, so no masks of SNL; load a dense net's weights with "
        f"load_state_dict into one of fastbcd.models",
    )
    for name, alpha in alphas.items():
        files.require(
            alpha.ndim == 4 and alpha.shape[0] == 1 and bool(alpha.isfinite().all()),
            f"{where}: {name}.alphas has shape {tuple(alpha.shape)} or values that are not finite; "
            f"expected (1, channels, height, width)",
        )
    soft = sum(int(((a != 0) & (a != 1)).sum()) for a in alphas.values())
    note = f"{soft:,} alphas are neither 0 nor 1: the file was written before SNL binarised them, "
    notes = [note + "so fine-tune the net"] if soft else []
    report = files.ImportReport(where, "SNL", ignored=ignored, notes=notes)
    weights = {k: v for k, v in state.items() if not k.endswith(".alphas")}
    bits = {site: alpha[0] > threshold for site, alpha in alphas.items()}
    expected = {"arch": arch, "num_classes": num_classes, "image_size": image_size}
    return import_net(report, weights, bits, expected=expected)


def load_relupruner(
    path: str | os.PathLike[str], *, arch: str | None = None, num_classes: int | None = None,
    image_size: int | None = None,
) -> nn.Module:  # fmt: skip
    """The net of a checkpoint of ReLUPruner: MaskedReLU sites, in eval mode; `net.import_report`.

    >>> net = load_relupruner("pruned.pth", arch="resnet18")  # doctest: +SKIP
    >>> fastbcd.bcd(net, data, budget=15_000)  # doctest: +SKIP
    """
    where, content = str(path), files.read(path)
    state, ignored = files.state_of(content, where, ("model", "state_dict"))
    weights = {
        name.replace("conv_sc.", "shortcut.0.").replace("bn_sc.", "shortcut.1."): value
        for name, value in state.items()
    }
    # [C,H,W] in execution order: a list, or (older files) a dictionary by number.
    masks: Any = content.get("masks", content.get("mask_epoch"))
    if isinstance(masks, Mapping):
        masks = [masks[key] for key in sorted(masks, key=lambda k: (len(str(k)), str(k)))]
    files.require(
        isinstance(masks, list) and all(isinstance(m, Tensor) for m in masks),
        f"{where} has no list of masks: it holds {files.listed(map(str, content), 8)}; a pruned "
        f"net of ReLUPruner has 'masks'",
    )
    for i, mask in enumerate(masks):
        files.check_tensor(mask, f"mask {i}", where)
        binary = bool(((mask == 0) | (mask == 1)).all())
        files.require(binary, f"{where}: mask {i} holds values other than 0 and 1")
    bits = [(m[0] if m.ndim == 4 and m.shape[0] == 1 else m).bool() for m in masks]
    ignored = [name for name in ignored if name not in ("masks", "mask_epoch")]
    report = files.ImportReport(where, "ReLUPruner", ignored=ignored)
    expected = {"arch": arch, "num_classes": num_classes, "image_size": image_size}
    return import_net(report, weights, bits, expected=expected)


def load_autorep(
    path: str | os.PathLike[str], *, scale_x2: float | None = None, clip2: float | None = None,
    scale_x1: float = 1.0, threshold: float = 3e-3, arch: str | None = None,
    num_classes: int | None = None, image_size: int | None = None,
) -> nn.Module:  # fmt: skip
    """The net of a checkpoint of AutoReP: MaskedPoly sites, in eval mode, ready for `bcd`.

    The file does not hold all of AutoReP's settings. These must be as they were in training:
        scale_x2: --scale_x2, the factor of the quadratic term: 0.1 unless it was changed (CIFAR),
            2 for Wide-ResNet on Tiny ImageNet.
        clip2: --clip_x2 if --clip_x2_bool was on (1 on Tiny ImageNet), else None.
        scale_x1: --scale_x1, the factor of the linear term of degree 1.
        threshold: --threshold of the hysteresis; 0.003 in the published scripts.

    A ReLU is kept as AutoReP's own forward would have it, in eval mode too:
    m·[aux > -threshold] + (1-m)·[aux > threshold]. aux is dropped then, so that a ReLU that BCD
    removes never comes back. `net.import_report` says what was found and ignored.

    >>> net = load_autorep("checkpoint.pth.tar", scale_x2=0.1)  # doctest: +SKIP
    >>> fastbcd.bcd(net, data, budget=15_000)  # doctest: +SKIP
    """
    where = str(path)
    state, ignored = files.state_of(files.read(path), where, ("state_dict",))
    weights, shared = _one_copy({k.removeprefix("model."): v for k, v in state.items()}, where)
    numbers = sorted(int(k.split("_")[2]) for k in shared if re.match(r"alpha_mask_\d{1,6}_0$", k))
    consecutive = numbers == list(range(len(numbers)))
    files.require(consecutive, f"{where} has masks for sites {numbers}; expected 0, 1, 2, …")
    files.require(
        "poly_para_0_1" in shared,
        f"{where} has no poly_para: it was not trained with a polynomial activation "
        f"(--act_type ReLU_masked_dapa_relay or ReLU_masked_autopoly_relay)",
    )
    quadratic = "poly_para_0_2" in shared
    if quadratic and scale_x2 is None:
        raise ValueError(
            f"{where} has quadratic terms, and their factor is not in the file: pass scale_x2=0.1 "
            f"(AutoReP's default), or what --scale_x2 was"
        )
    bits, coef = [], []
    used: set[str] = set()
    for f in numbers:
        first = shared[f"alpha_mask_{f}_0"]
        shapes = {f"alpha_{kind}_{f}_0": tuple(first.shape) for kind in ("mask", "aux")}
        terms = range(3 if quadratic else 2)
        shapes |= {f"poly_para_{f}_{i}": (1, *first.shape[:1], 1, 1) for i in terms}
        for name, shape in shapes.items():
            files.check_shape(shared, name, shape, where)
        used |= shapes.keys()
        mask, aux, *c = (shared[name].float() for name in shapes)
        bits.append(torch.where(mask > 0.5, aux > -threshold, aux > threshold))
        c0, c1, *c2 = (t.flatten() for t in c)
        if scale_x2 is not None and c2:  # s2·c2·x² + c1·x + c0
            last = scale_x2 * (c2[0] if clip2 is None else c2[0].clamp(-clip2, clip2))
        else:  # s1·c1·x + c0
            c1, last = scale_x1 * c1, torch.zeros_like(c0)
        coef.append(torch.stack([c0, c1, last]))
    # Left over: statistics of the initialisation, further masks and terms.
    report = files.ImportReport(where, "AutoReP", ignored=ignored + sorted(shared.keys() - used))
    report.notes = ["the indicators alpha_aux are dropped: a ReLU that is removed stays removed"]
    iteration = shared.get("itr_cnt")
    if iteration is not None and iteration.numel() == 1 and float(iteration) < _REFRESHED:
        report.notes.append(
            f"written at iteration {float(iteration):.0f}, while AutoReP still refreshes its "
            f"coefficients (the first {_REFRESHED}): those of the file are used"
        )
    expected = {"arch": arch, "num_classes": num_classes, "image_size": image_size}
    return import_net(report, weights, bits, coef=coef, expected=expected)


def _one_copy(state: files.State, path: str) -> tuple[files.State, files.State]:
    """The weights, and AutoReP's one activation, which is saved under each of its names.

    Its tensors, for site f in the order of execution: alpha_mask_{f}_0 and alpha_aux_{f}_0
    [C,H,W], poly_para_{f}_{0,1,2} [1,C,1,1], and bn_{f}.*, itr_cnt from the initialisation.
    """
    weights: files.State = {}
    copies: dict[str, files.State] = {}
    for name, value in state.items():
        match = _SHARED.match(name)
        if match:
            copies.setdefault(match[1] or "", {})[match[2]] = value
        else:
            weights[name] = value
    files.require(
        any(key.startswith("alpha_mask_") for copy in copies.values() for key in copy),
        f"{path} is an SNL checkpoint: use load_snl"
        if any(name.endswith(".alphas") for name in weights)
        else f"{path} has no alpha_mask: it holds no masks of AutoReP",
    )
    first, shared = next(iter(copies.items()))
    for alias, copy in copies.items():
        files.require(
            copy.keys() == shared.keys() and all(torch.equal(copy[k], shared[k]) for k in copy),
            f"{path}: the activations {first!r} and {alias!r} differ, and AutoReP has a single "
            f"one under many names; the file is damaged or was edited",
        )
    return weights, shared

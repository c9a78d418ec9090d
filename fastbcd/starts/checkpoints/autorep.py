"""Checkpoints of AutoReP: one activation for all sites, saved under each of its names.

Its tensors, for site f in the order of execution: alpha_mask_{f}_0 and alpha_aux_{f}_0 [C,H,W],
poly_para_{f}_{0,1,2} [1,C,1,1], and bn_{f}.*, itr_cnt from the time of initialisation.
"""

from __future__ import annotations

import os
import re

import torch
from torch import Tensor, nn

from fastbcd.starts.checkpoints.architecture import Expected, import_net
from fastbcd.starts.checkpoints.files import CheckpointError, ImportReport, State, read, state_of

_SHARED = re.compile(r"(?:(.*)\.)?((?:alpha_mask|alpha_aux|poly_para)_\d+_\d+|bn_\d+\..+|itr_cnt)$")
_REFRESHED = 508  # iterations in which AutoReP refreshes coefficients; itr_cnt stops there


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
    state, ignored = state_of(read(path), where, ("state_dict",))
    weights, shared = _one_copy({k.removeprefix("model."): v for k, v in state.items()}, where)
    sites = _sites(shared, where)
    quadratic = "poly_para_0_2" in shared
    if not quadratic:
        scale_x2 = 0.0
    elif scale_x2 is None:
        raise ValueError(
            f"{where} has quadratic terms, and their factor is not in the file: pass scale_x2=0.1 "
            f"(AutoReP's default), or what --scale_x2 was"
        )
    bits, coef = [], []
    for f in range(sites):
        mask = _tensor(shared, f"alpha_mask_{f}_0", None, where)
        aux = _tensor(shared, f"alpha_aux_{f}_0", tuple(mask.shape), where)
        bits.append(torch.where(mask > 0.5, aux > -threshold, aux > threshold))
        wanted = (1, *mask.shape[:1], 1, 1)
        names = [f"poly_para_{f}_{i}" for i in range(3 if quadratic else 2)]
        c = [_tensor(shared, name, wanted, where).flatten() for name in names]
        if quadratic:  # s2·c2·x² + c1·x + c0
            clipped = c[2] if clip2 is None else c[2].clamp(-clip2, clip2)
            c[2] = scale_x2 * clipped
        else:  # s1·c1·x + c0
            c = [c[0], scale_x1 * c[1], torch.zeros_like(c[0])]
        coef.append(torch.stack(c))
    report = ImportReport(where, "AutoReP", ignored=ignored + _unused(shared, quadratic))
    report.notes = ["the indicators alpha_aux are dropped: a ReLU that is removed stays removed"]
    iteration = shared.get("itr_cnt")
    if iteration is not None and iteration.numel() == 1 and float(iteration) < _REFRESHED:
        report.notes.append(
            f"written at iteration {float(iteration):.0f}, while AutoReP still refreshes its "
            f"coefficients (the first {_REFRESHED}): those of the file are used"
        )
    expected = Expected(arch, num_classes, image_size)
    return import_net(report, weights, bits, coef=coef, expected=expected)


def _one_copy(state: State, path: str) -> tuple[State, State]:
    """The weights, and one copy of the activation, which must be the same under all names."""
    weights: State = {}
    copies: dict[str, State] = {}
    for name, value in state.items():
        match = _SHARED.match(name)
        if match:
            copies.setdefault(match[1] or "", {})[match[2]] = value
        else:
            weights[name] = value
    if not any(key.startswith("alpha_mask_") for copy in copies.values() for key in copy):
        snl = any(name.endswith(".alphas") for name in weights)
        raise CheckpointError(
            f"{path} is an SNL checkpoint: use load_snl"
            if snl
            else f"{path} has no alpha_mask: it holds no masks of AutoReP"
        )
    first, shared = next(iter(copies.items()))
    for alias, copy in copies.items():
        if copy.keys() != shared.keys() or any(not torch.equal(copy[k], shared[k]) for k in copy):
            raise CheckpointError(
                f"{path}: the activations {first!r} and {alias!r} differ, and AutoReP has a single "
                f"one under many names; the file is damaged or was edited"
            )
    return weights, shared


def _sites(shared: State, path: str) -> int:
    """How many sites the activation serves: f = 0 .. n-1."""
    numbers = sorted(int(k.split("_")[2]) for k in shared if re.match(r"alpha_mask_\d{1,6}_0$", k))
    if numbers != list(range(len(numbers))):
        raise CheckpointError(f"{path} has masks for sites {numbers}; expected 0, 1, 2, …")
    if "poly_para_0_1" not in shared:
        raise CheckpointError(
            f"{path} has no poly_para: it was not trained with a polynomial activation "
            f"(--act_type ReLU_masked_dapa_relay or ReLU_masked_autopoly_relay)"
        )
    return len(numbers)


def _tensor(shared: State, key: str, shape: tuple[int, ...] | None, path: str) -> Tensor:
    """A tensor of the activation in float32, compared with a shape if there is one."""
    value = shared.get(key)
    if value is None or (shape is not None and tuple(value.shape) != shape):
        found = "is missing" if value is None else f"has shape {tuple(value.shape)}"
        raise CheckpointError(f"{path}: {key} {found}; expected shape {shape}")
    if not bool(value.isfinite().all()):
        raise CheckpointError(f"{path}: {key} holds values that are not finite")
    return value.float()


def _unused(shared: State, quadratic: bool) -> list[str]:
    """What the net does not use: statistics of the initialisation, further masks and terms."""
    used = re.compile(rf"alpha_(mask|aux)_\d+_0|poly_para_\d+_[0-{2 if quadratic else 1}]")
    return sorted(key for key in shared if not used.fullmatch(key))

"""Argument checks of the ops: each error names the value, what was expected and the way out."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbcd.kernels.geometry import is_shared
from fastbcd.ops.registry import transformed

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def check_arguments(
    x: Tensor,
    mask: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    residual: Tensor | None,
    trials: bool | None,
) -> bool:
    """Refuse what the ops cannot do; return whether the mask has a trial dimension."""
    if x.dtype not in DTYPES:
        raise TypeError(f"x is {x.dtype}; the masked activations take {_names(DTYPES)}")
    if mask.dtype not in (torch.bool, torch.uint8):
        raise TypeError(f"mask is {mask.dtype}; it must be torch.bool or torch.uint8 (mask.bool())")
    if mask.device != x.device:
        raise ValueError(
            f"mask is on {mask.device} and x on {x.device}; move one: mask.to(x.device)"
        )
    trials = infer_trials(x, mask, trials)
    channels = mask.shape[1 if trials else 0]
    if (scale is None) != (shift is None):
        given, missing = ("scale", "shift") if shift is None else ("shift", "scale")
        raise ValueError(
            f"{given} was given without {missing}; pass both or neither, one value per channel"
        )
    for name, v in (("scale", scale), ("shift", shift)):
        if v is not None:
            check_channelwise(name, v, x, (channels,))
    if residual is not None:
        _check_residual(x, mask, residual, trials)
    return trials


def check_soft(x: Tensor, alpha: Tensor, residual: Tensor | None, name: str = "alpha") -> None:
    """Refuse what the soft activations cannot do; alpha has one number per unit of x."""
    if x.dtype not in DTYPES:
        raise TypeError(f"x is {x.dtype}; the soft activations take {_names(DTYPES)}")
    check_channelwise(name, alpha, x, tuple(x.shape[1:]))
    if residual is not None:
        _check_residual(x, alpha, residual, False)


def infer_trials(x: Tensor, mask: Tensor, trials: bool | None) -> bool:
    """Does mask have a trial dimension? Decided by the shapes if `trials` is None.

    Otherwise only that reading is compared: under torch.compile and torch.export each comparison
    of sizes becomes a condition on the batch.
    """
    if trials is None:
        plain, stacked = _fits(x, mask), _fits_trials(x, mask)
        # A batch of 128 with 128 channels is an everyday size: images are read as images.
        if plain and stacked and x.ndim != 4:
            raise ValueError(
                f"x {_shape(x)} with mask {_shape(mask)} can be read two ways: a batch of "
                f"{x.shape[0]} with one mask, or {x.shape[0]} trials of a batch of {x.shape[1]}; "
                f"pass trials=False or trials=True"
            )
        trials = stacked and not plain
    if not (_fits_trials(x, mask) if trials else _fits(x, mask)):
        wanted = (
            "mask [T, ...] beside x [B, ...] or x [T, B, ...]"
            if trials
            else f"{tuple(x.shape[1:])}, x without its batch dimension (or [T, ...] for T trials)"
        )
        raise ValueError(f"mask has shape {_shape(mask)} and x {_shape(x)}; expected {wanted}")
    return trials


def _fits(x: Tensor, mask: Tensor) -> bool:
    """x [B, *S] and mask [*S]."""
    return mask.ndim >= 1 and mask.shape == x.shape[1:]


def _fits_trials(x: Tensor, mask: Tensor) -> bool:
    """mask [T, *S], and x [B, *S] or [T, B, *S]."""
    if mask.ndim < 2 or x.ndim not in (mask.ndim, mask.ndim + 1):
        return False
    shared = x.ndim == mask.ndim
    return mask.shape[1:] == x.shape[1 if shared else 2 :] and (
        shared or mask.shape[0] == x.shape[0]
    )


def check_channelwise(name: str, v: Tensor, x: Tensor, *shapes: tuple[int, ...]) -> None:
    """Check the shape, dtype and device of a per-channel or per-unit argument."""
    if not _has_shape(v, *shapes):
        wanted = " or ".join(str(s) for s in shapes)
        raise ValueError(f"{name} has shape {_shape(v)}; x {_shape(x)} needs {wanted}")
    if not v.is_floating_point():
        raise TypeError(f"{name} is {v.dtype}; it must be floating-point")
    if v.device != x.device:
        raise ValueError(f"{name} is on {v.device} and x on {x.device}; move one of them")


def check_out(out: Tensor, x: Tensor, mask: Tensor, trials: bool, tensors: tuple) -> None:
    """out= is for inference: shape, dtype and device of y, and no gradients."""
    shape = (mask.shape[0], *x.shape) if is_shared(x, mask, trials) else tuple(x.shape)
    if not _has_shape(out, shape) or out.dtype != x.dtype or out.device != x.device:
        raise ValueError(
            f"out is {_shape(out)} {out.dtype} on {out.device}; "
            f"this call writes {shape} {x.dtype} on {x.device}"
        )
    if transformed() or (
        torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    ):
        raise RuntimeError(
            "out= does not record gradients and does not work under torch.func; drop it, or call "
            "under torch.no_grad()"
        )


def _check_residual(x: Tensor, mask: Tensor, residual: Tensor, trials: bool) -> None:
    batch = x.shape[0] if not trials or is_shared(x, mask, trials) else x.shape[1]
    site = tuple(mask.shape[1:] if trials else mask.shape)
    shapes = [(batch, *site)] + ([(mask.shape[0], batch, *site)] if trials else [])
    if not _has_shape(residual, *shapes):
        wanted = " or ".join(str(s) for s in shapes)
        raise ValueError(f"residual has shape {_shape(residual)}; x {_shape(x)} needs {wanted}")
    if residual.dtype != x.dtype or residual.device != x.device:
        raise ValueError(
            f"residual is {residual.dtype} on {residual.device} and x {x.dtype} on {x.device}; "
            f"they must agree"
        )


def _has_shape(t: Tensor, *shapes: tuple[int, ...]) -> bool:
    """Size by size, since torch.compile cannot compare tuples of dynamic sizes."""
    return any(
        t.ndim == len(shape) and all(a == b for a, b in zip(t.shape, shape, strict=True))
        for shape in shapes
    )


def _shape(t: Tensor) -> str:
    return str(tuple(t.shape))


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)

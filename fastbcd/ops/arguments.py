"""Argument checks of the ops: each error names the value, what was expected and the way out."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbcd.kernels.geometry import is_shared
from fastbcd.ops.registry import differentiable, transformed

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
MASK_DTYPES = (torch.bool, torch.uint8)


def check_arguments(
    x: Tensor,
    mask: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    residual: Tensor | None,
    trials: bool | None,
) -> bool:
    """Refuse what the masked ops cannot do; return whether the mask has a trial dimension."""
    if mask.dtype not in MASK_DTYPES:
        raise TypeError(
            f"mask is {mask.dtype}; it must be torch.bool or torch.uint8 (mask.bool())"
        )
    _check_device("mask", mask, x)
    trials = infer_trials(x, mask, trials)
    if scale is not None and shift is not None:
        channels = mask.shape[1 if trials else 0]
        check_small("scale", scale, x, (channels,))
        check_small("shift", shift, x, (channels,))
    elif scale is not None:
        raise ValueError(f"scale was given without shift; {_BOTH}")
    elif shift is not None:
        raise ValueError(f"shift was given without scale; {_BOTH}")
    check_items(x, mask, residual, trials)
    return trials


_BOTH = "pass both or neither, one value per channel"


def infer_trials(x: Tensor, mask: Tensor, trials: bool | None) -> bool:
    """Does mask have a trial dimension? Decided by the shapes if `trials` is None.

    Otherwise only that reading is compared: under torch.compile and torch.export each comparison
    of sizes becomes a condition on the batch.
    """
    if trials is not None and not isinstance(trials, bool):
        raise TypeError(f"trials={trials!r}; it must be True, False or None")
    plain = trials is not True and mask.ndim >= 1 and mask.shape == x.shape[1:]
    stacked = trials is not False and _fits_trials(x, mask)
    # A batch of 128 with 128 channels is an everyday size: images are read as images.
    if plain and stacked and x.ndim != 4:
        raise ValueError(
            f"x {_shape(x)} with mask {_shape(mask)} can be read two ways: a batch of "
            f"{x.shape[0]} with one mask, or {x.shape[0]} trials of a batch of {x.shape[1]}; "
            f"pass trials=False or trials=True"
        )
    if not (plain or stacked):
        wanted = f"{tuple(x.shape[1:])}, x without its batch dimension (or [T, ...] for T trials)"
        if trials:
            wanted = "mask [T, ...] beside x [B, ...] or x [T, B, ...]"
        raise ValueError(
            f"mask has shape {_shape(mask)} and x {_shape(x)}; expected {wanted}"
        )
    return not plain


def _fits_trials(x: Tensor, mask: Tensor) -> bool:
    """mask [T, *S], and x [B, *S] or [T, B, *S]."""
    if mask.ndim < 2 or x.ndim == mask.ndim:
        return mask.ndim >= 2 and mask.shape[1:] == x.shape[1:]
    return mask.shape[1:] == x.shape[2:] and mask.shape[0] == x.shape[0]


def check_items(
    x: Tensor, mask: Tensor, residual: Tensor | None, trials: bool = False
) -> None:
    """The dtype of x; the shape, dtype and device of the residual. mask: or one number per unit."""
    if x.dtype not in DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise TypeError(f"x is {x.dtype}; the activations take {names}")
    if residual is None:
        return
    if trials:
        item = x.shape[1:] if x.ndim > mask.ndim else x.shape
        _check_shape("residual", residual, x, item, (mask.shape[0], *item))
    else:
        _check_shape("residual", residual, x, x.shape)
    if residual.dtype != x.dtype:
        raise ValueError(
            f"residual is {residual.dtype} and x {x.dtype}; they must agree"
        )
    _check_device("residual", residual, x)


def check_small(name: str, value: Tensor, x: Tensor, *shapes: tuple[int, ...]) -> None:
    """Check the shape, dtype and device of a per-channel or per-unit argument."""
    _check_shape(name, value, x, *shapes)
    if not value.is_floating_point():
        raise TypeError(f"{name} is {value.dtype}; it must be floating-point")
    _check_device(name, value, x)


def check_out(
    out: Tensor,
    x: Tensor,
    mask: Tensor,
    trials: bool,
    others: tuple[Tensor | None, ...],
) -> None:
    """out= is for inference: shape, dtype and device of y, and no gradients."""
    shape = tuple(x.shape)
    if is_shared(x, mask, trials):
        shape = (mask.shape[0], *shape)
    if not _has_shape(out, shape) or out.dtype != x.dtype or out.device != x.device:
        raise ValueError(
            f"out is {_shape(out)} {out.dtype} on {out.device}; "
            f"this call writes {shape} {x.dtype} on {x.device}"
        )
    if differentiable((x, out, *others)) or transformed():
        raise RuntimeError(
            "out= does not record gradients and does not work under torch.func; drop it, or call "
            "under torch.no_grad()"
        )


def _check_device(name: str, t: Tensor, x: Tensor) -> None:
    if t.device != x.device:
        raise ValueError(
            f"{name} is on {t.device} and x on {x.device}; move one: {name}.to(x.device)"
        )


def _check_shape(name: str, t: Tensor, x: Tensor, *shapes: tuple[int, ...]) -> None:
    if not _has_shape(t, *shapes):
        wanted = " or ".join(str(tuple(s)) for s in shapes)
        raise ValueError(f"{name} has shape {_shape(t)}; x {_shape(x)} needs {wanted}")


def _has_shape(t: Tensor, *shapes: tuple[int, ...]) -> bool:
    """Does t have one of the shapes?"""
    if not torch.compiler.is_compiling():
        return t.shape in shapes
    # Size by size, since torch.compile cannot compare tuples of dynamic sizes.
    return any(
        t.ndim == len(shape)
        and all(a == b for a, b in zip(t.shape, shape, strict=True))
        for shape in shapes
    )


def _shape(t: Tensor) -> str:
    return str(tuple(t.shape))

"""The masked activations: y = relu(z) where the bit is 1, else r(z).

z = x*scale + shift + residual. r is the identity, a line or a quadratic: DEGREE 0, 1 or 2, with
coef [DEGREE + 1, C]. SOFT: numbers a in place of the bits, y = a*relu(z) + (1 - a)*r(z).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbcd.kernels.geometry import Geometry

from .common import OPAQUE, channel_of, launch, load, plan, row


@triton.jit
def replaced(z, c0, c1, c2, DEGREE: tl.constexpr):
    """r(z) = z, c1*z + c0, or (c2*z + c1)*z + c0."""
    if DEGREE == 0:
        return z
    if DEGREE == 1:
        return c1 * z + c0
    return (c2 * z + c1) * z + c0


@triton.jit
def bent(g, z, c1, c2, DEGREE: tl.constexpr):
    """g * r'(z)."""
    if DEGREE == 0:
        return g
    if DEGREE == 1:
        return g * c1
    return g * (2 * c2 * z + c1)


@triton.jit
def load_coef(coef_ptr, c, valid, channels, DEGREE: tl.constexpr):
    """c0, c1 and c2 of the tile's channels; 0 where DEGREE has none."""
    c0, c1, c2 = 0.0, 0.0, 0.0
    if DEGREE > 0:
        c0 = load(coef_ptr, c, valid)
        c1 = load(coef_ptr + channels, c, valid)
    if DEGREE == 2:
        c2 = load(coef_ptr + 2 * channels, c, valid)
    return c0, c1, c2


@triton.jit
def load_scale(scale_ptr, shift_ptr, c, valid):
    """scale and shift of the tile's channels; 0 where there are none."""
    scale, shift = 0.0, 0.0
    if scale_ptr is not None:
        scale = load(scale_ptr, c, valid)
    if shift_ptr is not None:
        shift = load(shift_ptr, c, valid)
    return scale, shift


@triton.jit
def mask_offsets(
    offs, channels, inner, CHANNELS_LAST: tl.constexpr, MASK_LAST: tl.constexpr
):  # fmt: skip
    """Where the tile's elements lie in a mask, which may have the other item order."""
    if CHANNELS_LAST == MASK_LAST:
        return offs
    if MASK_LAST:
        return (offs % inner) * channels + offs // inner
    return (offs % channels) * inner + offs // channels


@triton.jit
def load_kept(mask_ptr, mask_offs, valid, t, n):
    """Where trial t keeps its ReLU, from memory."""
    return (
        tl.load(mask_ptr + tl.cast(t, tl.int64) * n + mask_offs, mask=valid, other=0)
        != 0
    )


@triton.jit
def read_masks(
    mask_ptr, mask_offs, valid, t0, t1, n,
    SOFT: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The numbers of a soft mask; or sum of kept[t] << (t - t0), up to 32 trials in a register."""
    if SOFT:
        masks = load(mask_ptr + row(t0, 0, 1, n), mask_offs, valid)
    else:
        masks = tl.zeros([BLOCK], dtype=tl.int32)
        if PACKED:
            for t in range(t0, t1):
                kept = load_kept(mask_ptr, mask_offs, valid, t, n)
                masks |= kept.to(tl.int32) << (t - t0)
    return masks


@triton.jit
def is_kept(bits, mask_ptr, mask_offs, valid, t, t0, n, PACKED: tl.constexpr):
    """Where trial t keeps its ReLU: from the packed bits, or from memory if they do not fit."""
    if PACKED:
        return ((bits >> (t - t0)) & 1) != 0
    return load_kept(mask_ptr, mask_offs, valid, t, n)


@triton.jit(do_not_specialize=OPAQUE)
def masked_forward_kernel(
    y_ptr, x_ptr, mask_ptr, coef_ptr, scale_ptr, shift_ptr, residual_ptr,
    n, batch, trials, chunk, channels, inner,
    DEGREE: tl.constexpr, SOFT: tl.constexpr, CHANNELS_LAST: tl.constexpr, MASK_LAST: tl.constexpr,
    X_SHARED: tl.constexpr, RESIDUAL_SHARED: tl.constexpr,
    ALL_TRIALS: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of y for a chunk of the batch and one trial or all."""
    tiles, chunks = tl.cdiv(n, BLOCK), tl.cdiv(batch, chunk)
    slot = tl.program_id(0) // tiles
    offs = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    valid = offs < n
    first = (slot % chunks) * chunk
    t0, t1 = 0, trials
    if not ALL_TRIALS:
        t0 = slot // chunks
        t1 = t0 + 1
    mask_offs = mask_offsets(offs, channels, inner, CHANNELS_LAST, MASK_LAST)
    masks = read_masks(mask_ptr, mask_offs, valid, t0, t1, n, SOFT, PACKED, BLOCK)
    c = channel_of(offs, channels, inner, CHANNELS_LAST)
    c0, c1, c2 = load_coef(coef_ptr, c, valid, channels, DEGREE)
    scale, shift = load_scale(scale_ptr, shift_ptr, c, valid)
    for b in range(first, min(first + chunk, batch)):
        if X_SHARED:
            x = load(x_ptr + row(0, b, batch, n), offs, valid)
        if RESIDUAL_SHARED:
            residual = load(residual_ptr + row(0, b, batch, n), offs, valid)
        for t in range(t0, t1):
            item = row(t, b, batch, n)
            if not X_SHARED:
                x = load(x_ptr + item, offs, valid)
            # z = x * scale + shift + residual, each rounded on its own
            z = x
            if scale_ptr is not None:
                z = z * scale + shift
            if residual_ptr is not None:
                if not RESIDUAL_SHARED:
                    residual = load(residual_ptr + item, offs, valid)
                z += residual
            # relu(z): a NaN passes
            rectified = tl.where(z <= 0, 0.0, z)
            other = replaced(z, c0, c1, c2, DEGREE)
            if not SOFT:
                kept = is_kept(masks, mask_ptr, mask_offs, valid, t, t0, n, PACKED)
                y = tl.where(kept, rectified, other)
            elif DEGREE == 0:
                y = tl.where(z > 0, z, (1 - masks) * z)
            else:
                y = masks * rectified + (1 - masks) * other
            tl.store(y_ptr + item + offs, y, mask=valid)


@triton.jit(do_not_specialize=OPAQUE)
def masked_backward_kernel(
    dx_ptr, dresidual_ptr, small_ptr, units_ptr, grad_ptr, y_ptr, x_ptr, mask_ptr,
    coef_ptr, scale_ptr, shift_ptr, residual_ptr,
    n, batch, trials, chunk, channels, inner, width, span,
    DEGREE: tl.constexpr, SOFT: tl.constexpr, ABSOLUTE: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, MASK_LAST: tl.constexpr,
    X_SHARED: tl.constexpr, RESIDUAL_SHARED: tl.constexpr,
    ALL_TRIALS: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dz from y, or from z again; dx, dresidual and partial sums by column and by unit from dz."""
    tiles, rows, chunks = (
        tl.cdiv(width, BLOCK),
        tl.cdiv(n, width),
        tl.cdiv(batch, chunk),
    )
    slot = tl.program_id(0) // tiles
    columns = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    in_row = columns < width
    top = (slot % tl.cdiv(rows, span)) * span
    slab = slot // tl.cdiv(rows, span)  # of the chunks of all trials
    first = (slab % chunks) * chunk
    t0, t1 = 0, trials
    if not ALL_TRIALS:
        t0 = slab // chunks
        t1 = t0 + 1
    c = channel_of(columns, channels, inner, CHANNELS_LAST)
    c0, c1, c2 = load_coef(coef_ptr, c, in_row, channels, DEGREE)
    scale, shift = load_scale(scale_ptr, shift_ptr, c, in_row)
    if small_ptr is not None:
        dc0 = tl.zeros([BLOCK], dtype=tl.float32)
        dc1 = tl.zeros([BLOCK], dtype=tl.float32)
        dc2 = tl.zeros([BLOCK], dtype=tl.float32)
        dscale = tl.zeros([BLOCK], dtype=tl.float32)
        dshift = tl.zeros([BLOCK], dtype=tl.float32)

    for r in range(top, min(top + span, rows)):
        offs = r * width + columns
        valid = in_row & (offs < n)
        mask_offs = mask_offsets(offs, channels, inner, CHANNELS_LAST, MASK_LAST)
        masks = read_masks(mask_ptr, mask_offs, valid, t0, t1, n, SOFT, PACKED, BLOCK)
        dunits = tl.zeros([BLOCK], dtype=tl.float32)
        for b in range(first, min(first + chunk, batch)):
            shared_item = row(0, b, batch, n)
            if X_SHARED:
                dx_sum = tl.zeros([BLOCK], dtype=tl.float32)
                if x_ptr is not None:
                    x = load(x_ptr + shared_item, offs, valid)
            if RESIDUAL_SHARED:
                dresidual_sum = tl.zeros([BLOCK], dtype=tl.float32)
                if residual_ptr is not None:
                    residual = load(residual_ptr + shared_item, offs, valid)
            for t in range(t0, t1):
                item = row(t, b, batch, n)
                grad = load(grad_ptr + item, offs, valid)
                if x_ptr is not None and not X_SHARED:
                    x = load(x_ptr + item, offs, valid)
                if not SOFT:
                    kept = is_kept(masks, mask_ptr, mask_offs, valid, t, t0, n, PACKED)
                if y_ptr is not None:
                    # dz = 0 where the bit is 1 and y <= 0, else grad: a NaN in y passes grad
                    y = load(y_ptr + item, offs, valid)
                    dz = tl.where(kept & (y <= 0), 0.0, grad)
                else:
                    z = x
                    if scale_ptr is not None:
                        z = z * scale + shift
                    if residual_ptr is not None:
                        if not RESIDUAL_SHARED:
                            residual = load(residual_ptr + item, offs, valid)
                        z += residual
                    rectified = tl.where(z <= 0, 0.0, grad)
                    if SOFT:
                        # dz = grad * (a * 1[z > 0] + (1 - a) * r'(z))
                        p = z
                        g = grad * (1 - masks)
                        dz = masks * rectified + bent(g, z, c1, c2, DEGREE)
                        if DEGREE == 0:
                            dz = tl.where(z > 0, grad, g)
                    else:
                        # dz = grad * (1[z > 0] where the bit is 1, else r'(z)). p = z and
                        # g = grad where it is 0, else 0: a kept ReLU adds nothing to dcoef
                        p = tl.where(kept, 0.0, z)
                        g = tl.where(kept, 0.0, grad)
                        dz = tl.where(kept, rectified, bent(grad, p, c1, c2, DEGREE))
                    if units_ptr is not None:
                        # dunits = sum of grad * (relu(z) - r(z)), whatever the bit
                        if DEGREE == 0:
                            added = tl.where(z > 0, 0.0, -z)
                        else:
                            added = tl.where(z <= 0, 0.0, z) - replaced(
                                z, c0, c1, c2, DEGREE
                            )
                        effect = grad * added
                        if ABSOLUTE:
                            effect = tl.abs(effect)
                        dunits += effect
                    if small_ptr is not None:
                        # dcoef[i] = sum of g * p**i
                        if DEGREE > 0:
                            dc0 += g
                            dc1 += g * p
                        if DEGREE == 2:
                            dc2 += g * (p * p)
                # dx = dz * scale, over shared x summed in the order of the trials
                dx = dz
                if scale_ptr is not None:
                    dx = dz * scale
                    # dscale = sum of dz * x, dshift = sum of dz
                    if small_ptr is not None:
                        dscale += dz * x
                        dshift += dz
                if X_SHARED:
                    dx_sum += dx
                else:
                    tl.store(dx_ptr + item + offs, dx, mask=valid)
                # dresidual = dz, over a shared residual summed likewise
                if RESIDUAL_SHARED:
                    dresidual_sum += dz
                elif dresidual_ptr is not None:
                    tl.store(dresidual_ptr + item + offs, dz, mask=valid)
            if X_SHARED:
                tl.store(dx_ptr + shared_item + offs, dx_sum, mask=valid)
            if RESIDUAL_SHARED and dresidual_ptr is not None:
                tl.store(dresidual_ptr + shared_item + offs, dresidual_sum, mask=valid)
        if units_ptr is not None:
            tl.store(units_ptr + row(0, slab, 1, n) + offs, dunits, mask=valid)

    if small_ptr is not None:
        slots = tl.num_programs(0) // tiles
        here = small_ptr + row(0, slot, slots, width)
        apart = row(1, 0, slots, width)  # two kinds of sums
        if DEGREE > 0:
            tl.store(here + columns, dc0, mask=in_row)
            tl.store(here + apart + columns, dc1, mask=in_row)
        if DEGREE == 2:
            tl.store(here + 2 * apart + columns, dc2, mask=in_row)
        if scale_ptr is not None:
            kinds: tl.constexpr = DEGREE + (DEGREE > 0)
            tl.store(here + kinds * apart + columns, dscale, mask=in_row)
            tl.store(here + (kinds + 1) * apart + columns, dshift, mask=in_row)


def masked_forward(
    y: Tensor,
    x: Tensor,
    mask: Tensor,
    coef: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    residual: Tensor | None,
    g: Geometry,
) -> None:
    """Write y [T, B, n]. It may be x or residual itself, where that is not shared."""
    tensors = (y, x, _as_bytes(mask), coef, scale, shift, residual)
    launch(
        masked_forward_kernel,
        plan(g, x.element_size()),
        g,
        tensors,
        **_constants(mask, coef),
    )


def masked_backward(
    dx: Tensor,
    dresidual: Tensor | None,
    dsmall: Tensor | None,
    dunits: Tensor | None,
    grad: Tensor,
    y: Tensor | None,
    x: Tensor | None,
    mask: Tensor,
    coef: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    residual: Tensor | None,
    absolute: bool,
    g: Geometry,
) -> None:
    """Write dx, and where they are given dresidual, dsmall and dunits.

    dsmall has the rows of dcoef, dscale and dshift.
    """
    kinds = 0 if dsmall is None else len(dsmall)
    streams = sum(t is not None for t in (dx, dresidual, grad, y, x, residual))
    p = plan(g, grad.element_size(), kinds + (dunits is not None), streams)
    columns, slabs = None, dunits
    if dsmall is not None:
        columns = dsmall.new_empty((kinds, p.slots, p.width))
    if dunits is not None and p.chunks > 1:
        slabs = dunits.new_empty((p.chunks, dunits.numel()))
    launch(
        masked_backward_kernel, p, g,
        (dx, dresidual, columns, slabs, grad, y, x, _as_bytes(mask), coef, scale, shift, residual),
        p.width, p.span, ABSOLUTE=absolute, **_constants(mask, coef),
    )  # fmt: skip
    if dsmall is not None and columns is not None:
        by_channel = (-1, g.channels) if g.channels_last else (g.channels, -1)
        inner = 2 if g.channels_last else 3
        torch.sum(columns.view(kinds, p.slots, *by_channel), dim=(1, inner), out=dsmall)
    if dunits is not None and slabs is not dunits:
        # dunits is dense in the kernel's item order.
        torch.sum(slabs, dim=0, out=dunits.as_strided((dunits.numel(),), (1,)))


def _as_bytes(mask: Tensor) -> Tensor:
    """The same memory, one byte per bit; numbers as they are."""
    return mask if mask.is_floating_point() else mask.view(torch.uint8)


def _constants(mask: Tensor, coef: Tensor | None) -> dict[str, int]:
    return {
        "DEGREE": 0 if coef is None else len(coef) - 1,
        "SOFT": mask.is_floating_point(),
    }

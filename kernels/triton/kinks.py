"""c = mask · relu(-(z + a)) over the output of a matrix product, in place.

A row of c is a row of a larger matrix and begins anywhere in it, so accesses are 32 bits a thread,
side by side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 256, 4


@triton.jit(do_not_specialize=("batch", "n", "c_trial", "c_row", "a_row", "mask_row"))
def kinks_kernel(
    c_ptr, a_ptr, mask_ptr, batch, n, c_trial, c_row, a_row, mask_row,
    FRESH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of row b of trial t."""
    tiles = tl.cdiv(n, BLOCK)
    item = tl.program_id(0) // tiles
    t, b = (item // batch).to(tl.int64), (item % batch).to(tl.int64)
    offs = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    valid = offs < n
    c_offs = t * c_trial + b * c_row + offs
    z = tl.load(a_ptr + b * a_row + offs, mask=valid, other=0.0)
    if not FRESH:
        z = tl.load(c_ptr + c_offs, mask=valid, other=0.0) + z
    kept = tl.load(mask_ptr + t * mask_row + offs, mask=valid, other=0) != 0
    # c = -z where the bit is 1 and z < 0, else 0: a NaN passes where the bit is 1
    c = tl.where(kept, tl.where(z >= 0, 0.0, -z), 0.0)
    tl.store(c_ptr + c_offs, c, mask=valid)


def kinks(c: Tensor, a: Tensor, mask: Tensor, fresh: bool) -> None:
    """c [T, B, n] holds z (or nothing yet, if fresh); a [B, n]; mask uint8 [T, n]."""
    trials, batch, n = c.shape
    if not c.numel():
        return
    programs = trials * batch * triton.cdiv(n, BLOCK)
    with torch.cuda.device_of(c):
        kinks_kernel[(programs,)](
            c, a, mask, batch, n, c.stride(0), c.stride(1), a.stride(0), mask.stride(0),
            FRESH=fresh, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip

"""c = mask · relu(-(z + a)) over the output of a matrix product, in place.

c is read and written once, its last two dimensions as one, 32 bits per thread.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 256, 4


@triton.jit(do_not_specialize=("trials", "batch"))
def kink_kernel(
    c_ptr, a_ptr, mask_ptr, trials, batch, FRESH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One tile of the T·B values of a kink."""
    tiles = tl.cdiv(trials * batch, BLOCK)
    kink = (tl.program_id(0) // tiles).to(tl.int64)
    offs = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    valid = offs < trials * batch
    c_offs = kink * trials * batch + offs
    z = tl.load(a_ptr + kink * batch + offs % batch, mask=valid, other=0.0)
    if not FRESH:
        z = tl.load(c_ptr + c_offs, mask=valid, other=0.0) + z
    kept = tl.load(mask_ptr + kink * trials + offs // batch, mask=valid, other=0) != 0
    # c = -z where the bit is 1 and z < 0, else 0: a NaN passes where the bit is 1
    c = tl.where(kept, tl.where(z >= 0, 0.0, -z), 0.0)
    tl.store(c_ptr + c_offs, c, mask=valid)


def kink(c: Tensor, a: Tensor, mask: Tensor, fresh: bool) -> None:
    """c [n, T, B] holds z (or nothing yet, if fresh); a [n, B]; mask uint8 [n, T]."""
    n, trials, batch = c.shape
    if not c.numel():
        return
    with torch.cuda.device_of(c):
        kink_kernel[(n * triton.cdiv(trials * batch, BLOCK),)](
            c, a, mask, trials, batch, FRESH=fresh, BLOCK=BLOCK, num_warps=WARPS
        )

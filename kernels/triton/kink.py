"""c = mask · relu(-(z + a)) over the output of a matrix product, in place.

c is read and written once. A program takes a tile of the trials and batch items of one kink, so
that an element's trial and item need no division.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 512, 4


@triton.jit(do_not_specialize=("trials",))
def kink_kernel(
    c_ptr, a_ptr, mask_ptr, trials, batch,
    FRESH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile of the T·B values of a kink: ROWS trials, COLUMNS items."""
    across = tl.cdiv(batch, COLUMNS)
    tiles = tl.cdiv(trials, ROWS) * across
    kink = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    t = (tile // across) * ROWS + tl.arange(0, ROWS)[:, None]
    b = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    valid = (t < trials) & (b < batch)
    c_offs = kink * trials * batch + t * batch + b
    # Read for every trial: one row of a tile would be spread over it through shared memory.
    a_offs = tl.broadcast_to(b, [ROWS, COLUMNS])
    z = tl.load(a_ptr + kink * batch + a_offs, mask=valid, other=0.0)
    if not FRESH:
        z = tl.load(c_ptr + c_offs, mask=valid, other=0.0) + z
    kept = tl.load(mask_ptr + kink * trials + t, mask=t < trials, other=0) != 0
    # c = -z where the bit is 1 and z < 0, else 0: a NaN passes where the bit is 1
    c = tl.where(kept, tl.where(z >= 0, 0.0, -z), 0.0)
    tl.store(c_ptr + c_offs, c, mask=valid)


def kink(c: Tensor, a: Tensor, mask: Tensor, fresh: bool) -> None:
    """c [n, T, B] holds z (or nothing yet, if fresh); a [n, B]; mask uint8 [n, T]."""
    n, trials, batch = c.shape
    if not c.numel():
        return
    columns = max(32, min(triton.next_power_of_2(batch), BLOCK))
    rows = BLOCK // columns
    tiles = triton.cdiv(trials, rows) * triton.cdiv(batch, columns)
    with torch.cuda.device_of(c):
        kink_kernel[(n * tiles,)](
            c,
            a,
            mask,
            trials,
            batch,
            FRESH=fresh,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=WARPS,
        )

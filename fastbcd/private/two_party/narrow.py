"""narrow_relu: CrypTen's ReLU with a comparison that reads a window of bits of the shares.

A value x with f fraction bits is the sum of two shares of 64 bits. With |x| * 2^f < 2^(high - 1)
the bits low ... high - 1 of the shares decide its sign, up to an error of 2^(low - f) near 0. They
lie side by side in 64 bits, so less is sent, and the adder has fewer steps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

WIDTHS = (8, 16, 32)


def narrow_relu(x: Any, low: int, high: int) -> Any:
    """x * (x >= 0), elementwise."""
    from crypten.mpc.primitives import beaver

    negative = beaver.B2A_single_bit(_sign(x.share, low, high - low))
    kept = 1 - negative.reshape(x.shape)
    result = x.shallow_copy()
    result._tensor = x._tensor * kept
    return result


def _sign(share: Any, low: int, width: int) -> Any:
    """The highest bit of the window of each value, as a binary share."""
    from crypten.mpc.primitives.binary import BinarySharedTensor

    lanes = 64 // width
    window = (share.flatten() >> low) & ((1 << width) - 1)
    missing = -len(window) % lanes
    window = F.pad(window, (0, missing)).view(-1, lanes)
    places = torch.arange(lanes) * width
    packed = (window << places).sum(1)
    mine, theirs = (BinarySharedTensor(packed, src=party) for party in (0, 1))
    # carry: a carry leaves this bit; through: a carry that enters would leave
    differ = mine ^ theirs
    carry = mine & theirs
    through = differ
    step = 1
    while step < width:
        inside = _repeated((1 << width) - (1 << step), width)
        below = BinarySharedTensor.stack([carry, through]) << step
        chained = BinarySharedTensor.stack([through, through]) & (below & inside)
        carry = carry ^ chained[0]
        through = chained[1]
        step *= 2
    total = differ ^ (carry << 1)
    bits = [(total >> (int(place) + width - 1)) & 1 for place in places]
    flat = BinarySharedTensor.stack(bits, dim=1).reshape(-1)
    return flat[: share.numel()]


def _repeated(lane: int, width: int) -> int:
    """The bits of a lane in each lane of 64 bits, as a signed number."""
    whole = sum(lane << place for place in range(0, 64, width))
    if whole >= 1 << 63:
        whole -= 1 << 64
    return whole

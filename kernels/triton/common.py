"""What the kernels share: the elements of a program, its mask bits, and the launch.

A program handles a tile of an item's n elements, in a chunk of the batch. It reads the mask of
its tile and the channel's parameters once, keeps them in registers, and loops over the items:

    program = tile + tiles * (chunk + chunks * trial)

With x or residual shared by the trials it loops over all trials of an item as well, so that the
shared tensor is read once; a tile's masks are then packed in one int32, one bit per trial.

Sums over the batch are computed in two stages of fixed order, without atomics. An item is read as
rows of `width` elements, in channels_last order a multiple of C, so that a column belongs to one
channel; a program adds up a span of rows in a chunk of the batch, column by column, and writes
partials[kind, slot, width]. torch.sum then adds the slots and the columns of a channel. The same
call gives the same bits every time.

Kernels without trials still have the trial t = 0 in every offset. For an n that is not a multiple
of 16, triton would otherwise learn that a unit's own parameter is aligned where the items are not,
and would regroup the tile through shared memory.

Offsets inside an item are int32; an item's own offset (trial * batch + b) * n is int64.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbcd.kernels.geometry import Geometry

ON_CUDA = torch.version.hip is None
THREADS = 128  # per program, fewer for an item that does not fill them
WORD = 32  # trials whose bits fit one int32
MAX_REGISTERS = (
    128  # per thread; without a bound ptxas aims at 40 in places, and spills
)
# Arguments whose value does not specialise the code. For `inner` this is necessary: with one
# element per channel triton would read parameters in vectors, and regroup an unaligned tile
# through shared memory.
OPAQUE = ("batch", "trials", "chunk", "span", "inner")
# (programs, items): a program takes several items only beyond that many programs (a large GPU has
# 132 processors), up to that many items.
ELEMENTWISE = (16 * 132, 16)  # what a program reads once is a small part of its traffic
REDUCING = (
    16 * 132,
    64,
)  # of one warp; each writes partial sums: fewer programs are better
PARTIALS = (
    0.1  # of the bytes of the tensors: what partial sums may move, written and read
)


@functools.cache
def warp_size() -> int:
    """Threads of a warp: 32 on CUDA and on RDNA, 64 on CDNA. Asked at the first launch only."""
    if ON_CUDA:
        return 32
    return torch.cuda.get_device_properties(torch.cuda.current_device()).warp_size


class Plan(NamedTuple):
    """How a kernel is launched: fixed rules, so that a call always sums in the same order."""

    block: int  # elements per tile
    num_warps: int
    width: int  # elements of a row of an item
    span: int  # rows per program
    chunk: int  # batch items per program
    chunks: int  # (chunk, trial) pairs; each writes its own sums by unit
    slots: int  # and each span of rows its own sums by column
    programs: int
    all_trials: bool  # a program loops over all trials


def plan(g: Geometry, itemsize: int, sums: int = 0, streams: int = 3) -> Plan:
    """The launch for tensors of `itemsize` bytes per element.

    sums: how many sums by channel or unit a kernel computes; streams: how many tensors it moves.
    """
    if not sums:
        return _elementwise(g, itemsize, ELEMENTWISE, warp_size())
    # Items of a program for which its sums, of 4 bytes written and read, are a small part.
    least = math.ceil(8 * sums / (PARTIALS * streams * itemsize))
    return _reducing(g, itemsize, least, REDUCING, warp_size())


# Calls repeat: computing a plan takes as long as a small call.
@functools.lru_cache(maxsize=4096)
def _elementwise(
    g: Geometry, itemsize: int, limits: tuple[int, int], warp: int
) -> Plan:
    """A thread takes as many elements as fill a 128-bit access: 4 of fp32, 8 of 16-bit types."""
    n, lead, all_trials = _sizes(g)
    per_warp = 16 // itemsize * warp
    num_warps = min(triton.next_power_of_2(triton.cdiv(n, per_warp)), THREADS // warp)
    tiles = triton.cdiv(n, per_warp * num_warps)
    enough, largest = limits
    chunk = max(1, min(tiles * lead * g.batch // enough, largest))
    chunks = lead * triton.cdiv(g.batch, chunk)
    return Plan(per_warp * num_warps, num_warps, n, 1, chunk, chunks, chunks, tiles * chunks,
                all_trials)  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _reducing(
    g: Geometry, itemsize: int, least: int, limits: tuple[int, int], warp: int
) -> Plan:
    """A thread takes 4 elements, the width of its fp32 partial sums.

    One width for all operands keeps every value in the thread that loaded it. Accesses of 16-bit
    types are then 64 bits wide, and take twice the programs to have as many bytes under way.
    Programs of one warp are the most for partial sums of a given size.
    """
    n, lead, all_trials = _sizes(g)
    block = 4 * warp
    width = n
    if g.channels_last:
        # Rows are as aligned as items: triton knows whether width and n are multiples of 16, and
        # would regroup a tile of two alignments through shared memory.
        pixels = max(1, block // g.channels)
        even = 16 // math.gcd(g.channels, 16)
        if n % 16 == 0:
            pixels = max(1, pixels // even) * even
        elif pixels % even == 0:
            pixels -= 1
        width = g.channels * pixels
    rows, tiles = triton.cdiv(n, width), triton.cdiv(width, block)
    enough, largest = limits
    items = tiles * rows * lead * g.batch * itemsize // (4 * enough)
    items = max(least, min(items, largest))
    chunk = triton.cdiv(g.batch, max(1, g.batch // items))
    span = min(rows, triton.cdiv(items, chunk))
    chunks = lead * triton.cdiv(g.batch, chunk)
    slots = chunks * triton.cdiv(rows, span)
    return Plan(block, 1, width, span, chunk, chunks, slots, tiles * slots, all_trials)


def _sizes(g: Geometry) -> tuple[int, int, bool]:
    """Elements of an item; trials that are separate programs; does a program loop over trials?"""
    all_trials = g.x_shared or g.residual_shared
    return g.channels * g.inner, 1 if all_trials else g.trials, all_trials


def launch(
    kernel: Any,
    p: Plan,
    g: Geometry,
    tensors: tuple[Tensor | None, ...],
    *sizes: int,
    **own: Any,
) -> None:
    """Run a kernel on tensors, of which the optional ones may be None.

    sizes and own: the integers and the constants that this kernel alone takes.
    """
    options = {
        "CHANNELS_LAST": g.channels_last, "MASK_LAST": g.mask_last,
        "X_SHARED": g.x_shared, "RESIDUAL_SHARED": g.residual_shared,
        "ALL_TRIALS": p.all_trials, "PACKED": not p.all_trials or g.trials <= WORD,
        "BLOCK": p.block, "num_warps": p.num_warps, **own,
        "enable_fp_fusion": False,  # x*s + b rounds twice
    }  # fmt: skip
    if ON_CUDA:
        options["maxnreg"] = MAX_REGISTERS
    n = g.channels * g.inner
    with torch.cuda.device_of(tensors[0]):
        kernel[(p.programs,)](
            *tensors,
            n,
            g.batch,
            g.trials,
            p.chunk,
            g.channels,
            g.inner,
            *sizes,
            **options,
        )


@triton.jit
def row(t, b, batch, n):
    """Where item b of trial t begins in [T, B, n]."""
    return (tl.cast(t, tl.int64) * batch + b) * n


@triton.jit
def load(ptr, offs, valid):
    """One operand's tile in fp32."""
    return tl.load(ptr + offs, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def channel_of(offs, channels, inner, CHANNELS_LAST: tl.constexpr):
    """The channel of each element of the tile."""
    if CHANNELS_LAST:
        return offs % channels
    return offs // inner

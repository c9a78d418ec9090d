"""What the kernels share: the elements of a program, its mask bits, and the launch.

A program handles a tile of an item's n elements, in a chunk of the batch. It reads the mask of
its tile and the channel's parameters once, keeps them in registers, and loops over the items:

    program = tile + tiles * (chunk + chunks * trial)

With x or residual shared by the trials it loops over all trials of an item as well, so that the
shared tensor is read once; a tile's masks are then packed in one int32, one bit per trial.

Sums over the batch are computed in two stages of fixed order, without atomics. A program adds up
its own items, element by element, and writes partials[kind, slot, n]; torch.sum then adds the
slots and the elements of a channel. The same call gives the same bits every time.

Kernels without trials still have the trial t = 0 in every offset. For an n that is not a multiple
of 16, triton would otherwise learn that a unit's own parameter is aligned where the items are not,
and would regroup the tile through shared memory.

Offsets inside an item are int32; an item's own offset (trial * batch + b) * n is int64.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbcd.kernels.geometry import Geometry

WARP_SIZE = 64 if torch.version.hip else 32
THREADS = 128  # per program, fewer for an item that does not fill them
WORD = 32  # trials whose bits fit one int32
MAX_REGISTERS = 128  # per thread; without a bound ptxas aims at 40 in places, and spills
# Arguments whose value does not specialise the code. For `inner` this is necessary: with one
# element per channel triton would read parameters in vectors, and regroup an unaligned tile
# through shared memory.
OPAQUE = ("batch", "trials", "chunk", "inner")
# (programs, items): chunks grow only beyond that many programs (a large GPU has 132 processors),
# up to that many items.
ELEMENTWISE = (16 * 132, 16)  # what a program reads once is a small part of its traffic
REDUCING = (4 * 132, 64)  # each program writes partial sums: fewer programs are better


class Plan(NamedTuple):
    """How a kernel is launched: fixed rules, so that a call always sums in the same order."""

    block: int  # elements per tile
    num_warps: int
    chunk: int  # batch items per program
    slots: int  # (chunk, trial) pairs; each writes its own partial sums
    programs: int
    all_trials: bool  # a program loops over all trials


def plan(g: Geometry, itemsize: int, reduces: bool = False) -> Plan:
    """The launch for tensors of `itemsize` bytes per element.

    A thread takes as many elements as fill a 128-bit access: 4 of fp32, 8 of 16-bit types. A
    kernel that reduces takes 4, the width of its fp32 partial sums: one width for all operands
    keeps every value in the thread that loaded it. Its accesses of 16-bit types are then 64 bits
    wide, and it takes twice the programs to have as many bytes under way.
    """
    return _plan(g, itemsize, reduces, REDUCING if reduces else ELEMENTWISE, WARP_SIZE)


@functools.lru_cache(maxsize=4096)  # calls repeat: computing a plan takes as long as a small call
def _plan(
    g: Geometry, itemsize: int, reduces: bool, limits: tuple[int, int], warp_size: int
) -> Plan:
    n = g.channels * g.inner
    per_warp = (4 if reduces else 16 // itemsize) * warp_size
    num_warps = min(triton.next_power_of_2(triton.cdiv(n, per_warp)), THREADS // warp_size)
    tiles = triton.cdiv(n, per_warp * num_warps)
    all_trials = g.x_shared or g.residual_shared
    rows = 1 if all_trials else g.trials
    enough, largest = limits
    enough *= 4 // itemsize if reduces else 1
    chunk = max(1, min(tiles * rows * g.batch // enough, largest))
    slots = rows * triton.cdiv(g.batch, chunk)
    return Plan(per_warp * num_warps, num_warps, chunk, slots, tiles * slots, all_trials)


def launch(kernel: Any, p: Plan, g: Geometry, *tensors: Tensor | None, **own: bool) -> None:
    """Run `kernel` on tensors, of which the optional ones may be None.

    `own` are constants of this kernel alone; of the common ones it gets those that it takes.
    """
    constants = {
        "CHANNELS_LAST": g.channels_last, "MASK_LAST": g.mask_last,
        "X_SHARED": g.x_shared, "RESIDUAL_SHARED": g.residual_shared,
        "ALL_TRIALS": p.all_trials, "PACKED": not p.all_trials or g.trials <= WORD,
        "BLOCK": p.block, **own,
    }  # fmt: skip
    options = {name: value for name, value in constants.items() if name in kernel.arg_names}
    options |= {"num_warps": p.num_warps, "enable_fp_fusion": False}  # x*s + b rounds twice
    if WARP_SIZE == 32:  # CUDA
        options["maxnreg"] = MAX_REGISTERS
    sizes = (g.channels * g.inner, g.batch, g.trials, p.chunk, g.channels, g.inner)
    with torch.cuda.device_of(tensors[0]):
        kernel[(p.programs,)](*tensors, *sizes, **options)


def new_partials(kinds: int, p: Plan, g: Geometry, like: Tensor) -> Tensor:
    """[kinds, slots, n]: the sums of every program over its items, by element."""
    shape = (kinds, p.slots, g.channels * g.inner)
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def reduce_partials(partials: Tensor, out: Tensor, g: Geometry) -> None:
    """out[k, C] = sum of partials[k, slots, n] over slots and inner: the fixed second stage."""
    sizes = (g.inner, g.channels) if g.channels_last else (g.channels, g.inner)
    inner = 2 if g.channels_last else 3
    torch.sum(partials.view(*partials.shape[:2], *sizes), dim=(1, inner), out=out)


def reduce_slots(partials: Tensor, out: Tensor) -> None:
    """out = sum of partials [slots, n] over the slots; out is dense in the kernel's item order."""
    torch.sum(partials, dim=0, out=out.as_strided((out.numel(),), (1,)))


def as_bytes(mask: Tensor) -> Tensor:
    """The same memory, one byte per bit."""
    return mask.view(torch.uint8)


@triton.jit
def locate(n, batch, trials, chunk, ALL_TRIALS: tl.constexpr, BLOCK: tl.constexpr):
    """This program's elements, its slot, and its ranges of batch items and of trials."""
    tiles = tl.cdiv(n, BLOCK)
    chunks = tl.cdiv(batch, chunk)
    slot = tl.program_id(0) // tiles
    offs = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    first = (slot % chunks) * chunk
    last = min(first + chunk, batch)
    if ALL_TRIALS:
        return offs, slot, first, last, 0, trials
    trial = slot // chunks
    return offs, slot, first, last, trial, trial + 1


@triton.jit
def row(t, b, batch, n):
    """Where item b of trial t begins in [T, B, n]."""
    return (tl.cast(t, tl.int64) * batch + b) * n


@triton.jit
def load(ptr, offs, valid):
    """One operand's tile in fp32."""
    return tl.load(ptr + offs, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def store_partial(ptr, kind: tl.constexpr, value, slot, offs, valid, n, BLOCK: tl.constexpr):
    """partials[kind, slot] = this program's sum over its items: the first stage."""
    slots = tl.num_programs(0) // tl.cdiv(n, BLOCK)
    tl.store(ptr + row(kind, slot, slots, n) + offs, value, mask=valid)


@triton.jit
def channel_of(offs, channels, inner, CHANNELS_LAST: tl.constexpr):
    """The channel of each element of the tile."""
    if CHANNELS_LAST:
        return offs % channels
    return offs // inner


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
    return tl.load(mask_ptr + tl.cast(t, tl.int64) * n + mask_offs, mask=valid, other=0) != 0


@triton.jit
def pack_masks(
    mask_ptr, mask_offs, valid, t0, t1, n, PACKED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """bits = sum of kept[t] << (t - t0): the masks of up to 32 trials, a register per element."""
    bits = tl.zeros([BLOCK], dtype=tl.int32)
    if PACKED:
        for t in range(t0, t1):
            bits |= load_kept(mask_ptr, mask_offs, valid, t, n).to(tl.int32) << (t - t0)
    return bits


@triton.jit
def is_kept(bits, mask_ptr, mask_offs, valid, t, t0, n, PACKED: tl.constexpr):
    """Where trial t keeps its ReLU: from the packed bits, or from memory if they do not fit."""
    if PACKED:
        return ((bits >> (t - t0)) & 1) != 0
    return load_kept(mask_ptr, mask_offs, valid, t, n)

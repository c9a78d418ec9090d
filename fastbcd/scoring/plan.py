"""How a call of score will run: which engine, why, in which portions, at what cost."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastbcd.masking import MaskSet
from fastbcd.scoring.program import Activation, NotTraceable, Program
from fastbcd.scoring.sequential import Sequential
from fastbcd.scoring.stacked import Lanes, Stacked, first_change

ENGINES = ("auto", "sequential", "stacked")
BATCH = 32  # images at a time, where nothing forbids it
_said: set[str] = set()


class Plan(NamedTuple):
    """What `explain=True` prints."""

    engine: Any
    why: str
    images: int
    hypotheses: int
    batch: int  # images at a time
    lanes: int  # hypotheses at a time
    multiply_adds: int  # of the whole call; 0 if unknown
    prefix_saved: float  # share of the multiply-adds that shared prefixes save
    bytes: int  # largest amount of memory that values take at a time

    def __str__(self) -> str:
        cost = f"{self.multiply_adds / 1e9:,.1f} G multiply-adds" if self.multiply_adds else "?"
        return (
            f"engine      {self.engine.name}: {self.why}\n"
            f"work        {self.hypotheses} hypotheses + base, {self.images:,} images, {cost}\n"
            f"prefix      {self.prefix_saved:.1%} of the multiply-adds saved by shared prefixes\n"
            f"chunk       {self.batch} images x {self.lanes} hypotheses, "
            f"{self.bytes / 2**20:,.1f} MiB of values at a time"
        )


def make_plan(
    net: nn.Module,
    masks: MaskSet,
    removals: list[Tensor],
    images: int,
    example: Tensor,
    engine: str,
    batch_size: int | None,
    memory: int | None,
) -> Plan:
    """Choose the engine and the portions. example: two images as the net sees them."""
    chosen: Any
    if engine == "sequential":
        chosen, why = Sequential(net, masks), "asked for"
    else:
        try:
            chosen = Stacked(net, masks, example)
            why = "asked for" if engine == "stacked" else "the net can be traced"
        except NotTraceable as reason:
            if engine == "stacked":
                raise ValueError(
                    f"engine='stacked' cannot score {type(net).__name__}: {reason}; "
                    f"use engine='sequential'"
                ) from None
            chosen, why = Sequential(net, masks), f"stacked cannot: {reason}"
            _say_once(f"fastbcd scores {type(net).__name__} one hypothesis at a time: {reason}")
    if isinstance(chosen, Sequential):
        batch = batch_size or 128
        return Plan(chosen, why, images, len(removals), batch, 1, 0, 0.0, 0)
    program = chosen.program
    total = sum(program.multiply_adds.values())
    begins = [first_change(masks, ids) for ids in removals]
    spent = total + _lane_multiply_adds(program, begins)
    full = total * (1 + len(removals))
    per_image = peak_bytes(program)
    batch, lanes = portions(per_image, max(program.bytes_per_image.values()), len(removals),
                            example.device, batch_size, memory)  # fmt: skip
    batch = min(batch, max(images, 1))
    return Plan(
        chosen, why, images, len(removals), batch, lanes, spent * images,
        1 - spent / full if full else 0.0, per_image * batch * (1 + lanes),
    )  # fmt: skip


def portions(
    per_image: int, largest: int, hypotheses: int, device: torch.device,
    batch_size: int | None, memory: int | None,
) -> tuple[int, int]:  # fmt: skip
    """(images, hypotheses) at a time.

    per_image: bytes of all values alive at once, largest: bytes of the largest single value.
    """
    hypotheses = max(hypotheses, 1)
    limit = memory if memory is not None else default_memory(device)
    together = limit // max(per_image, 1)
    if device.type == "cpu":
        # A value written by one step should still be in the cache when the next one reads it,
        # and fresh memory beyond it costs more in page faults than the convolution; but a
        # convolution of fewer images than a batch is not efficient.
        together = min(together, max(BATCH, cache_bytes() // (8 * largest)))
    together = max(together, 1)
    batch = batch_size or max(1, min(BATCH, together))
    lanes = max(1, min(hypotheses, together // batch))
    return batch, lanes


def peak_bytes(program: Program) -> int:
    """Bytes for one image at the worst step, and of the buffers that are held for all steps."""
    left = dict(program.uses)
    sites = [s for s in program.steps if isinstance(s, Activation)]
    held = sum(program.bytes_per_image[s.node] for s in sites if s.x not in program.fresh)
    # Where lanes begin an activation cannot be in place: the largest such, to be safe.
    held += max((program.bytes_per_image[s.node] for s in sites if s.x in program.fresh), default=0)
    alive = program.bytes_per_image.get(program.placeholder, 0)
    worst = alive
    for step in program.steps:
        reused = step.x if isinstance(step, Activation) and step.x in program.fresh else None
        alive += 0 if reused else program.bytes_per_image.get(step.node, 0)
        worst = max(worst, alive)
        for node in step.inputs:
            left[node] -= 1
            if not left[node] and node not in program.constants:
                alive -= 0 if node is reused else program.bytes_per_image.get(node, 0)
    return worst + held


def default_memory(device: torch.device) -> int:
    """Bytes that values may take: most of what a GPU has free, half of what a CPU has."""
    if device.type == "cuda":
        return int(0.7 * torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable"))
        return int(available.split()[1]) * 1024 // 2
    except (OSError, StopIteration):
        return 2**31


def cache_bytes() -> int:
    """The largest cache of this CPU."""
    units = {"K": 2**10, "M": 2**20}
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * units.get(text[-1], 1))
    return max(sizes, default=16 * 2**20)


def _lane_multiply_adds(program: Program, begins: list[int]) -> int:
    lanes = Lanes(program, begins, list(range(len(begins))))
    return sum(program.multiply_adds[node] * n for node, n in lanes.count.items())


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=4)

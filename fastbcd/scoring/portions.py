"""How much memory values may take, and the portions that follow from it."""

from __future__ import annotations

import torch

from fastbcd.runtime.limits import cache_bytes, default_memory
from fastbcd.scoring.program import Activation, Program

BATCH = 32  # images at a time, where nothing forbids it


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

"""Engine: how hypotheses are scored, and the protocol that every engine implements.

The engine changes the speed, never the numbers: each is held to the logits of the net itself.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fastbcd.masking.masks import MaskSet, set_masks
from fastbcd.runtime.validate import check_choice, check_whole
from fastbcd.scoring.sequential import Outputs, Sequential

ENGINES = ("auto", "sequential", "stacked", "collapsed")
PRECISIONS = ("float32", "tf32", "bf16")


@dataclass(frozen=True)
class Engine:
    """Which engine scores hypotheses, and its limits; `engine=` takes one of these or a name.

    Args:
        name: "auto", "sequential", "stacked" or "collapsed". "auto" takes the cheapest.
        batch_size: images at a time; None: chosen from the cache or the memory.
        memory: bytes that the values of a pass, and a collapsed form, may take; None: half of
            the free memory of a CPU, 70 % of that of a GPU.
        wave: hypotheses that `choose` and `bcd` score together at most.
        precision: of products, "float32", "tf32" or "bf16". With "tf32" a GPU rounds their factors
            to 10 bits. With "bf16" convolutions and linear layers run as under torch.autocast:
            values have 8 bits; `collapsed` refuses it. Both are for GPUs: faster, and a decision
            may differ from that of float32. Plans and collapsed forms are made in float32.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> engine = fastbcd.Engine("stacked", batch_size=10, memory=2**20)
    >>> fastbcd.score(net, torch.tensor([[0, 1]]), data, engine=engine).engine
    'stacked'
    """

    name: str = "auto"
    _: KW_ONLY
    batch_size: int | None = None
    memory: int | None = None
    wave: int = 8
    precision: str = "float32"

    def __post_init__(self) -> None:
        if self.name not in ENGINES:
            raise ValueError(f"engine={self.name!r}; choose from {', '.join(ENGINES)}")
        check_whole("batch_size", 1 if self.batch_size is None else self.batch_size, 1)
        check_whole("memory", 1 if self.memory is None else self.memory, 1)
        check_whole("wave", self.wave, 1)
        check_choice("precision", self.precision, PRECISIONS)


def as_engine(engine: str | Engine) -> Engine:
    """The settings of an engine that may be given by its name."""
    if isinstance(engine, str):
        return Engine(engine)
    if not isinstance(engine, Engine):
        names = ", ".join(ENGINES)
        raise TypeError(f"engine={engine!r}; pass a name ({names}) or a fastbcd.Engine")
    return engine


class Request(NamedTuple):
    """What is to be scored: example holds one or two images as the net sees them."""

    net: nn.Module
    masks: MaskSet
    removals: list[Tensor]  # all of them, or some that are typical
    hypotheses: int
    images: int
    example: Tensor
    batch_size: int | None
    memory: int  # bytes that this call may take
    precision: str = "float32"

    @property
    def tolerance(self) -> float:
        """The difference of outputs that rounding explains, relative to the largest."""
        return 1e-9 if self.example.dtype == torch.float64 else 1e-4


class ScoringEngine(Protocol):
    """Computes the outputs of hypotheses."""

    name: str
    memory_format: torch.memory_format  # of the images

    def prepare(self, removals: dict[int, Tensor], lanes: int) -> Any:
        """What `logits` needs for these hypotheses (ids by number), at most `lanes` at a time."""

    def logits(self, x: Tensor, work: Any, base: bool, images: Tensor | None = None) -> Outputs:
        """(numbers, outputs [n, B, ...]) of the hypotheses, and of the base as number -1.

        images: int64 [B] on the CPU, which images of the data x are; None if they are none of it.
        Outputs are tensors in the structure that the net returns. A hypothesis that removes
        nothing may be left out: its outputs are those of the base.
        """


def difference_from_net(engine: ScoringEngine, request: Request, lanes: int) -> float:
    """The largest difference between an engine's outputs and the net's, relative to the latter.

    Compared are an image and a large random one, for the base, a hypothesis that removes half of
    the kept ReLUs at random, and one that removes half of the later ones. Outputs that are not
    finite in the net are not compared.
    """
    net, masks, example = request.net, request.masks, request.example
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(example[:1].shape, generator=generator, dtype=torch.float64)
    noise *= 10 * example.double().std().clamp(min=0.1).cpu()
    images = torch.cat([example[:1], noise.to(example)])
    kept = masks.bits.nonzero().flatten()
    halves = torch.rand(2, len(kept), generator=generator) < 0.5
    halves[1, : len(kept) // 2] = False
    removals = {k: kept[half] for k, half in enumerate(halves)}

    def outputs(one: ScoringEngine) -> dict[int, list[Tensor]]:
        """By number, the tensors among the outputs."""
        given = images.contiguous(memory_format=one.memory_format) if images.ndim == 4 else images
        found: dict[int, list[Tensor]] = {}
        for numbers, outputs in one.logits(given, one.prepare(removals, lanes), True):
            leaves = [t for t in tree_leaves(outputs) if isinstance(t, Tensor)]
            found.update({k: [t[i].clone() for t in leaves] for i, k in enumerate(numbers)})
        return found

    truths, worst = outputs(Sequential(net, masks)), 0.0
    set_masks(net, masks)
    for number, tensors in outputs(engine).items():
        if [t.shape for t in tensors] != [t.shape for t in truths[number]]:
            return torch.inf
        for found, truth in zip(tensors, truths[number], strict=True):
            finite = truth.isfinite()
            if finite.any():
                error, scale = (found - truth)[finite].abs().max(), truth[finite].abs().max()
                # NaN compares as larger than any difference.
                relative = (error / scale.clamp(min=1e-6)).nan_to_num(nan=torch.inf)
                worst = max(worst, float(relative))
    return worst

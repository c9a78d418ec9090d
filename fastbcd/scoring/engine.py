"""Engine: how hypotheses are scored, and the protocol that every engine implements.

The engine changes the speed, not the answers: each is held to the logits of the net itself.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fastbcd.masking.masks import MaskSet, set_masks
from fastbcd.runtime.validate import check_choice, check_whole
from fastbcd.scoring.profile import CPU, Profile
from fastbcd.scoring.sequential import Outputs, Sequential

ENGINES = ("auto", "sequential", "stacked", "collapsed")
PRECISIONS = ("float32", "mixed")


@dataclass(frozen=True)
class Engine:
    """Which engine scores hypotheses, and its limits; `engine=` takes one of these or a name.

    Args:
        name: "auto", "sequential", "stacked" or "collapsed". "auto" takes the cheapest.
        batch_size: images at a time; None: chosen from the cache or the memory.
        memory: bytes that the values of a pass, and a collapsed form, may take; None: half of
            the free memory of a CPU, 70 % of that of a GPU.
        wave: hypotheses that `choose` and `bcd` score together at most.
        precision: "float32"; or "mixed": hypotheses run in bf16, those of `collapsed` in TF32, and
            again in float32 where that may change an answer (docs/metrics.md). None: mixed on a
            GPU. What is not a net in float32 judged by its accuracy is always scored in its own
            precision.

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
    precision: str | None = None

    def __post_init__(self) -> None:
        check_choice("engine", self.name, ENGINES)
        check_whole("batch_size", self.batch_size, 1, optional=True)
        check_whole("memory", self.memory, 1, optional=True)
        check_whole("wave", self.wave, 1)
        if self.precision is not None:
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
    precision: str = "float32"  # or "mixed"
    profile: Profile = CPU

    @property
    def tolerance(self) -> float:
        """The difference of outputs that rounding explains, relative to the largest."""
        return 1e-9 if self.example.dtype == torch.float64 else 1e-4


class ScoringEngine(Protocol):
    """Computes the outputs of hypotheses."""

    name: str
    memory_format: torch.memory_format  # of the images
    fast: str  # the precision of its products in mixed precision

    def prepare(self, removals: dict[int, Tensor], lanes: int) -> Any:
        """What `logits` needs for these hypotheses (ids by number), at most `lanes` at a time."""

    def logits(
        self, x: Tensor, work: Any, base: bool, images: Tensor | None = None
    ) -> Outputs:
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
    example = request.example[:1]
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(example.shape, generator=generator, dtype=torch.float64)
    noise *= 10 * request.example.double().std().clamp(min=0.1).cpu()
    images = torch.cat([example, noise.to(example)])
    kept = request.masks.bits.nonzero().flatten()
    halves = torch.rand(2, len(kept), generator=generator) < 0.5
    halves[1, : len(kept) // 2] = False
    removals = {number: kept[half] for number, half in enumerate(halves)}
    truths = _outputs(Sequential(request.net, request.masks), images, removals, lanes)
    set_masks(request.net, request.masks)
    worst = 0.0
    for number, tensors in _outputs(engine, images, removals, lanes).items():
        if [t.shape for t in tensors] != [t.shape for t in truths[number]]:
            return torch.inf
        for tensor, truth in zip(tensors, truths[number], strict=True):
            finite = truth.isfinite()
            if finite.any():
                error = (tensor - truth)[finite].abs().max()
                relative = error / truth[finite].abs().max().clamp(min=1e-6)
                # NaN compares as larger than any difference.
                worst = max(worst, float(relative.nan_to_num(nan=torch.inf)))
    return worst


def _outputs(
    engine: ScoringEngine, images: Tensor, removals: dict[int, Tensor], lanes: int
) -> dict[int, list[Tensor]]:
    """By number, the tensors among the outputs."""
    if images.ndim == 4:
        images = images.contiguous(memory_format=engine.memory_format)
    outputs: dict[int, list[Tensor]] = {}
    for numbers, values in engine.logits(images, engine.prepare(removals, lanes), True):
        tensors = [t for t in tree_leaves(values) if isinstance(t, Tensor)]
        for i, number in enumerate(numbers):
            outputs[number] = [t[i].clone() for t in tensors]
    return outputs

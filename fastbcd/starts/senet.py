"""senet: SENet (ICLR 2023), a starting point whose ReLUs are shared out by layer sensitivity.

    start = fastbcd.senet(net, data, budget=30_000, test=test, run_dir="runs/senet-30k")
    fastbcd.bcd(start.model, data, budget=15_000, teacher=dense)

The paper (Kundu et al., arXiv 2301.09254) has three stages. Its text could not be read: equation
numbers are not verified, and none is given. The steps follow its abstract, summaries of it, and the
code that two of its authors published with RLNet (CVPR workshops 2024, sreetamasarkar/rlnet), which
runs stages 2 and 3 and has the shares of stage 1 as numbers.

1. ReLU sensitivity. The dense net's weights are pruned to a density d. The pruning sensitivity of
   layer l is the share of its weights that is left, η_l, its ReLU sensitivity 1 - η_l. The budget
   goes to the layers in proportion to 1 - η_l, at most a layer's size each; what is left over goes
   to the others in the same proportion, until it is spent. (`allocate` returns the code's shares.)
2. Mask search. Masks start at random, with these counts. The partial-ReLU net is trained with
   CE/2 + KL/2 from the all-ReLU net. After each epoch the mask of each layer becomes the positions
   where |a_s - a_t|, summed over the epoch's images, is largest; a_s are the activations of the
   partial-ReLU net, a_t of the other. It ends when masks hardly change (normalised Hamming
   distance); the code trains for 150 epochs and takes the most accurate.
3. Fine-tune, 240 epochs in the code, with fixed masks and the loss
   (1 - λ)·CE + λ·KL + β/2 · Σ over layers of ‖a_s/‖a_s‖ - a_t/‖a_t‖‖, the post-ReLU activation
   mismatch. The code compares the attention maps of four layers, the mean over channels of a².

What is left open, or what a net of any structure needs, and what was chosen:

- Pruning: by magnitude, once, with one threshold for all layers. The authors train a sparse net.
- The layer of a site: all layers with a weight of two or more dimensions that run after the site
  before it. So a ReLU after an addition has the last convolution of the block and the one of the
  shortcut. A site with none has those of the site before it.
- Weights: those that are given. The code trains the partial-ReLU net from random ones.
- a_s in stage 2: as if the site had no ReLU, that is, with its replacement at every position. The
  code has the mask in place: a kept position then hardly differs from the teacher's, loses its
  ReLU, differs, and gets it back, so that masks alternate and do not settle.
- The images of stage 2: the first 5,000 for training, without crops and flips, in eval mode.
- λ and KL: the loss is CE + distill · T² · KL, which is the paper's for λ = distill/(1 + distill),
  times 1 + distill. The default is λ = 1/2, T = 4, as in the code. Stage 2 has the loss and
  optimizer of stage 3.
- β: 1,000. The term is that of attention transfer (Zagoruyko and Komodakis, 2017), whose 1,000 is
  divided by the number of elements: 0.015 to 0.12 for the sites of ResNet18. Here the mean over the
  batch is weighted by `Finetune.mismatch`, 0.1 for every site.
- Numbers of epochs and learning rates.

Not implemented: masks by channel, and SENet++ (its Figure 3), which trains one net for several
widths: a narrower net has the first channels of every layer (ordered dropout) and batch norms of
its own. That changes the layers of the network and not its masks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastbcd import ops
from fastbcd.data.images import ImageData
from fastbcd.masking.activations import MaskedActivation
from fastbcd.masking.masks import MaskSet, mask_modules, set_masks
from fastbcd.masking.twin import twin
from fastbcd.private.target import Target
from fastbcd.runtime import ranks
from fastbcd.runtime.validate import check_number, check_whole
from fastbcd.scoring.accuracy import first_outputs
from fastbcd.scoring.metric import at_least_float32
from fastbcd.starts.mask_training import History, Method, StartingPoint, train_masks
from fastbcd.training.loop import Session
from fastbcd.training.precision import training_dtype
from fastbcd.training.settings import Finetune
from fastbcd.training.teacher import TeacherLogits

CHOSEN = Finetune(epochs=100, lr=1e-2, mismatch=0.1)
IMAGES, BATCH = 5_000, 32  # that masks are relearned on; how many at a time


def senet(
    net: nn.Module, data: Any, budget: int | Target, *, teacher: nn.Module | None = None,
    test: Any = None, density: float = 0.1, epochs: int = 40, every: int = 4,
    tolerance: float = 0.05, lr: float = 1e-2, batch_size: int = 128,
    finetune: Finetune | None = CHOSEN, seed: int = 0,
    run_dir: str | os.PathLike[str] | None = None, resume: str | bool = "auto",
    progress: bool = False,
) -> StartingPoint:  # fmt: skip
    """Linearise the net in place, down to exactly `budget` ReLUs; fastbcd/starts/senet.py says how.

    Args:
        net: with sites of any kind; those with polynomials keep them. Removed ReLUs stay removed;
            frozen modules stay frozen, see `Finetuner`.
        budget: ReLUs to keep, or a `private.Target`: of the number of ReLUs that it has room for,
            some go at random where its rounds need it.
        teacher: the net with all ReLUs, converted or not, with the same sites; None: the net as it
            is given.
        density: the share of the weights that pruning leaves, for the sensitivity of the layers.
        epochs, every: masks are relearned after every so many epochs, and after the last.
        tolerance: stop when at most this share of the kept ReLUs is new.
        lr, batch_size: of these epochs; the learning rate is constant.
        finetune: after the masks are fixed; None: no fine-tune. Its optimizer, losses, crops, flips
            and mixed precision are also those of the epochs before.
        run_dir, resume, progress: as in `snl`.

    A record of the history has "changed", the share of the kept ReLUs that is new, if masks were
    relearned.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 4, 4), torch.arange(50) % 3
    >>> start = senet(net, data, 2, epochs=4, finetune=Finetune(epochs=1, mismatch=0.1))
    >>> start.masks.count(), "changed" in start.history[-1]
    (2, True)
    """
    given = dict(locals())
    check_number("density", density, 0, strictly=True)
    if density > 1:
        raise ValueError(f"density={density}; it is a share, at most 1")
    check_whole("epochs", epochs, 0)
    check_whole("every", every, 1)
    check_number("tolerance", tolerance, 0)
    check_number("lr", lr, 0, strictly=True)
    return train_masks(Sensitive, given)


def allocate(budget: int, weights: Sequence[float], most: Sequence[int]) -> list[int]:
    """`budget` shared out in proportion to the weights, at most most[i] each.

    Rounded down, and the rest goes to the largest fractions, ties by position. Places of weight 0
    get something only when all others are full, then in equal parts.

    >>> allocate(10, [1, 1, 3], [8, 8, 4])
    [3, 3, 4]
    """
    if budget > sum(most):
        raise ValueError(f"budget={budget:,}; there is room for {sum(most):,}")
    given = [0] * len(most)
    while rest := budget - sum(given):  # the places that are not full share what is left
        some = [i for i, n in enumerate(given) if n < most[i]]
        some = [i for i in some if weights[i] > 0] or some
        parts = [weights[i] or 1.0 for i in some]
        share = {i: rest * part / math.fsum(parts) for i, part in zip(some, parts, strict=True)}
        if full := [i for i in some if share[i] >= most[i]]:
            for i in full:
                given[i] = most[i]
            continue
        for i in some:
            given[i] = math.floor(share[i])
        order = sorted(some, key=lambda i: given[i] - share[i])
        for i in order[: budget - sum(given)]:
            given[i] += 1
    return given


def relu_sensitivity(net: nn.Module, data: ImageData, density: float) -> list[float]:
    """For each site, the share of its layers' weights that pruning to `density` removes."""
    fed: dict[nn.Module, list[Tensor]] = {}
    recent, last = list[Tensor](), list[Tensor]()

    def called(module: Any, given: Any, output: Any) -> None:
        nonlocal last
        if not isinstance(module, MaskedActivation):
            recent.append(module.weight)
            return
        last = recent.copy() or last
        fed.setdefault(module, last)
        recent.clear()

    layers = weighted(net)
    sites = list(mask_modules(net).values())
    handles = [module.register_forward_hook(called) for module in (*layers, *sites)]
    try:
        first_outputs(net, data, "the net", 1)
    finally:
        for handle in handles:
            handle.remove()
    size = {id(w): w.detach().float().abs().cpu() for w in (layer.weight for layer in layers)}
    every = torch.cat([s.flatten() for s in size.values()])
    cut = every.kthvalue(len(every) - max(1, round(density * len(every))) + 1).values
    found = []
    for site in sites:
        own = [size[id(w)] for w in fed.get(site, ())]
        left = sum(int((s >= cut).sum()) for s in own) / max(1, sum(s.numel() for s in own))
        found.append(1 - (left if own else density))
    return found


def weighted(net: nn.Module) -> list[Any]:
    """The net's layers with a weight of two or more dimensions: convolutions, linear layers."""
    return [m for m in net.modules() if getattr(getattr(m, "weight", None), "ndim", 0) >= 2]


class Probe(MaskedActivation):
    """An activation that adds itself, and its replacement's output at all positions, to a list.

    It computes what the activation computes.
    """

    def __init__(self, act: MaskedActivation, seen: list[tuple[Probe, Tensor]]) -> None:
        super().__init__(tuple(act.mask.shape), device=act.mask.device)
        self.act, self.seen = act, seen
        self.total = torch.zeros(act.mask.shape, dtype=torch.float64, device=act.mask.device)

    def activate(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The activation of x + residual, [B, *shape]."""
        bare, coef = x if residual is None else x + residual, self.act.coefficients()
        if coef is not None:
            bare = ops.masked_poly(bare, torch.zeros_like(self.act.mask), coef)
        self.seen.append((self, at_least_float32(bare)))
        return self.act.activate(x, residual)


@torch.no_grad()
def differences(net: nn.Module, teacher: TeacherLogits, data: ImageData) -> list[Tensor]:
    """For each site, the mean over images of |a_s - a_t|, float64 [*shape], on the CPU.

    a_t: the teacher's outputs of the site. a_s: the net's, if all ReLUs of this site were removed.
    """
    seen: list[tuple[Probe, Tensor]] = []
    model = twin(net, lambda act: Probe(act, seen)).eval()
    mine = data.shard(ranks.rank(), ranks.world())
    for x, _ in mine.batches(BATCH, dtype=training_dtype(net)):
        model(x)
        for (probe, own), given in zip(seen, teacher.of(x, at_least_float32)[1], strict=True):
            probe.total += (own - given).abs().sum(0, dtype=torch.float64)
        seen.clear()
    probes: Any = [m for m in mask_modules(model).values() if isinstance(m, Probe)]
    return [ranks.all_sum(probe.total.cpu()) / len(data) for probe in probes]


class Sensitive(Method):
    """SENet's mask training."""

    name = "senet"
    optimizer: ClassVar[dict[str, Any]] = {}  # the fine-tune's
    matched = True

    @staticmethod
    def prepare(net: nn.Module) -> nn.Module:
        if not weighted(net):
            raise ValueError(
                f"{type(net).__name__} has no layer with a weight of two or more dimensions, whose "
                f"pruning gives the sensitivity of its sites: use fastbcd.snl"
            )
        return net

    def __init__(self, net: nn.Module, s: SimpleNamespace) -> None:
        super().__init__(net, s)
        self.data = s.data.first(min(IMAGES, len(s.data)))
        sensitivity, kept = relu_sensitivity(net, s.data, s.density), self.start.counts().values()
        self.counts = allocate(s.budget, sensitivity, list(kept))
        drawn = torch.Generator().manual_seed(s.seed)
        values = [torch.rand(site.shape, generator=drawn) for site in self.start.sites]
        set_masks(net, self.largest_by_site(values))

    def done(self, history: History) -> bool:
        settled = bool(history) and history[-1].get("changed", math.inf) <= self.s.tolerance
        return settled or len(history) >= self.s.epochs or self.s.budget == self.start.count()

    def epoch(self, session: Session, epoch: int, bar: Any) -> dict[str, Any]:
        loss = session.epoch(epoch, self.s.lr, bar=bar)
        record = {"count": self.s.budget, "lr": self.s.lr, "loss": loss}
        if (epoch + 1) % self.s.every == 0 or epoch + 1 == self.s.epochs:
            before, teacher = self.bits(), session.trainer.teacher
            assert teacher is not None  # as `matched` says
            set_masks(self.model, self.largest_by_site(differences(self.model, teacher, self.data)))
            record["changed"] = int((self.bits() & ~before).sum()) / max(1, self.s.budget)
        return record

    def largest_by_site(self, values: Sequence[Tensor]) -> MaskSet:
        """At each site its count of the units kept at the start, those with the largest values."""
        chosen = torch.zeros_like(self.start.bits)
        kept = zip(self.start.sites, self.start.split(), strict=True)
        for (site, allowed), value, count in zip(kept, values, self.counts, strict=True):
            value = value.flatten().masked_fill(~allowed.flatten(), -math.inf)
            order = torch.sort(value, descending=True, stable=True).indices
            chosen[site.start + order[:count]] = True
        return MaskSet(self.start.sites, chosen)

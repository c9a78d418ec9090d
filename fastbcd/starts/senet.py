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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastbcd.data.images import ImageData
from fastbcd.descent.budget import Budget
from fastbcd.masking.activations import MaskedActivation
from fastbcd.masking.masks import MaskSet, mask_modules, set_masks
from fastbcd.ops.masked import masked
from fastbcd.runs.step import Epoch
from fastbcd.runtime import ranks
from fastbcd.runtime.module_mode import eval_mode
from fastbcd.runtime.settings import setting, with_settings
from fastbcd.scoring.accuracy import first_outputs
from fastbcd.scoring.metric import at_least_float32
from fastbcd.starts.mask_training import StartingPoint, train_masks
from fastbcd.starts.method import TUNED, MaskEpoch, MaskTraining, Method, allocate
from fastbcd.training.mismatch import noted
from fastbcd.training.precision import training_dtype
from fastbcd.training.settings import Finetune
from fastbcd.training.teacher import TeacherLogits

IMAGES = 5_000  # that masks are relearned on
BATCH = 32  # of them at a time


@dataclass(frozen=True, kw_only=True)
class SenetSettings(MaskTraining):
    """The settings of `senet`."""

    density: float = setting(
        0.1,
        "share of the weights that pruning leaves, for the sensitivity of the layers",
        above=0,
        most=1,
    )
    epochs: int = setting(40, "of the mask training at most", least=0)
    every: int = setting(
        4, "masks are relearned after every so many epochs, and after the last", least=1
    )
    tolerance: float = setting(
        0.05, "stop when at most this share of the kept ReLUs is new", least=0
    )
    lr: float = setting(
        1e-2, "learning rate of the mask training, which is constant", above=0
    )
    finetune: Finetune | None = setting(
        Finetune(epochs=100, lr=1e-2, mismatch=0.1), TUNED
    )


@with_settings(SenetSettings)
def senet(
    net: nn.Module, data: Any, budget: int | Budget, **settings: Any
) -> StartingPoint:
    """Linearise the net in place, down to exactly `budget` ReLUs; fastbcd/starts/senet.py says how.

    Args:
        net: with sites of any kind; those with polynomials keep them. Removed ReLUs stay removed;
            frozen modules stay frozen, see `Finetuner`.
        data: the train set, as in `bcd`.
        budget: ReLUs to keep, or a `private.Target`: of the number of ReLUs that it has room for,
            some go at random where its rounds need it.

    The teacher is the net with all ReLUs, converted or not, with the same sites. A record of the
    history has "changed" in its notes, the share of the kept ReLUs that is new, if masks were
    relearned.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 4, 4), torch.arange(50) % 3
    >>> start = senet(net, data, 2, epochs=4, finetune=Finetune(epochs=1, mismatch=0.1))
    >>> start.masks.count(), "changed" in start.history[-1].notes
    (2, True)
    """
    return train_masks(Sensitive, net, data, budget, SenetSettings(**settings))


def relu_sensitivity(net: nn.Module, data: ImageData, density: float) -> list[float]:
    """For each site, the share of its layers' weights that pruning to `density` removes."""
    layers = weighted(net)
    sites = list(mask_modules(net).values())
    with noted([*layers, *sites], lambda module, inputs, output: module) as calls:
        first_outputs(net, data, "the net", 1)
    weights = torch.cat([magnitudes(layer) for layer in layers])
    smallest = len(weights) - max(1, round(density * len(weights)))
    cut = weights.kthvalue(smallest + 1).values
    recent: list[Tensor] = []  # weights of the layers since the last site
    share = 1 - density  # of a site without layers: that of the whole net
    sensitivity: dict[nn.Module, float] = {}
    for module in calls:
        if not isinstance(module, MaskedActivation):
            recent.append(magnitudes(module))
            continue
        if recent:
            fed = torch.cat(recent)
            share = 1 - int((fed >= cut).sum()) / len(fed)
            recent = []
        sensitivity.setdefault(module, share)
    return [sensitivity.get(site, 1 - density) for site in sites]


def weighted(net: nn.Module) -> list[Any]:
    """The net's layers with a weight of two or more dimensions: convolutions, linear layers."""
    modules: list[Any] = [m for m in net.modules() if hasattr(m, "weight")]
    return [m for m in modules if m.weight is not None and m.weight.ndim >= 2]


def magnitudes(layer: Any) -> Tensor:
    """|w| of a layer's weights, on the CPU."""
    return layer.weight.detach().float().abs().cpu().flatten()


@torch.no_grad()
def differences(
    net: nn.Module, teacher: TeacherLogits, data: ImageData
) -> list[Tensor]:
    """For each site, the mean over images of |a_s - a_t|, float64 [*shape], on the CPU.

    a_t: the teacher's outputs of the site. a_s: the net's, if all ReLUs of this site were removed.
    """
    acts = mask_modules(net).values()
    totals = {act: torch.zeros_like(act.mask, dtype=torch.float64) for act in acts}

    def bare(act: Any, inputs: list[Tensor], output: Tensor) -> tuple[Any, Tensor]:
        none = torch.zeros_like(act.mask)
        without = masked(sum(inputs[1:], inputs[0]), none, act.coefficients())
        return act, at_least_float32(without)

    mine = data.shard(ranks.rank(), ranks.world())
    for x, _ in mine.batches(BATCH, dtype=training_dtype(net)):
        with noted(acts, bare) as calls, eval_mode(net):
            net(x)
        outputs = teacher.net.of(x, at_least_float32).activations
        for (act, without), output in zip(calls, outputs, strict=True):
            totals[act] += (without - output).abs().sum(0, dtype=torch.float64)
    return [ranks.all_sum(total.cpu()) / len(data) for total in totals.values()]


class Sensitive(Method):
    """SENet's mask training."""

    name = "senet"
    matched = True
    settings: SenetSettings

    @classmethod
    def prepare(cls, net: nn.Module, settings: SenetSettings) -> nn.Module:
        mask_modules(net)  # the first error of a net without masks
        if not weighted(net):
            raise ValueError(
                f"{type(net).__name__} has no layer with a weight of two or more dimensions, whose "
                f"pruning gives the sensitivity of its sites: use fastbcd.snl"
            )
        return net

    def begin(self) -> None:
        self.images = self.data.first(min(IMAGES, len(self.data)))
        sensitivity = relu_sensitivity(self.net, self.data, self.settings.density)
        sizes = list(self.start.counts().values())
        self.counts = allocate(self.budget, sensitivity, sizes)
        generator = torch.Generator().manual_seed(self.settings.seed)
        values = [
            torch.rand(site.shape, generator=generator) for site in self.start.sites
        ]
        set_masks(self.net, self.largest_by_site(values))

    def train(self, epoch: MaskEpoch) -> None:
        s = self.settings
        epoch.record.lr = s.lr
        epoch.train(s.lr)
        if epoch.record.number % s.every == 0 or epoch.record.number == s.epochs:
            before = self.bits()
            teacher = epoch.session.trainer.teacher
            assert teacher is not None  # as `matched` says
            values = differences(self.net, teacher, self.images)
            set_masks(self.net, self.largest_by_site(values))
            new = int((self.bits() & ~before).sum())
            epoch.record.notes["changed"] = new / max(1, self.budget)

    def done(self, history: Sequence[Epoch]) -> bool:
        changed = math.inf
        if history:
            changed = history[-1].notes.get("changed", math.inf)
        settled = changed <= self.settings.tolerance
        return settled or super().done(history) or self.budget == self.start.count()

    def largest_by_site(self, values: Sequence[Tensor]) -> MaskSet:
        """At each site its count of the units kept at the start, those with the largest values."""
        bits = torch.zeros_like(self.start.bits)
        ranked = self.ranked(torch.cat([value.flatten() for value in values]))
        for site, count in zip(self.start.sites, self.counts, strict=True):
            inside = (ranked >= site.start) & (ranked < site.start + site.numel)
            bits[ranked[inside][:count]] = True
        return MaskSet(self.start.sites, bits)

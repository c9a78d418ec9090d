"""deepreduce: DeepReDuce (ICML 2021), a starting point that removes ReLUs by whole layers.

    start = fastbcd.deepreduce(net, data, budget=30_000, test=test, run_dir="runs/deepreduce-30k")
    fastbcd.bcd(start.model, data, budget=15_000, teacher=dense)

As published (Jha et al., arXiv 2103.01396), each net being trained with distillation from the net
with all its ReLUs. The paper's text could not be read: the steps have its names, in the order of
its Figure 4, and follow summaries of it and the networks published with it. Equation numbers are
not verified, and none is given; the power w is not verified either. Steps 2 to 4 agree with the
published numbers of ReLUs on CIFAR-100: ResNet18 has 229,376 in its stages 2 to 4 and 196,608 in
stages 2 and 3, and each point is one of them or a half, a quarter, … of it.

1. Criticality. For each stage k, a net with the ReLUs of stage k alone is trained: it reaches the
   accuracy A_k with R_k ReLUs, and C_k = A_k / R_k^w.
2. ReLU Culling. The stages lose all their ReLUs, one stage after the other, the least critical
   first.
3. ReLU Thinning. Of what each culled net keeps, every second layer loses its ReLUs: the first or
   the second one of every residual block.
4. ReLU Reshaping. Fewer channels, or a smaller resolution, leave fewer ReLUs in each layer.
5. Of all these nets, those with the best accuracy for their number of ReLUs are the result.

What is left open, or depends on a new network, was chosen as follows. A stage is a run of
consecutive sites with the same height and width (of the same size, where sites have none). A_k is
measured on the train set, in percent; w is that of MnasNet's weighted product, 0.07. All trainings
start from the given weights. Thinning keeps the first, third, … site of a stage. Reshaping does not
change the network: it keeps ReLUs in fewer channels, the same share of every site, and takes the
channels with the largest saliency; the last channel of a site is split. So every culled or thinned
net with enough ReLUs is cut to exactly the budget; all these candidates are trained for a few
epochs, and the one with the highest accuracy on the train set is trained for the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fastbcd.descent.budget import Budget
from fastbcd.descent.saliency import rounded, saliency
from fastbcd.masking.masks import MaskSet, Site, masks, set_masks
from fastbcd.runs import fingerprint as snapshots
from fastbcd.runs.step import Epoch
from fastbcd.runtime.settings import setting, with_settings
from fastbcd.scoring.accuracy import accuracy
from fastbcd.starts.mask_training import StartingPoint, train_masks
from fastbcd.starts.method import MaskEpoch, MaskTraining, Method, allocate
from fastbcd.training.rates import cosine


@dataclass(frozen=True, kw_only=True)
class DeepReduceSettings(MaskTraining):
    """The settings of `deepreduce`."""

    epochs: int = setting(
        200,
        "of all trainings together. The result is trained for those that are left by the trials: "
        "one for each of D stages, and up to 2·D for candidates",
        least=1,
    )
    trial_epochs: int = setting(10, "of each trial", least=1)
    lr: float = setting(
        0.01, "at the start of each training; it falls to 0 on a cosine", above=0
    )
    discount: float = setting(
        0.07, "w, the power of the number of ReLUs in the criticality", least=0
    )


@with_settings(DeepReduceSettings)
def deepreduce(
    net: nn.Module, data: Any, budget: int | Budget, **settings: Any
) -> StartingPoint:
    """Linearise whole layers and channels of the net, in place, down to exactly `budget` ReLUs.

    Args:
        net: with `MaskedReLU` sites. Removed ReLUs stay removed; frozen modules stay frozen, see
            `Finetuner`.
        data: the train set, as in `bcd`.
        budget: ReLUs to keep, or a `private.Target`.

    A record of the history has the name of its training in its notes, "training"; the last one of a
    trial also "train_accuracy", and "criticality" if it is a stage's. A fine-tune is a further
    training of the result.

    >>> net = nn.Sequential(
    ...     nn.Flatten(), nn.Linear(16, 8), fastbcd.MaskedReLU(8), nn.Linear(8, 6),
    ...     fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 4, 4), torch.arange(50) % 3
    >>> start = deepreduce(net, data, 3, epochs=7, trial_epochs=1)
    >>> start.masks.count(), [record.notes["training"] for record in start.history][:2]
    (3, ['stage 1 alone', 'stage 2 alone'])
    """
    return train_masks(Reduction, net, data, budget, DeepReduceSettings(**settings))


def stages(m: MaskSet) -> list[list[Site]]:
    """The sites that keep a ReLU, by stage: consecutive sites of the same height and width.

    >>> m = MaskSet.full({"stem": (4, 8, 8), "a": (8, 8, 8), "b": (16, 4, 4), "head": (10,)})
    >>> [[site.name for site in stage] for stage in stages(m)]
    [['stem', 'a'], ['b'], ['head']]
    """
    counts = m.counts()
    kept = [site for site in m.sites if counts[site.name]]
    return [list(stage) for _, stage in groupby(kept, lambda s: s.shape[1:] or s.shape)]


def only(m: MaskSet, sites: Iterable[Site]) -> MaskSet:
    """Those of the kept ReLUs that are in these sites.

    >>> m = MaskSet.full({"a": (2,), "b": (3,)}).without([3])
    >>> only(m, [m.sites[1]]).counts()
    {'a': 0, 'b': 2}
    """
    bits = torch.zeros_like(m.bits)
    for site in sites:
        bits[site.start : site.start + site.numel] = True
    return MaskSet(m.sites, bits & m.bits)


def criticality(accuracy: float, relus: int, discount: float = 0.07) -> float:
    """C = A / R^w: the accuracy A of a stage alone, discounted by its number of ReLUs R.

    >>> criticality(60.0, 1000) > criticality(60.0, 8000) > criticality(50.0, 8000)
    True
    """
    return accuracy / relus**discount


def candidates(
    m: MaskSet, order: Sequence[int], scores: Tensor, budget: int
) -> dict[str, MaskSet]:
    """Masks with `budget` ReLUs by name: every culled and thinned net, where it has enough.

    order: the numbers of the stages, the least critical first. Equal masks are listed once.

    >>> m = MaskSet.full({"a": (4, 2, 2), "b": (4, 2, 2), "c": (8,)})
    >>> for name, kept in candidates(m, [0, 1], torch.rand(40), 8).items():
    ...     print(name, kept.counts())
    0 stages culled {'a': 3, 'b': 3, 'c': 2}
    0 stages culled, thinned {'a': 5, 'b': 0, 'c': 3}
    1 stages culled {'a': 0, 'b': 0, 'c': 8}
    """
    listed: dict[str, MaskSet] = {}
    for culled in range(len(order)):
        left = [stage for k, stage in enumerate(stages(m)) if k not in order[:culled]]
        for thinning, step in (("", 1), (", thinned", 2)):
            coarse = only(m, (site for stage in left for site in stage[::step]))
            if coarse.count() >= budget:
                fine = reshaped(coarse, scores, budget)
                if fine not in listed.values():
                    listed[f"{culled} stages culled{thinning}"] = fine
    return listed or {"nothing culled": m.copy()}


def reshaped(m: MaskSet, scores: Tensor, budget: int) -> MaskSet:
    """`budget` of the kept ReLUs: the same share of each site, whole channels by their mean score.

    Shares are rounded down; the sites with the largest remainders get one more.

    >>> m = MaskSet.full({"a": (2, 3), "b": (2,)})
    >>> reshaped(m, torch.tensor([1.0, 1, 1, 0, 9, 0, 1, 2]), 4).bits.int().tolist()
    [0, 0, 0, 1, 1, 1, 0, 1]
    """
    counts = list(m.counts().values())
    bits = torch.zeros_like(m.bits)
    quotas = allocate(budget, counts, counts)
    for site, kept, quota in zip(m.sites, m.split(), quotas, strict=True):
        values = scores[site.start : site.start + site.numel].view(site.shape)
        bits[site.start + by_channel(values, kept)[:quota]] = True
    return MaskSet(m.sites, bits)


def by_channel(scores: Tensor, kept: Tensor) -> Tensor:
    """The kept ids of a site [C, ...]: the channel with the largest mean score first, and in it the
    ReLU with the largest score.
    """
    kept = kept.reshape(len(kept), -1)
    values = scores.double().view_as(kept)
    means = values.where(kept, 0).sum(1) / kept.sum(1).clamp(min=1)
    ids = kept.flatten().nonzero().flatten()
    channels = ids // kept.shape[1]
    keys = rounded(values.flatten()[ids]), channels, rounded(means[channels])
    return ids[torch.from_numpy(np.lexsort(keys)).flip(0)]


class Trial(NamedTuple):
    """One training of the net, from the given weights, with other masks."""

    name: str
    masks: MaskSet
    epochs: int


class Reduction(Method):
    """DeepReDuce's trainings, one after the other."""

    name = "deepreduce"
    settings: DeepReduceSettings

    @classmethod
    def prepare(cls, net: nn.Module, settings: DeepReduceSettings) -> nn.Module:
        net = super().prepare(net, settings)
        count = len(stages(masks(net)))
        if settings.epochs <= 3 * count * settings.trial_epochs:
            raise ValueError(
                f"epochs={settings.epochs}; up to {3 * count} trials of {settings.trial_epochs} "
                f"epochs each, for {count} stages, must leave some: increase epochs or reduce "
                f"trial_epochs"
            )
        return net

    def begin(self) -> None:
        self.weights = snapshots.take(self.model)
        self.scores = saliency(self.net, self.data)

    def trials(self, history: Sequence[Epoch]) -> Iterator[Trial]:
        """All trainings in order; those of candidates depend on the accuracies of earlier ones."""
        epochs = self.settings.trial_epochs
        for number, stage in enumerate(stages(self.start), 1):
            yield Trial(f"stage {number} alone", only(self.start, stage), epochs)
        ended = [epoch.notes for epoch in history if "train_accuracy" in epoch.notes]
        values = [notes["criticality"] for notes in ended if "criticality" in notes]
        order = sorted(range(len(values)), key=values.__getitem__)
        fits = candidates(self.start, order, self.scores, self.budget)
        for name, kept in fits.items():
            yield Trial(name, kept, epochs)
        reached = {notes["training"]: notes["train_accuracy"] for notes in ended}
        best = max(fits, key=reached.__getitem__)
        left = self.settings.epochs - len(ended) * epochs
        yield Trial(f"{best}: the result", fits[best], left)

    def train(self, epoch: MaskEpoch) -> None:
        s = self.settings
        number = len(epoch.history)  # of the epoch in its training
        for trial in self.trials(epoch.history):
            if number < trial.epochs:
                break
            number -= trial.epochs
        if number == 0:
            snapshots.restore(self.model, self.weights)
            set_masks(self.model, trial.masks)
            epoch.session.optimizer.state.clear()
        notes = epoch.record.notes
        notes["training"] = trial.name
        epoch.record.lr = cosine(s.lr, number, trial.epochs)
        epoch.train(epoch.record.lr)
        last = len(epoch.history) + 1 == s.epochs
        if number + 1 == trial.epochs and not last:  # the end of a trial
            reached = accuracy(epoch.session.trainer.model, self.data)
            notes["train_accuracy"] = reached
            if trial.name.endswith(" alone"):
                relus = trial.masks.count()
                notes["criticality"] = criticality(reached, relus, s.discount)

    def values(self) -> Tensor:
        return self.scores

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

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fastbcd.descent.proposals import ranking
from fastbcd.descent.saliency import saliency
from fastbcd.masking.masks import MaskSet, Site, masks, set_masks
from fastbcd.private.target import Target
from fastbcd.runs import fingerprint as snapshots
from fastbcd.runtime.validate import check_number, check_whole
from fastbcd.scoring.accuracy import accuracy
from fastbcd.starts.mask_training import Method, StartingPoint, only_identity, train_masks
from fastbcd.training.loop import Session
from fastbcd.training.rates import cosine
from fastbcd.training.settings import Finetune


def deepreduce(
    net: nn.Module, data: Any, budget: int | Target, *, teacher: nn.Module | None = None,
    test: Any = None, epochs: int = 200, trial_epochs: int = 10, lr: float = 0.01,
    discount: float = 0.07, batch_size: int = 128, finetune: Finetune | None = None, seed: int = 0,
    run_dir: str | os.PathLike[str] | None = None, resume: str | bool = "auto",
    progress: bool = False,
) -> StartingPoint:  # fmt: skip
    """Linearise whole layers and channels of the net, in place, down to exactly `budget` ReLUs.

    Args:
        net: with `MaskedReLU` sites. Removed ReLUs stay removed; frozen modules stay frozen, see
            `Finetuner`.
        budget: ReLUs to keep, or a `private.Target`.
        teacher: for the distillation; None: the net as it is given.
        epochs: of all trainings together. The result is trained for those that are left by the
            trials: one for each of D stages, and up to 2·D for candidates.
        trial_epochs: of each trial.
        lr: at the start of each training; it falls to 0 on a cosine.
        discount: w, the power of the number of ReLUs in the criticality.
        finetune: a further training of the result; None: none. Its optimizer, crops, flips,
            temperature, distillation weight and mixed precision are those of all trainings.
        run_dir, resume, progress: as in `snl`.

    Each record of the history has the name of its training, `training`; the last one of a trial
    also `train_accuracy`, and `criticality` if it is a stage's.

    >>> net = nn.Sequential(
    ...     nn.Flatten(), nn.Linear(16, 8), fastbcd.MaskedReLU(8), nn.Linear(8, 6),
    ...     fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 4, 4), torch.arange(50) % 3
    >>> start = deepreduce(net, data, 3, epochs=7, trial_epochs=1)
    >>> start.masks.count(), [record["training"] for record in start.history][:2]
    (3, ['stage 1 alone', 'stage 2 alone'])
    """
    given = dict(locals())
    check_whole("trial_epochs", trial_epochs, 1)
    check_whole("epochs", epochs, 1)
    check_number("lr", lr, 0, strictly=True)
    check_number("discount", discount, 0)
    if isinstance(net, nn.Module) and epochs <= 3 * trial_epochs * (d := len(stages(masks(net)))):
        raise ValueError(
            f"epochs={epochs}; up to {3 * d} trials of {trial_epochs} epochs each, for {d} stages, "
            f"must leave some: increase epochs or reduce trial_epochs"
        )
    return train_masks(Reduction, given)


def stages(m: MaskSet) -> list[list[Site]]:
    """The sites that keep a ReLU, by stage: consecutive sites of the same height and width.

    >>> m = MaskSet.full({"stem": (4, 8, 8), "a": (8, 8, 8), "b": (16, 4, 4), "head": (10,)})
    >>> [[site.name for site in stage] for stage in stages(m)]
    [['stem', 'a'], ['b'], ['head']]
    """
    kept = [site for site in m.sites if m.counts()[site.name]]
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


def candidates(m: MaskSet, order: Sequence[int], scores: Tensor, budget: int) -> dict[str, MaskSet]:
    """Masks with `budget` ReLUs by name: every culled and thinned net, where it has enough.

    order: the numbers of the stages, the least critical first. Equal masks are listed once.

    >>> m = MaskSet.full({"a": (4, 2, 2), "b": (4, 2, 2), "c": (8,)})
    >>> for name, found in candidates(m, [0, 1], torch.rand(40), 8).items():
    ...     print(name, found.counts())
    0 stages culled {'a': 3, 'b': 3, 'c': 2}
    0 stages culled, thinned {'a': 5, 'b': 0, 'c': 3}
    1 stages culled {'a': 0, 'b': 0, 'c': 8}
    """
    found: dict[str, MaskSet] = {}
    for culled in range(len(order)):
        left = [stage for k, stage in enumerate(stages(m)) if k not in order[:culled]]
        for thinning, step in (("", 1), (", thinned", 2)):
            coarse = only(m, (site for stage in left for site in stage[::step]))
            if coarse.count() >= budget:
                fine = reshaped(coarse, scores, budget)
                if fine not in found.values():
                    found[f"{culled} stages culled{thinning}"] = fine
    return found or {"nothing culled": m.copy()}


def reshaped(m: MaskSet, scores: Tensor, budget: int) -> MaskSet:
    """`budget` of the kept ReLUs: the same share of each site, whole channels by their mean score.

    Shares are rounded down; the sites with the largest remainders get one more.

    >>> m = MaskSet.full({"a": (2, 3), "b": (2,)})
    >>> reshaped(m, torch.tensor([1.0, 1, 1, 0, 9, 0, 1, 2]), 4).bits.int().tolist()
    [0, 0, 0, 1, 1, 1, 0, 1]
    """
    sizes, total = torch.tensor(list(m.counts().values())), max(m.count(), 1)
    quotas = sizes * budget // total
    most = torch.sort(sizes * budget % total, descending=True, stable=True).indices
    quotas[most[: budget - int(quotas.sum())]] += 1
    bits = torch.zeros_like(m.bits)
    for site, kept, quota in zip(m.sites, m.split(), quotas.tolist(), strict=True):
        kept = kept.reshape(site.shape[0], -1)
        own = scores[site.start : site.start + site.numel].double().view_as(kept)
        means = own.where(kept, 0).sum(1) / kept.sum(1).clamp(min=1)
        place = ranking(means, torch.ones_like(means, dtype=torch.bool)).argsort()
        ids = ranking(own.flatten(), kept.flatten()).flip(0)  # the largest score first
        channel = place[ids // kept.shape[1]]
        ids = ids[torch.sort(channel, descending=True, stable=True).indices]
        bits[site.start + ids[:quota]] = True
    return MaskSet(m.sites, bits)


class Training(NamedTuple):
    """One training of the net, from the given weights, with other masks."""

    name: str
    masks: MaskSet
    epochs: int


class Reduction(Method):
    """DeepReDuce's trainings, one after the other."""

    name = "deepreduce"
    optimizer: ClassVar[dict[str, Any]] = {}  # the fine-tune's

    @staticmethod
    def prepare(net: nn.Module) -> nn.Module:
        return only_identity(net)

    def __init__(self, net: nn.Module, s: SimpleNamespace) -> None:
        super().__init__(net, s)
        self.given, self.scores = snapshots.take(self.model), saliency(net, s.data)
        self.stages = stages(self.start)
        self.measured: dict[str, float] = {}  # accuracy by the name of the training

    def begin(self, history: list[dict[str, Any]]) -> None:
        self.measured = {
            r["training"]: r["train_accuracy"] for r in history if "train_accuracy" in r
        }

    def trainings(self) -> Iterator[Training]:
        """All of them in order; those of candidates depend on the accuracies of the ones before."""
        s, many = self.s, len(self.stages) > 1
        alone = [(f"stage {k + 1} alone", only(self.start, x)) for k, x in enumerate(self.stages)]
        yield from (Training(*each, s.trial_epochs) for each in alone if many)
        value = [
            criticality(self.measured[name], m.count(), s.discount) if many else 0.0
            for name, m in alone
        ]
        order = sorted(range(len(alone)), key=value.__getitem__)
        found = candidates(self.start, order, self.scores, s.budget)
        trials = list(found.items()) if len(found) > 1 else []
        yield from (Training(*each, s.trial_epochs) for each in trials)
        best = max(found, key=lambda name: self.measured.get(name, 0.0))
        spent = (len(trials) + len(alone) * many) * s.trial_epochs
        yield Training(f"{best}: the result", found[best], s.epochs - spent)

    def epoch(self, session: Session, epoch: int, bar: Any) -> dict[str, Any]:
        number = epoch
        for training in self.trainings():
            if number < training.epochs:
                break
            number -= training.epochs
        if number == 0:
            snapshots.restore(self.model, self.given)
            set_masks(self.model, training.masks)
            session.optimizer.state.clear()
        lr = cosine(self.s.lr, number, training.epochs)
        record: dict[str, Any] = {
            "training": training.name, "count": training.masks.count(), "lr": lr,
            "loss": session.epoch(epoch, lr, bar=bar),
        }  # fmt: skip
        if number == training.epochs - 1 and epoch < self.s.epochs - 1:  # the end of a trial
            found = self.measured[training.name] = accuracy(session.trainer.model, self.s.data)
            record["train_accuracy"] = found
            if training.name.endswith(" alone"):
                record["criticality"] = criticality(found, record["count"], self.s.discount)
        return record

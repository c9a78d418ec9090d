"""relupruner: ReLUPruner (AAAI 2026), a starting point that ranks ReLUs by a Taylor expansion.

    start = fastbcd.relupruner(net, data, budget=30_000, test=test, run_dir="runs/relupruner-30k")
    fastbcd.bcd(start.model, data, budget=15_000, teacher=dense)

As published (Li et al., AAAI 2026, Algorithm 1), a net is trained with cross-entropy and
distillation (Eq. 10), each ReLU with a gate g = 1 that pruning sets to 0 (Eq. 2).

1. The loss is expanded in g (Eq. 5). Let z be the input of a unit and a its output. The terms are
   dL/da·(relu(z) - z) (Eq. 6) and E[(dL/dz)²]·(relu(z) - z)² (Eq. 7).
2. The importance of a unit is their sum, times how often z was negative in the last M batches
   (Eq. 8), averaged over batches.
3. That of a layer is the mean norm of dL/da times its root mean square (Eq. 9). The product of
   both ranks all units of the net.
4. The largest are kept: all of them first, then fewer and fewer, and at the end masks change less
   often. The paper gives no formula.
5. A fine-tune adds β = 1,000 times SENet's mismatch of activations (Eq. 11).

The authors' code (Orange2019220/ReluPruner) differs from these equations and says the rest. It is
what was chosen: results and published files come from it. After every batch

1. each unit has a value, from its input z and the gradient g of the loss (a mean over the batch) at
   its output,

       v = w · (E|g·z| · P(z < 0) + E[z²] · F / 2)

   with means over the batch, P over the last ten batches, F the moving average (0.99) of E[g²];
   so positive z count, too, and P is a factor of the first term alone;
2. w is G·√(Φ + 1e-8)·(1 + 0.2·depth), scaled to [0.1, 1.1] over the layers, with G and Φ the moving
   averages (0.95) of the mean norm of g and of E[g²] up to the batch before, and depth from 0 to 1;
3. the importance is the moving average of v, with 0.95; the paper says 0.9;
4. every `interval` batches the units with the largest importance are kept, whether or not they
   were before: all of them in the first `warmup` epochs, then fewer on a cosine down to the
   budget, which is reached after 0.6 of the other epochs; from then on every 2·`interval` batches.

The code trains masks for 150 epochs with learning rate 0.05, from random weights. The paper says
0.1, and 150, 100 and 30 epochs for CIFAR-10, CIFAR-100 and Tiny ImageNet. Here the given weights
are trained. The code rounds a share of ReLUs; here the budget is exact.

Eq. 6 is -t of our `saliency`, which is E|t|, at fixed weights, without Eq. 7 to 9; and a ReLU that
`bcd` removed stays removed. So `bcd` with `Saliency(temperature=0)` is another method.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastbcd import ops
from fastbcd.descent.budget import Budget
from fastbcd.masking.twin import twin
from fastbcd.runtime import ranks
from fastbcd.runtime.settings import setting, with_settings
from fastbcd.starts.mask_training import StartingPoint, train_masks
from fastbcd.starts.method import TUNED, MaskEpoch, MaskTraining, Method, TrainedMask
from fastbcd.training.settings import Finetune

BATCHES = 10  # over which P(z < 0) is averaged
SLOW = 0.95  # of the moving averages
FISHER = 0.99  # of that of E[g²]
REACHED = 0.6  # of the epochs after the warm-up, until the budget is reached


@dataclass(frozen=True, kw_only=True)
class ReluPrunerSettings(MaskTraining):
    """The settings of `relupruner`; the defaults are those of the authors' code.

    Their fine-tune also matches attention maps; `Finetune(mismatch=…)` is the nearest.
    """

    epochs: int = setting(150, "of the mask training", least=1)
    lr: float = setting(
        0.05, "learning rate of the mask training, which is constant", above=0
    )
    warmup: int = setting(4, "epochs at its start that keep all ReLUs", least=0)
    interval: int = setting(
        100, "batches between two choices of the ReLUs that are kept", least=1
    )
    finetune: Finetune | None = setting(Finetune(epochs=240, lr=0.01), TUNED)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.finetune is not None and self.finetune.compile:
            raise ValueError(
                "finetune.compile=True; relupruner reads activations: use compile=False"
            )


@with_settings(ReluPrunerSettings)
def relupruner(
    net: nn.Module, data: Any, budget: int | Budget, **settings: Any
) -> StartingPoint:
    """Linearise the net in place, down to exactly `budget` ReLUs.

    Args:
        net: with `MaskedReLU` sites. Removed ReLUs stay removed; frozen modules stay frozen, see
            `Finetuner`.
        data: the train set, as in `bcd`.
        budget: ReLUs to keep, or a `private.Target`.

    If the last choice kept more than the budget, those with the largest importance are kept.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 4, 4), torch.arange(50) % 3
    >>> start = relupruner(net, data, 2, epochs=4, warmup=1, interval=1, finetune=None)
    >>> start.masks.count(), [record.count for record in start.history]
    (2, [6, 6, 6, 2])
    """
    return train_masks(Pruner, net, data, budget, ReluPrunerSettings(**settings))


def scheduled(epoch: int, *, epochs: int, warmup: int, count: int, budget: int) -> int:
    """How many of `count` ReLUs are kept in an epoch, 0 the first.

    >>> [scheduled(e, epochs=10, warmup=2, count=100, budget=10) for e in range(8)]
    [100, 100, 100, 96, 74, 34, 10, 10]
    """
    falling = int(REACHED * (epochs - warmup))  # epochs
    progress = (epoch - warmup) / max(1, falling)
    if epoch < warmup:
        return count
    if progress >= 1:
        return budget
    return budget + int((count - budget) * (1 + math.cos(math.pi * progress**1.5)) / 2)


class WatchedReLU(TrainedMask):
    """A masked ReLU that averages over batches what ReLUPruner ranks its units by.

    A backward pass writes sums over its samples to `units` and `totals`, which `learn` takes.
    """

    importance: Tensor
    fisher: Tensor
    negative: Tensor
    layer: Tensor  # G and Φ

    def __init__(self, mask: Tensor) -> None:
        super().__init__(mask)
        shape = self.mask.shape
        zeros = partial(torch.zeros, device=mask.device)
        self.register_buffer("importance", zeros(shape))
        self.register_buffer("fisher", zeros(shape))
        self.register_buffer("negative", zeros(BATCHES, *shape))
        self.register_buffer("layer", zeros(2))
        self.units = zeros(4, *shape, dtype=torch.float64)
        self.totals = zeros(2, dtype=torch.float64)

    def activate(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The activation of x + residual, [B, *shape]."""
        y = ops.masked_relu(x, self.mask, residual=residual)
        if y.requires_grad:
            z = x.detach()
            if residual is not None:
                z = z + residual.detach()
            y.register_hook(partial(self._watch, z))
        return y

    def _watch(self, z: Tensor, g: Tensor) -> None:
        """Σ|g·z|, Σ[z < 0], Σg², Σz² by unit, [4, *shape]; Σ‖g‖ and the number of samples, [2]."""
        z = z.float()
        g = g.float() / ranks.world()
        units = [(g * z).abs(), z < 0, g.square(), z.square()]
        self.units = torch.stack([t.sum(0).double() for t in units])
        norms = torch.linalg.vector_norm(g.flatten(1), dim=1).sum().double()
        self.totals = torch.stack([norms, norms.new_tensor(len(z))])

    def learn(self, weight: float, number: int) -> None:
        """Update the averages with the sums of batch `number`."""
        norms, count = self.totals
        product, negative, g2, z2 = (self.units / count.clamp(min=1e-9)).float()
        self.negative[number % BATCHES] = negative
        self.fisher.lerp_(g2, 1 - FISHER)
        share = self.negative.sum(0) / min(number + 1, BATCHES)
        self.importance.lerp_(
            weight * (product * share + z2 * self.fisher / 2), 1 - SLOW
        )
        norm = (norms / count.clamp(min=1e-9)).float()
        self.layer.lerp_(torch.stack([norm, g2.mean()]), 1 - SLOW)


class Pruner(Method):
    """ReLUPruner's mask training."""

    name = "relupruner"
    settings: ReluPrunerSettings

    def trained_net(self) -> nn.Module:
        return twin(self.net, lambda act: WatchedReLU(act.mask))

    def train(self, epoch: MaskEpoch) -> None:
        number = len(epoch.history)
        batches = len(epoch.session.trainer.sizes)

        def after_batch(done: int) -> None:
            if done > number * batches:
                self._learn(done - 1)
                self._choose(number, done)

        epoch.record.lr = self.settings.lr
        epoch.train(self.settings.lr, before_batch=after_batch)
        after_batch((number + 1) * batches)

    def values(self) -> Tensor:
        return self.gather("importance")

    def weights(self) -> list[float]:
        """w of each layer; 1 before the first batch."""
        layers = torch.stack([act.layer for act in self.acts]).double().cpu()
        depth = torch.arange(len(layers)) / max(1, len(layers) - 1)
        value = layers[:, 0] * (layers[:, 1] + 1e-8).sqrt() * (1 + 0.2 * depth)
        span = value.max() - value.min()
        if not span:
            return [1.0] * len(layers)
        return ((value - value.min()) / span + 0.1).tolist()

    def _learn(self, number: int) -> None:
        ranks.agree(sums for act in self.acts for sums in (act.units, act.totals))
        for act, weight in zip(self.acts, self.weights(), strict=True):
            act.learn(weight, number)

    def _choose(self, epoch: int, batches: int) -> None:
        """Keep the units with the largest importance, if it is time to choose."""
        s = self.settings
        count = scheduled(
            epoch,
            epochs=s.epochs,
            warmup=s.warmup,
            count=self.start.count(),
            budget=self.budget,
        )
        interval = s.interval
        if count == self.budget:
            interval *= 2
        if epoch >= s.warmup and batches % interval == 0:
            kept = self.start.without(self.ranked(self.values())[count:])
            for act, mask in zip(self.acts, kept.split(), strict=True):
                act.mask.copy_(mask)

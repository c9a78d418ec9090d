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
import os
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastbcd import ops
from fastbcd.masking.activations import MaskedActivation
from fastbcd.masking.masks import MaskSet
from fastbcd.private.target import Target
from fastbcd.runtime import ranks
from fastbcd.runtime.validate import check_number, check_whole
from fastbcd.starts.mask_training import (
    Method,
    StartingPoint,
    channels_last,
    only_identity,
    train_masks,
)
from fastbcd.training.loop import Session
from fastbcd.training.settings import Finetune

PUBLISHED = Finetune(epochs=240, lr=0.01)
BATCHES = 10  # over which P(z < 0) is averaged
SLOW, FISHER = 0.95, 0.99  # of the moving averages
REACHED = 0.6  # of the epochs after the warm-up, until the budget is reached


def relupruner(
    net: nn.Module, data: Any, budget: int | Target, *, teacher: nn.Module | None = None,
    test: Any = None, epochs: int = 150, lr: float = 0.05, warmup: int = 4, interval: int = 100,
    batch_size: int = 128, finetune: Finetune | None = PUBLISHED, seed: int = 0,
    run_dir: str | os.PathLike[str] | None = None, resume: str | bool = "auto",
    progress: bool = False,
) -> StartingPoint:  # fmt: skip
    """Linearise the net in place, down to exactly `budget` ReLUs.

    Args:
        net: with `MaskedReLU` sites. Removed ReLUs stay removed; frozen modules stay frozen, see
            `Finetuner`.
        budget: ReLUs to keep, or a `private.Target`.
        teacher: for the distillation; None: the net as it is given.
        epochs, lr: of the training of the masks, with a constant learning rate.
        warmup: epochs at its start that keep all ReLUs.
        interval: batches between two choices of the ReLUs that are kept.
        finetune: after the masks are fixed; None: no fine-tune. Its optimizer, crops, flips,
            temperature, distillation weight and mixed precision are those of the mask training too.
            The published one also matches attention maps; `Finetune(mismatch=…)` is the nearest.
        run_dir, resume, progress: as in `snl`.

    If the last choice kept more than the budget, those with the largest importance are kept.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 4, 4), torch.arange(50) % 3
    >>> start = relupruner(net, data, 2, epochs=4, warmup=1, interval=1, finetune=None)
    >>> start.masks.count(), [record["count"] for record in start.history]
    (2, [6, 6, 6, 2])
    """
    given = dict(locals())
    check_whole("epochs", epochs, 1)
    check_whole("warmup", warmup, 0)
    check_whole("interval", interval, 1)
    check_number("lr", lr, 0, strictly=True)
    if isinstance(finetune, Finetune) and finetune.compile:
        raise ValueError("finetune.compile=True; relupruner reads activations: use compile=False")
    return train_masks(Pruner, given)


def scheduled(epoch: int, *, epochs: int, warmup: int, count: int, budget: int) -> int:
    """How many of `count` ReLUs are kept in an epoch, 0 the first.

    >>> [scheduled(e, epochs=10, warmup=2, count=100, budget=10) for e in range(8)]
    [100, 100, 100, 96, 74, 34, 10, 10]
    """
    end = warmup + int(REACHED * (epochs - warmup))
    done = (epoch - warmup) / max(1, end - warmup)
    if epoch < warmup or done >= 1:
        return count if epoch < warmup else budget
    return budget + int((count - budget) * (1 + math.cos(math.pi * done**1.5)) / 2)


class WatchedReLU(MaskedActivation):
    """A masked ReLU that averages over batches what ReLUPruner ranks its units by.

    A backward pass writes sums over its samples to `seen`; `learn` takes those of all ranks.
    """

    importance: Tensor
    fisher: Tensor
    negative: Tensor
    layer: Tensor

    def __init__(self, mask: Tensor, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(tuple(mask.shape), device=mask.device)
        self.mask = channels_last(mask.bool())
        for name, shape in (("importance", ()), ("fisher", ()), ("negative", (BATCHES,))):
            zeros = torch.zeros(*shape, *mask.shape, dtype=dtype, device=mask.device)
            self.register_buffer(name, zeros)
        self.register_buffer("layer", torch.zeros(2, dtype=dtype, device=mask.device))  # G and Φ
        self.seen: Tensor | None = None

    def activate(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The activation of x + residual, [B, *shape]."""
        y = ops.masked_relu(x, self.mask, residual=residual)
        if y.requires_grad:
            z = x.detach() if residual is None else x.detach() + residual.detach()
            y.register_hook(partial(self._watch, z))
        return y

    def _watch(self, z: Tensor, g: Tensor) -> None:
        """Σ|g·z|, Σ[z < 0], Σg², Σz² by unit, then Σ‖g‖ and the number of samples: [4·n + 2]."""
        z, g = z.to(self.fisher.dtype), g.to(self.fisher.dtype) / ranks.world()
        sums = [(g * z).abs().sum(0), (z < 0).sum(0), g.square().sum(0), z.square().sum(0)]
        norms = torch.linalg.vector_norm(g.flatten(1), dim=1).sum()
        each = [t.flatten().double() for t in (*sums, norms, norms.new_tensor(len(z)))]
        self.seen = torch.cat(each)

    def seen_or_zeros(self) -> Tensor:
        """`seen`, or zeros if no gradient reached this activation."""
        zeros = self.fisher.new_zeros(4 * self.mask.numel() + 2, dtype=torch.float64)
        return zeros if self.seen is None else self.seen

    def learn(self, sums: Tensor, weight: float, number: int) -> None:
        """Update the averages with the sums of batch `number` over all ranks."""
        means = (sums[:-1] / sums[-1].clamp(min=1)).to(self.fisher.dtype)
        product, negative, g2, z2 = (t.view(self.mask.shape) for t in means[:-1].chunk(4))
        self.negative[number % BATCHES] = negative
        self.fisher.lerp_(g2, 1 - FISHER)
        share = self.negative.sum(0) / min(number + 1, BATCHES)
        self.importance.lerp_(weight * (product * share + z2 * self.fisher / 2), 1 - SLOW)
        self.layer.lerp_(torch.stack([means[-1], g2.mean()]), 1 - SLOW)


class Pruner(Method):
    """ReLUPruner's mask training."""

    name = "relupruner"
    optimizer: ClassVar[dict[str, Any]] = {}  # the fine-tune's

    @staticmethod
    def prepare(net: nn.Module) -> nn.Module:
        return only_identity(net)

    def __init__(self, net: nn.Module, s: SimpleNamespace) -> None:
        super().__init__(net, s, lambda act: WatchedReLU(act.mask))

    def epoch(self, session: Session, epoch: int, bar: Any) -> dict[str, Any]:
        def after_batch(batches: int) -> None:
            if any(act.seen is not None for act in self.acts):
                self._learn(batches - 1)
                self._choose(epoch, batches)

        loss = session.epoch(epoch, self.s.lr, before_batch=after_batch, bar=bar)
        after_batch((epoch + 1) * len(session.trainer.sizes))
        return {"count": int(self.bits().sum()), "lr": self.s.lr, "loss": loss}

    def decide(self, history: list[dict[str, Any]]) -> MaskSet:
        kept = MaskSet(self.start.sites, self.bits())
        return kept if kept.count() == self.s.budget else self.largest(self.gather("importance"))

    def weights(self) -> list[float]:
        """w of each layer; 1 before the first batch."""
        layers = torch.stack([act.layer for act in self.acts]).double().cpu()
        depth = torch.arange(len(layers)) / max(1, len(layers) - 1)
        value = layers[:, 0] * (layers[:, 1] + 1e-8).sqrt() * (1 + 0.2 * depth)
        span = value.max() - value.min()
        return ((value - value.min()) / span + 0.1 if span else torch.ones_like(value)).tolist()

    def _learn(self, number: int) -> None:
        parts = [act.seen_or_zeros() for act in self.acts]
        sums = ranks.all_sum(torch.cat(parts)).split([len(part) for part in parts])
        for act, own, weight in zip(self.acts, sums, self.weights(), strict=True):
            act.learn(own, weight, number)
            act.seen = None

    def _choose(self, epoch: int, batches: int) -> None:
        """Keep the units with the largest importance, if it is time to choose."""
        s = self.s
        count = scheduled(
            epoch, epochs=s.epochs, warmup=s.warmup, count=self.start.count(), budget=s.budget
        )
        if epoch < s.warmup or batches % (s.interval * (1 + (count == s.budget))):
            return
        chosen = self.largest(self.gather("importance"), count)
        for act, mask in zip(self.acts, chosen.split(), strict=True):
            act.mask.copy_(mask)

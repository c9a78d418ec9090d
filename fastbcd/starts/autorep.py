"""autorep: AutoReP (ICCV 2023), a starting point whose removed ReLUs become learned quadratics.

    start = fastbcd.autorep(net, data, budget=15_000, test=test, run_dir="runs/autorep-15k")
    fastbcd.bcd(start.model, data, budget=12_000, adt=0.1, teacher=dense)

Each unit has a number `aux` that its bit follows with hysteresis: on above the threshold, off
below minus the threshold. Weights, quadratics and aux are trained together on
CE + KD + λ·relu(density - target); the gradient of a bit is that of aux, times softplus(aux).
The quadratics are s·c2·x² + c1·x + c0, and start as the best fit to ReLU for the channel's own
distribution (DaPa). At the end only the bits are kept, so a ReLU that BCD removes later cannot come
back. With s = 0.1, the authors' on CIFAR, c2 matters and changes 10 times less. ResNet-20 needs it:
with s = 1 the loss has spikes, Adam's second moments stay large after them, and the masks hardly
change any more (25 epochs of 5,000 images, λ = 200: 103,375 of 188,416 bits are left on).
"""

from __future__ import annotations

import math
import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbcd import ops
from fastbcd.descent.budget import limits_of
from fastbcd.descent.limits import counts_of
from fastbcd.masking.activations import MaskedPoly
from fastbcd.masking.fitted import to_poly
from fastbcd.masking.masks import MaskSet, mask_modules, masks
from fastbcd.private.target import Target
from fastbcd.runtime import ranks
from fastbcd.runtime.module_mode import eval_mode
from fastbcd.runtime.validate import check_number, check_whole
from fastbcd.starts.mask_training import Method, StartingPoint, channels_last, train_masks
from fastbcd.training.loop import Session, Trainer
from fastbcd.training.precision import training_dtype
from fastbcd.training.rates import cosine
from fastbcd.training.settings import Finetune

REFRESH, EVERY = 500, 10  # quadratics are refitted every 10th of the first 500 iterations
CALIBRATION = 8  # batches for their first statistics
SLACK = 1.01  # a final count above this multiple of the budget is reported
# λ by budget, as published for ResNet18 on CIFAR-100; above the last budget: 40
PUBLISHED_LAMBDA = {6_000: 200.0, 9_000: 140.0, 12_900: 80.0, 15_000: 60.0}


def autorep(
    net: nn.Module, data: Any, budget: int | Target, *, teacher: nn.Module | None = None,
    test: Any = None, epochs: int = 200, lr: float = 1e-3, lr_end: float = 1e-5,
    penalty: float | None = None,
    threshold: float = 0.003, batch_size: int = 128, finetune: Finetune | None = None,
    paper_quirks: bool = False, scale_x2: float = 0.1, seed: int = 0,
    run_dir: str | os.PathLike[str] | None = None, resume: str | bool = "auto",
    progress: bool = False,
) -> StartingPoint:  # fmt: skip
    """Replace ReLUs by quadratics until exactly `budget` are kept.

    Args:
        budget: ReLUs to keep, or a `private.Target`. The training then aims at the number of ReLUs
            that it has room for, and those with the largest aux that meet it are kept.
        net: one with polynomial sites is trained in place. One with other sites is not
            changed, and `to_poly(net)` is trained. Removed ReLUs stay removed; frozen modules
            stay frozen, see `Finetuner`.
        teacher: for the distillation; None: the net as it is given.
        epochs, lr, lr_end: Adam, its learning rate on a cosine from lr to lr_end.
        penalty: λ of the density; None: the published one for this budget.
        threshold: of the hysteresis.
        finetune: after the masks are fixed; None: no fine-tune, as published. Its crops, flips,
            temperature, distillation weight and mixed precision are also those of the training.
        paper_quirks: start the quadratics as the authors' code does, see `dapa`.
        scale_x2: s above (the authors': 0.1 on CIFAR). The c2 of the result is s·c2.
        run_dir, resume, progress: as in `snl`.

    Of the units whose bit is on at the end, the `budget` with the largest aux are kept; if there
    are fewer, those whose bit is off follow, again by aux.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 4, 4), torch.arange(50) % 3
    >>> start = autorep(net, data, 2, epochs=40, lr=0.1)
    >>> start.masks.count(), start.model[2]
    (2, MaskedPoly((6,), 2 kept))
    """
    given = dict(locals())
    if isinstance(budget, Target):
        given["net"] = net = Replacement.prepare(net)
        count = limits_of(budget, net).room(counts_of(masks(net)))
    else:
        check_whole("budget", count := budget, 0)
    published = (value for most, value in PUBLISHED_LAMBDA.items() if count <= most)
    given["penalty"] = next(published, 40.0) if penalty is None else penalty
    check_whole("epochs", epochs, 0)
    check_number("lr", lr, 0, strictly=True)
    for name in ("lr_end", "penalty", "threshold", "scale_x2"):
        check_number(name, given[name], 0)
    return train_masks(Replacement, given)


def dapa(mean: Tensor, var: Tensor, paper_quirks: bool = False) -> Tensor:
    """The quadratic nearest to ReLU for x ~ N(mean, var), by channel: [C], [C] -> coef [3, C].

    With u the mean, s the standard deviation, φ and Φ density and distribution of N(0, 1):

        c2 = φ(u/s)/(2s),  c1 = Φ(u/s) - (u/s)·φ(u/s),  c0 = φ(u/s)·(s² + u²)/(2s)

    paper_quirks: the variance, at least 0.5, stands where s belongs, and then c0 is divided by 5
    and c2 by 10: what the authors' code computes.

    >>> dapa(torch.zeros(1), torch.ones(1)).flatten()
    tensor([0.1995, 0.5000, 0.1995])
    """
    s = var.clamp(min=0.5) if paper_quirks else var.sqrt().clamp(min=1e-4)
    t = mean / s
    density = torch.exp(-t * t / 2) / math.sqrt(2 * math.pi)
    c2 = density / (2 * s)
    c1 = torch.special.ndtr(t) - t * density
    c0 = density * (s * s + mean * mean) / (2 * s)
    return torch.stack([c0 / 5, c1, c2 / 10] if paper_quirks else [c0, c1, c2])


class IndicatorPoly(MaskedPoly):
    """`MaskedPoly` whose bits follow `aux` [*shape]: on above the threshold, off below minus it.

    Bits change in `follow` only, not in a forward pass. While `measuring`, the mean and variance
    of x per channel are tracked as in a batch norm. The last row of its own `coef` times scale_x2
    is c2.
    """

    mean: Tensor
    var: Tensor
    allowed: Tensor
    scale: Tensor
    measuring = False
    momentum = 0.1  # of the statistics

    def __init__(self, poly: MaskedPoly, aux: Tensor, scale_x2: float = 1.0) -> None:
        super().__init__(tuple(poly.mask.shape), device=poly.mask.device)
        start = poly.coef.detach()
        self.coef = nn.Parameter(start.clone(), requires_grad=poly.coef.requires_grad)
        scale = torch.tensor([1.0, 1.0, scale_x2], dtype=start.dtype, device=start.device)
        self.register_buffer("scale", scale.unsqueeze(1), persistent=False)
        self.mask = channels_last(poly.mask.bool())
        self.aux = nn.Parameter(channels_last(aux).to(self.mask.device))
        self.register_buffer("allowed", self.mask.clone())
        self.register_buffer("mean", torch.zeros_like(self.coef[0].detach()))
        self.register_buffer("var", torch.ones_like(self.coef[0].detach()))

    def activate(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The activation of x + residual, [B, *shape]."""
        if self.measuring:
            with torch.no_grad():
                seen = (x if residual is None else x + residual).to(self.mean.dtype)
                dims = [d for d in range(x.ndim) if d != 1]
                var, mean = torch.var_mean(seen, dims, correction=0)
                self.mean.lerp_(mean, self.momentum)
                self.var.lerp_(var, self.momentum)
        return ops.indicator_poly(x, self.mask, self.coefficients(), self.aux, residual=residual)

    def coefficients(self) -> Tensor:
        """c0, c1 and c2, [3, C]."""
        return self.coef * self.scale

    @torch.no_grad()
    def follow(self, threshold: float) -> None:
        """m ← m·[aux > -threshold] + (1 - m)·[aux > threshold]; removed units stay removed."""
        on = torch.where(self.mask, self.aux > -threshold, self.aux > threshold)
        self.mask.copy_(on & self.allowed)


def count_on(act: IndicatorPoly) -> Tensor:
    """The number of ReLUs that a site keeps; its gradient with respect to aux is softplus(aux).

    >>> act = IndicatorPoly(MaskedPoly(3), torch.zeros(3))
    >>> count_on(act).item()
    3.0
    """
    aux = act.aux
    straight_through = F.softplus(aux.detach()) * (aux - aux.detach())  # 0, with that gradient
    return act.mask.sum() + straight_through.sum()


class Replacement(Method):
    """AutoReP's mask training."""

    name = "autorep"

    @staticmethod
    def prepare(net: nn.Module) -> nn.Module:
        poly = all(isinstance(act, MaskedPoly) for act in mask_modules(net).values())
        return net if poly else to_poly(net)

    def __init__(self, net: nn.Module, s: SimpleNamespace) -> None:
        dtype, generator = training_dtype(net), torch.Generator().manual_seed(s.seed)

        def indicator(act: MaskedPoly) -> IndicatorPoly:
            aux = torch.rand(act.mask.shape, generator=generator).to(dtype)
            return IndicatorPoly(act, aux, s.scale_x2)

        super().__init__(net, s, indicator)
        self.polys: list[Any] = list(mask_modules(net).values())

    def epoch(self, session: Session, epoch: int, bar: Any) -> dict[str, Any]:
        if epoch == 0:
            self._calibrate(session.trainer)
        lr = cosine(self.s.lr, epoch, self.s.epochs, self.s.lr_end)
        loss = session.epoch(
            epoch, lr, penalty=self._penalty, before_batch=self._before_batch, bar=bar
        )
        for act in self.acts:
            act.measuring = False
            act.follow(self.s.threshold)
        return {"count": int(self.bits().sum()), "lambda": self.s.penalty, "lr": lr, "loss": loss}

    @torch.no_grad()
    def decide(self, history: list[dict[str, Any]]) -> MaskSet:
        for poly, act in zip(self.polys, self.acts, strict=True):
            poly.coef.copy_(act.coefficients())
        aux, on = self.gather("aux").double(), self.bits()
        if (count := int(on.sum())) > SLACK * self.s.budget:
            then = "only those with the largest aux are kept. Increase epochs or penalty"
            self.warn_above(history, f"{count:,} bits are on", then)
        span = aux.max() - aux.min() + 1
        return self.largest(aux + span * on)

    def _penalty(self) -> Tensor:
        """λ·relu(density - target), density the share of units whose ReLU is on."""
        total = self.start.total
        density = torch.stack([count_on(act) for act in self.acts]).sum() / total
        return self.s.penalty * torch.relu(density - self.s.budget / total)

    def _before_batch(self, iteration: int) -> None:
        for act in self.acts:
            act.follow(self.s.threshold)
            act.measuring = iteration < REFRESH
        if iteration % EVERY == 0 and 0 < iteration < REFRESH:
            self._refresh()

    @torch.no_grad()
    def _refresh(self) -> None:
        """Fit the quadratics to the current statistics, averaged over the ranks in one buffer."""
        mine = torch.cat([t for act in self.acts for t in (act.mean, act.var)])
        parts = (ranks.all_sum(mine) / ranks.world()).split([2 * len(a.mean) for a in self.acts])
        for act, part in zip(self.acts, parts, strict=True):
            mean, var = part.view(2, -1)
            act.coef.copy_(dapa(mean, var, self.s.paper_quirks))

    @torch.no_grad()
    def _calibrate(self, trainer: Trainer) -> None:
        """Measure the first statistics in eval mode, and fit the quadratics to them."""
        data, batch_size = trainer.data, trainer.settings.batch_size
        some = data.first(min(len(data), CALIBRATION * batch_size))
        with eval_mode(self.model):
            for number, (x, _) in enumerate(some.batches(batch_size, dtype=trainer.dtype)):
                for act in self.acts:
                    act.measuring, act.momentum = True, 1 / (number + 1)
                self.model(x)
        for act in self.acts:
            act.measuring, act.momentum = False, IndicatorPoly.momentum
        self._refresh()

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
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbcd import ops
from fastbcd.descent.budget import Budget
from fastbcd.masking.activations import MaskedPoly
from fastbcd.masking.fitted import to_poly
from fastbcd.masking.masks import MaskSet, mask_modules
from fastbcd.masking.twin import twin
from fastbcd.runtime import ranks
from fastbcd.runtime.module_mode import eval_mode
from fastbcd.runtime.settings import setting, with_settings
from fastbcd.starts.mask_training import StartingPoint, train_masks
from fastbcd.starts.method import ADAM, MaskEpoch, MaskTraining, Method, channels_last
from fastbcd.training.loop import Trainer
from fastbcd.training.precision import training_dtype
from fastbcd.training.rates import cosine

# Quadratics are refitted every 10th of the first 500 iterations.
REFRESH = 500
EVERY = 10
CALIBRATION = 8  # batches for their first statistics
MOMENTUM = 0.1  # of the statistics after them
# λ by the largest budget it is for, as published for ResNet18 on CIFAR-100
PUBLISHED_LAMBDA = {
    6_000: 200.0,
    9_000: 140.0,
    12_900: 80.0,
    15_000: 60.0,
    math.inf: 40.0,
}


@dataclass(frozen=True, kw_only=True)
class AutoRepSettings(MaskTraining):
    """The settings of `autorep`; the defaults are the published values, without a fine-tune."""

    epochs: int = setting(200, "of the mask training", least=0)
    lr: float = setting(1e-3, "learning rate at the start of it", above=0)
    lr_end: float = setting(1e-5, "learning rate at its end, on a cosine", least=0)
    penalty: float | None = setting(
        None, "λ of the density; None: the published one for this budget", least=0
    )
    threshold: float = setting(0.003, "of the hysteresis", least=0)
    scale_x2: float = setting(
        0.1,
        "s above (the authors': 0.1 on CIFAR); the c2 of the result is s·c2",
        least=0,
    )


@with_settings(AutoRepSettings)
def autorep(
    net: nn.Module, data: Any, budget: int | Budget, **settings: Any
) -> StartingPoint:
    """Replace ReLUs by quadratics until exactly `budget` are kept.

    Args:
        net: one with polynomial sites is trained in place. One with other sites is not
            changed, and `to_poly(net)` is trained. Removed ReLUs stay removed; frozen modules
            stay frozen, see `Finetuner`.
        data: the train set, as in `bcd`.
        budget: ReLUs to keep, or a `private.Target`. The training then aims at the number of ReLUs
            that it has room for, and those with the largest aux that meet it are kept.

    Of the units whose bit is on at the end, the `budget` with the largest aux are kept; if there
    are fewer, those whose bit is off follow, again by aux.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 4, 4), torch.arange(50) % 3
    >>> start = autorep(net, data, 2, epochs=40, lr=0.1)
    >>> start.masks.count(), start.model[2]
    (2, MaskedPoly((6,)))
    """
    return train_masks(Replacement, net, data, budget, AutoRepSettings(**settings))


def dapa(mean: Tensor, var: Tensor) -> Tensor:
    """The quadratic nearest to ReLU for x ~ N(mean, var), by channel: [C], [C] -> coef [3, C].

    With u the mean, s the standard deviation, φ and Φ density and distribution of N(0, 1):

        c2 = φ(u/s)/(2s),  c1 = Φ(u/s) - (u/s)·φ(u/s),  c0 = φ(u/s)·(s² + u²)/(2s)

    The authors' code computes something else: the variance, at least 0.5, stands where s belongs,
    and then c0 is divided by 5 and c2 by 10.

    >>> dapa(torch.zeros(1), torch.ones(1)).flatten()
    tensor([0.1995, 0.5000, 0.1995])
    """
    s = var.sqrt().clamp(min=1e-4)
    t = mean / s
    density = torch.exp(-t * t / 2) / math.sqrt(2 * math.pi)
    c2 = density / (2 * s)
    c1 = torch.special.ndtr(t) - t * density
    c0 = density * (s * s + mean * mean) / (2 * s)
    return torch.stack([c0, c1, c2])


class IndicatorPoly(MaskedPoly):
    """`MaskedPoly` whose bits follow `aux` [*shape]: on above the threshold, off below minus it.

    Bits change in `follow` only, not in a forward pass. With a `momentum`, the mean and variance
    of x per channel are tracked as in a batch norm. The last row of its own `coef` times scale_x2
    is c2.
    """

    allowed: Tensor
    statistics: Tensor
    scale: Tensor
    momentum = 0.0

    def __init__(self, poly: MaskedPoly, aux: Tensor, scale_x2: float = 1.0) -> None:
        super().__init__(tuple(poly.mask.shape), device=poly.mask.device)
        self.coef = nn.Parameter(poly.coef.detach().clone(), poly.coef.requires_grad)
        self.mask = channels_last(poly.mask.bool())
        self.aux = nn.Parameter(channels_last(aux).to(self.mask.device))
        self.register_buffer("allowed", self.mask.clone())
        self.register_buffer("statistics", torch.zeros_like(self.coef[:2].detach()))
        scale = self.coef.new_tensor([1.0, 1.0, scale_x2]).unsqueeze(1)
        self.register_buffer("scale", scale, persistent=False)

    def activate(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The activation of x + residual, [B, *shape]."""
        if self.momentum:
            self._measure(x, residual)
        return ops.indicator_poly(
            x, self.mask, self.coefficients(), self.aux, residual=residual
        )

    def coefficients(self) -> Tensor:
        """c0, c1 and c2, [3, C]."""
        return self.coef * self.scale

    @torch.no_grad()
    def follow(self, threshold: float) -> None:
        """m ← m·[aux > -threshold] + (1 - m)·[aux > threshold]; removed units stay removed."""
        on = torch.where(self.mask, self.aux > -threshold, self.aux > threshold)
        self.mask.copy_(on & self.allowed)

    @torch.no_grad()
    def _measure(self, x: Tensor, residual: Tensor | None) -> None:
        """Mean and variance of each channel, [2, C]."""
        if residual is not None:
            x = x + residual
        other = [d for d in range(x.ndim) if d != 1]
        var, mean = torch.var_mean(x.to(self.statistics.dtype), other, correction=0)
        self.statistics.lerp_(torch.stack([mean, var]), self.momentum)


def count_on(act: IndicatorPoly) -> Tensor:
    """The number of ReLUs that a site keeps; its gradient with respect to aux is softplus(aux).

    >>> act = IndicatorPoly(MaskedPoly(3), torch.zeros(3))
    >>> count_on(act).item()
    3.0
    """
    aux = act.aux
    zeros = F.softplus(aux.detach()) * (aux - aux.detach())  # with that gradient
    return act.mask.sum() + zeros.sum()


class Replacement(Method):
    """AutoReP's mask training."""

    name = "autorep"
    optimizer = ADAM
    advice = "increase epochs or penalty"
    slack = 1.01
    settings: AutoRepSettings

    @classmethod
    def prepare(cls, net: nn.Module, settings: AutoRepSettings) -> nn.Module:
        if all(isinstance(act, MaskedPoly) for act in mask_modules(net).values()):
            return net
        return to_poly(net)

    def trained_net(self) -> nn.Module:
        dtype = training_dtype(self.net)
        generator = torch.Generator().manual_seed(self.settings.seed)

        def indicator(act: MaskedPoly) -> IndicatorPoly:
            aux = torch.rand(act.mask.shape, generator=generator).to(dtype)
            return IndicatorPoly(act, aux, self.settings.scale_x2)

        return twin(self.net, indicator)

    def begin(self) -> None:
        larger = [most for most in PUBLISHED_LAMBDA if self.budget <= most]
        self.penalty = PUBLISHED_LAMBDA[min(larger)]
        if self.settings.penalty is not None:
            self.penalty = self.settings.penalty

    def train(self, epoch: MaskEpoch) -> None:
        s = self.settings
        number = len(epoch.history)
        if number == 0:
            self._calibrate(epoch.session.trainer)
        lr = cosine(s.lr, number, s.epochs, s.lr_end)
        epoch.record.lr = lr
        epoch.record.notes["lambda"] = self.penalty
        epoch.train(lr, penalty=self._penalty, before_batch=self._before_batch)
        self._follow(momentum=0.0)

    def values(self) -> Tensor:
        return self.gather("aux")

    @torch.no_grad()
    def decide(self) -> MaskSet:
        for poly, act in zip(mask_modules(self.net).values(), self.acts, strict=True):
            poly.get_parameter("coef").copy_(act.coefficients())
        return super().decide()

    def _penalty(self) -> Tensor:
        """λ·relu(density - target), density the share of units whose ReLU is on."""
        total = self.start.total
        density = torch.stack([count_on(act) for act in self.acts]).sum() / total
        return self.penalty * torch.relu(density - self.budget / total)

    def _before_batch(self, iteration: int) -> None:
        if iteration >= REFRESH:
            self._follow(momentum=0.0)
            return
        self._follow(momentum=MOMENTUM)
        if iteration % EVERY == 0 and iteration > 0:
            self._refresh()

    def _follow(self, momentum: float) -> None:
        for act in self.acts:
            act.follow(self.settings.threshold)
            act.momentum = momentum

    @torch.no_grad()
    def _refresh(self) -> None:
        """Fit the quadratics to the current statistics, averaged over the ranks."""
        ranks.agree(act.statistics for act in self.acts)
        for act in self.acts:
            mean, var = act.statistics
            act.coef.copy_(dapa(mean, var))

    @torch.no_grad()
    def _calibrate(self, trainer: Trainer) -> None:
        """Measure the first statistics in eval mode, and fit the quadratics to them."""
        batches = self.data.batches(trainer.settings.batch_size, dtype=trainer.dtype)
        with eval_mode(trainer.model):
            for number, (x, _) in enumerate(islice(batches, CALIBRATION), 1):
                for act in self.acts:
                    act.momentum = 1 / number
                trainer.model(x)
        self._refresh()

"""autorep: AutoReP (ICCV 2023), a starting point whose removed ReLUs become learned quadratics.

    start = fastbcd.autorep(net, data, budget=15_000, test=test, run_dir="runs/autorep-15k")
    fastbcd.bcd(start.model, data, budget=12_000, adt=0.1, teacher=dense)

Each unit has a number `aux` that its bit follows with hysteresis: on above the threshold, off
below minus the threshold. Weights, quadratics and aux are trained together on
CE + KD + λ·relu(density - target); the gradient of a bit is that of aux, times softplus(aux).
The quadratics start as the best fit to ReLU for the channel's own distribution (DaPa). At the end
only the bits are kept, so a ReLU that BCD removes later cannot come back.
"""

from __future__ import annotations

import math
import os
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fastbcd.masking.activations import MaskedPoly, MaskedReLU
from fastbcd.masking.masks import MaskSet, mask_modules
from fastbcd.runtime import ranks
from fastbcd.runtime.module_mode import eval_mode
from fastbcd.runtime.validate import check_number, check_whole
from fastbcd.starts.gated import IndicatorPoly, check_budget, count_on, gather, largest, to_poly
from fastbcd.starts.mask_training import History, MaskTraining, Method, StartingPoint
from fastbcd.training.settings import Finetune
from fastbcd.training.trainer import Trainer, cosine, training_dtype

REFRESH, EVERY = 500, 10  # quadratics are refitted every 10th of the first 500 iterations
CALIBRATION = 8  # batches for their first statistics
SLACK = 1.01  # a final count above this multiple of the budget is reported
# λ by budget, as published for ResNet18 on CIFAR-100; above the last budget: 40
PUBLISHED_LAMBDA = {6_000: 200.0, 9_000: 140.0, 12_900: 80.0, 15_000: 60.0}


def autorep(
    net: nn.Module, data: Any, budget: int, *, teacher: nn.Module | None = None, test: Any = None,
    epochs: int = 200, lr: float = 1e-3, lr_end: float = 1e-5, penalty: float | None = None,
    threshold: float = 0.003, batch_size: int = 128, finetune: Finetune | None = None,
    paper_quirks: bool = False, scale_x2: float = 1.0, seed: int = 0,
    run_dir: str | os.PathLike[str] | None = None, resume: str | bool = "auto",
    progress: bool = False,
) -> StartingPoint:  # fmt: skip
    """Replace ReLUs by quadratics until exactly `budget` are kept.

    Args:
        net: one with polynomial sites is trained in place. One with `MaskedReLU` sites is not
            changed, and `to_poly(net)` is trained. Removed ReLUs stay removed; frozen modules
            stay frozen, see `Finetuner`.
        teacher: for the distillation; None: the net as it is given.
        epochs, lr, lr_end: Adam, its learning rate on a cosine from lr to lr_end.
        penalty: λ of the density; None: the published one for this budget.
        threshold: of the hysteresis.
        finetune: after the masks are fixed; None: no fine-tune, as published. Its crops, flips,
            temperature, distillation weight and mixed precision are also those of the training.
        paper_quirks: start the quadratics as the authors' code does, see `dapa`.
        scale_x2: a factor on c2 at the start (the authors': 0.1 on CIFAR).
        run_dir, resume, progress: as in `snl`.

    Of the units whose bit is on at the end, the `budget` with the largest aux are kept; if there
    are fewer, those whose bit is off follow, again by aux.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 4, 4), torch.arange(50) % 3
    >>> start = autorep(net, data, 2, epochs=40, lr=0.1)
    >>> start.masks.count(), start.model[2]
    (2, MaskedPoly((6,), 2 kept))
    """
    check_budget(net, budget)
    if any(isinstance(act, MaskedReLU) for act in mask_modules(net).values()):
        net = to_poly(net)
    penalty = published_lambda(budget) if penalty is None else penalty
    check_whole("epochs", epochs, 0)
    check_number("lr", lr, 0, strictly=True)
    for name, value in (("lr_end", lr_end), ("penalty", penalty), ("threshold", threshold)):
        check_number(name, value, 0)
    check_number("scale_x2", scale_x2, 0)
    settings = {
        "budget": budget, "epochs": epochs, "lr": lr, "lr_end": lr_end, "penalty": penalty,
        "threshold": threshold, "paper_quirks": paper_quirks, "scale_x2": scale_x2,
    }  # fmt: skip
    return MaskTraining(
        name="autorep", method=Replacement, settings=settings, net=net, data=data, test=test,
        teacher=teacher, finetune=finetune, batch_size=batch_size, seed=seed, run_dir=run_dir,
        resume=resume, progress=progress,
    ).run()  # fmt: skip


def published_lambda(budget: int) -> float:
    """λ for a budget.

    >>> published_lambda(6_000), published_lambda(50_000)
    (200.0, 40.0)
    """
    return next((value for most, value in PUBLISHED_LAMBDA.items() if budget <= most), 40.0)


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


class Replacement(Method):
    """AutoReP's mask training."""

    def __init__(self, net: nn.Module, s: SimpleNamespace) -> None:
        dtype, generator = training_dtype(net), torch.Generator().manual_seed(s.seed)

        def indicator(act: MaskedPoly) -> IndicatorPoly:
            return IndicatorPoly(act, torch.rand(act.mask.shape, generator=generator).to(dtype))

        super().__init__(net, s, indicator)

    def done(self, history: History) -> bool:
        return len(history) >= self.s.epochs

    def epoch(self, trainer: Trainer, epoch: int, bar: Any) -> dict[str, Any]:
        if epoch == 0:
            self._calibrate(trainer)
        lr = cosine(self.s.lr, epoch, self.s.epochs, self.s.lr_end)
        loss = trainer.epoch(
            epoch, lr, penalty=self._penalty, before_batch=self._before_batch, bar=bar
        )
        for act in self.acts:
            act.measuring = False
            act.follow(self.s.threshold)
        return {"count": int(self.bits().sum()), "lambda": self.s.penalty, "lr": lr, "loss": loss}

    def bits(self) -> Tensor:
        return gather([act.mask for act in self.acts])

    def decide(self, history: History) -> MaskSet:
        aux, on = gather([act.aux for act in self.acts]).double(), self.bits()
        if (count := int(on.sum())) > SLACK * self.s.budget:
            then = "only those with the largest aux are kept. Increase epochs or penalty"
            self.warn_above(history, f"{count:,} bits are on", then)
        span = aux.max() - aux.min() + 1
        return largest(self.start, aux + span * on, self.s.budget)

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
            coef = dapa(mean, var, self.s.paper_quirks)
            coef[2] *= self.s.scale_x2
            act.coef.copy_(coef)

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

"""saliency: the first-order cost of removing each ReLU, from one backward pass.

Removing kept ReLU p changes its output a_p by min(z_p, 0), and so the loss L of a sample
by t_p = dL/da_p · min(z_p, 0), to first order. In eval mode samples do not mix, so that one
backward pass from the loss summed over a batch holds every sample's own dL/da. Returning a removed
ReLU undoes its removal: the loss falls by E t.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fastbcd.data.for_net import data_for
from fastbcd.data.images import ImageData
from fastbcd.graph.fuse import fused
from fastbcd.graph.trace import logits_of
from fastbcd.masking.activations import SaliencyPass
from fastbcd.masking.masks import mask_modules, masks
from fastbcd.runtime.dtypes import dtype_of
from fastbcd.runtime.malloc import kept_memory
from fastbcd.runtime.module_mode import eval_mode
from fastbcd.runtime.ranks import all_sum, rank, world
from fastbcd.runtime.tf32 import products, repeatable_convolutions
from fastbcd.runtime.validate import check_choice, check_whole
from fastbcd.scoring.metric import Criterion, Loss
from fastbcd.training.checks import check_loss
from fastbcd.training.teacher import Distillation
from fastbcd.training.terms import distillation

KINDS = ("mean_abs", "abs_mean")
# Activations of a batch, about: near the cache on a CPU, enough work for a GPU.
VALUES = {"cpu": 2**23, "cuda": 2**26}
DIGITS = 20  # bits of a score that are compared


def saliency(
    net: nn.Module,
    data: Any,
    *,
    kind: str = "mean_abs",
    batch_size: int | None = None,
    loss: Loss | None = None,
    distill: Distillation | None = None,
) -> Tensor:
    """The first-order cost of removing each ReLU, DoubleTensor[total] on the CPU.

    Args:
        net: with masked activations; its mode and parameters are unchanged afterwards.
        data: ImageData, a pair (images, labels), a Dataset or a DataLoader; no augmentation.
        kind: "mean_abs", E|t|: removals that change no sample's loss come first. "abs_mean",
            |E t|: those whose changes cancel out over the data, too.
        batch_size: images at a time; None: fewer for a net with more ReLUs.
        loss: a callable (outputs, targets) -> [B] or their mean; None: cross-entropy.
        distill: a teacher's logits for the images: adds the distillation loss of `Finetune`.

    A ReLU that was removed before has +inf: it is never among the smallest. At polynomial sites
    min(z, 0) is replaced by poly(z) - relu(z). With several ranks each takes its part of the
    batches, which are the same for any number of ranks.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> fastbcd.set_masks(net, fastbcd.masks(net).without([2]))
    >>> s = saliency(net, data)
    >>> s.shape, s.dtype, s[2].item()
    (torch.Size([6]), torch.float64, inf)
    """
    check_choice("kind", kind, KINDS)
    effect = _mean(net, data, kind == "mean_abs", batch_size, loss, distill)
    return effect.abs().masked_fill(~masks(net).bits, torch.inf)


def gains(net: nn.Module, data: Any, *, loss: Loss | None = None) -> Tensor:
    """By how much the loss falls to first order if each removed ReLU returns, DoubleTensor[total].

    Its output changes by -min(z, 0), and so the loss by -t: E t. A kept ReLU has -inf.
    """
    mean = _mean(net, data, False, None, loss, None)
    return mean.masked_fill(masks(net).bits, -torch.inf)


def ranking(scores: Tensor, among: Tensor) -> Tensor:
    """The ids whose bit is set, from the smallest score to the largest; equal ones by id."""
    ids = among.nonzero().flatten()
    return ids[torch.from_numpy(np.argsort(rounded(scores[ids]), kind="stable"))]


def rounded(scores: Tensor) -> np.ndarray:
    """Scores rounded to 20 bits.

    The rounding error of another number of threads or ranks then seldom changes their order.
    """
    mantissa, exponent = np.frexp(scores.numpy())
    return np.ldexp(np.rint(np.ldexp(mantissa, DIGITS)), exponent)


def _mean(
    net: nn.Module,
    data: Any,
    absolute: bool,
    batch_size: int | None,
    loss: Loss | None,
    distill: Distillation | None,
) -> Tensor:
    """E|t| or E t of every unit, DoubleTensor[total] on the CPU."""
    check_whole("batch_size", batch_size, 1, optional=True)
    images = data_for(net, data)
    sites = masks(net)
    if batch_size is None:
        fitting = VALUES.get(images.device.type, VALUES["cpu"]) // sites.total
        batch_size = max(8, min(256, fitting))
    check_loss(net, images, loss)
    if distill is not None and len(distill.logits) != len(images):
        raise ValueError(
            f"distill has logits for {len(distill.logits)} images; there are {len(images)}: use "
            f"Distillation.of(teacher, data, settings) on the same data"
        )
    criterion = Criterion(loss=loss)

    def objective(outputs: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        """The loss summed over a batch, in double: softmax - 1 loses its digits in float32."""
        total = criterion.losses(outputs, labels).sum()
        if distill is not None:
            logits = distill.logits[positions].to(outputs.device, torch.float64)
            mean = distillation(outputs.double(), logits, *distill[1:])
            total = total + len(positions) * mean
        return total

    totals = _totals(net, images, batch_size, absolute, objective)
    mean = all_sum(torch.cat([t.flatten().cpu() for t in totals])) / len(images)
    if not mean.isfinite().all():
        site, position = sites.locate(int((~mean.isfinite()).nonzero()[0]))
        raise FloatingPointError(
            f"the saliency at site {site.name!r}, position {position}, is not finite; look at the "
            f"weights and at the range of the activations"
        )
    return mean


def _totals(
    net: nn.Module,
    data: ImageData,
    batch_size: int,
    absolute: bool,
    objective: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> list[Tensor]:
    """Σ|t| or Σt over this rank's batches: a DoubleTensor of the site's shape for each site."""
    anchor = torch.zeros((), device=data.device, requires_grad=True)
    model, layout = fused(net, train=False)
    # The batches do not depend on the number of ranks.
    parts = torch.arange(len(data)).split(batch_size)
    first = rank() * len(parts) // world()
    parts = parts[first : (rank() + 1) * len(parts) // world()]
    mine = torch.cat([torch.arange(0), *parts]).to(data.device)
    options = {"memory_format": layout, "dtype": dtype_of(net)}
    with (
        kept_memory(),
        repeatable_convolutions(),
        products(tf32=False),
        eval_mode(net),
        torch.enable_grad(),
        _collecting(net, anchor, absolute, copy=model is net) as totals,
    ):
        model.eval()
        batches = data.batches(batch_size, mine, **options)
        for (x, labels), part in zip(batches, parts, strict=True):
            loss = objective(logits_of(model(x)), labels, part)
            # If no activation influences the logits, all effects are 0.
            if loss.requires_grad:
                torch.autograd.grad(loss, anchor, allow_unused=True)
    return totals


@contextmanager
def _collecting(
    net: nn.Module, anchor: Tensor, absolute: bool, copy: bool
) -> Iterator[list[Tensor]]:
    """The activations sum the effects of removals; the backward pass skips the weights."""
    modules = list(mask_modules(net).values())
    totals = [torch.zeros_like(m.mask, dtype=torch.float64) for m in modules]
    try:
        for module, total in zip(modules, totals, strict=True):
            module.saliency_pass = SaliencyPass(anchor, total, absolute, copy)
        yield totals
    finally:
        for module in modules:
            vars(module).pop("saliency_pass", None)

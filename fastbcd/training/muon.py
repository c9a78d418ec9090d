"""Muon: momentum whose steps are orthogonal matrices, each relative to the weight it changes.

    M ← μ·M + G,   O ≈ U·Vᵀ of the singular value decomposition of G + μ·M,   W ← W - lr·‖W‖·O/‖O‖

A step moves every weight by the same share of its norm, whatever the scale of the loss and of the
gradients. So one learning rate fits a net that has just lost ReLUs, whose gradients are large, and
a healthy one. O comes from five Newton-Schulz iterations (Jordan et al., 2024: the polynomial below
takes singular values from about 0.005 to 1 to between 0.7 and 1.2).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

NEWTON_SCHULZ, ITERATIONS = (3.4445, -4.7750, 2.0315), 5
BETAS, EPS = (0.9, 0.99), 1e-8  # of Adam


class Muon(torch.optim.Optimizer):
    """Orthogonal steps for weights; Adam for groups with "adam": True.

    Weights [n, ...] are read as matrices of n rows. lr is the relative change of a weight in one
    step; 0.02 is usual.

    >>> weight = nn.Parameter(torch.eye(3))
    >>> optimizer = Muon([weight], lr=0.1)
    >>> (1000 * weight.sum()).backward()
    >>> optimizer.step()
    >>> bool(((weight - torch.eye(3)).norm() / torch.eye(3).norm()).isclose(torch.tensor(0.1)))
    True
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.02, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "adam": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if group["adam"]:
                for p in params:
                    self._adam(p, p.grad, group["lr"])
                continue
            alike = defaultdict(list)  # matrices of one shape are made orthogonal together
            for p in params:
                alike[len(p), p.numel() // len(p), p.dtype, p.device].append(p)
            for some in alike.values():
                self._turn(some, group["lr"], group["momentum"])

    def _turn(self, params: list[Tensor], lr: float, momentum: float) -> None:
        turned = []
        for p in params:
            state = self.state[p]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(p)
            moment = state["momentum_buffer"].mul_(momentum).add_(p.grad)
            turned.append((p.grad + momentum * moment).reshape(len(p), -1))
        steps = orthogonal(torch.stack(turned))
        lengths = steps.flatten(1).norm(dim=1).clamp_min(torch.finfo(steps.dtype).tiny)
        for p, step, length in zip(params, steps, lengths, strict=True):
            p.sub_(step.reshape(p.shape) * (lr * p.norm() / length))

    def _adam(self, p: Tensor, grad: Tensor, lr: float) -> None:
        state, (first, second) = self.state[p], BETAS
        if not state:
            state.update(
                exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p), step=torch.zeros(())
            )
        state["step"] += 1
        number = float(state["step"])
        state["exp_avg"].lerp_(grad, 1 - first)
        state["exp_avg_sq"].lerp_(grad.square(), 1 - second)
        scale = (state["exp_avg_sq"] / (1 - second**number)).sqrt_().add_(EPS)
        p.addcdiv_(state["exp_avg"], scale, value=-lr / (1 - first**number))


def orthogonal(x: Tensor) -> Tensor:
    """About the orthogonal matrices U·Vᵀ next to x = U·S·Vᵀ, [k, n, m] -> [k, n, m].

    >>> s = torch.linalg.svdvals(orthogonal(torch.randn(2, 5, 8)))
    >>> bool(((s > 0.6) & (s < 1.3)).all())
    True
    """
    if x.shape[1] > x.shape[2]:
        return orthogonal(x.mT).mT
    a, b, c = NEWTON_SCHULZ
    x = x / x.flatten(1).norm(dim=1)[:, None, None].clamp_min(torch.finfo(x.dtype).tiny)
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x

"""The optimizer of a training, its state as named tensors, and bounds for learned quadratics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fastbcd.masking.activations import MaskedLine, MaskedPoly
from fastbcd.training.settings import Finetune

# SGD's learning rate of the coefficients of lines and quadratics, a share of the weights', and that
# of c2, a share of it. The gradient of c2 is a sum of x² over all positions, and a deep net squares
# a growing x again and again: with a share of 1 ResNet-20 diverges in its second step from dense,
# with 0.003 after 26 epochs of 5,000 images, at |c2| = 0.05. So |c2| has a bound: it does not grow
# beyond it, and where it is larger, as after `to_poly`, it can only fall. From c2 = 0, 8,000 ReLUs,
# 15 epochs of 2,000 images: 75.1 % with 0.03 and the bound, which nearly all sites reach, 73.5 with
# 0.003 and none. With a bound of 0.02 it is 76.4 %, and 30 epochs of 5,000 images diverge after 17.
COEFFICIENTS = 0.1
SQUARES = 0.03
SQUARES_MOST = 0.01

Parameters = dict[str, nn.Parameter]  # by name


def make_optimizer(
    net: nn.Module, trained: Parameters, settings: Finetune, fused: bool = True
) -> Optimizer:
    """A new optimizer of the trained parameters; fused: one kernel for all, where torch has it.

    Each of its groups has a "share": of the learning rate that `set_rate` sets.
    """
    parameters = list(trained.values())
    if callable(settings.optimizer):
        return _custom(settings.optimizer, parameters, settings.lr)
    options: dict[str, Any] = {
        "lr": settings.lr,
        "weight_decay": settings.weight_decay,
        "fused": fused or None,
    }
    if settings.optimizer == "adam":
        return torch.optim.Adam([{"params": parameters, "share": 1.0}], **options)
    slow = coefficients(net, MaskedLine | MaskedPoly)
    ids = {id(coefficient) for coefficient in slow}
    weights = [p for p in parameters if id(p) not in ids]
    groups: list[dict[str, Any]] = [{"params": weights, "share": 1.0}]
    if slow:
        groups.append({"params": slow, "share": COEFFICIENTS, "weight_decay": 0.0})
    return torch.optim.SGD(groups, momentum=settings.momentum, **options)


def _custom(make: Any, parameters: list[nn.Parameter], lr: float) -> Optimizer:
    """What the user's function makes; the shares are what it sets as learning rates, over lr."""
    optimizer = make(parameters, lr)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer={make!r} returns a {type(optimizer).__name__}; it must return a "
            f"torch.optim.Optimizer of the parameters"
        )
    for group in optimizer.param_groups:
        group["share"] = float(group["lr"]) / lr if lr else 1.0
    return optimizer


def set_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of each group to its share of lr."""
    for group in optimizer.param_groups:
        group["lr"] = group["share"] * lr


def coefficients(net: nn.Module, kind: Any) -> list[nn.Parameter]:
    """The trained coefficients of the activations of a kind, each once."""
    each = {module.coef: None for module in net.modules() if isinstance(module, kind)}
    return [coefficient for coefficient in each if coefficient.requires_grad]


def bounded_quadratics(net: nn.Module, settings: Finetune) -> list[nn.Parameter]:
    """The coefficients that `bounded` keeps small: of quadratics, if SGD trains them."""
    if settings.optimizer != "sgd":
        return []
    return coefficients(net, MaskedPoly)


@contextmanager
def bounded(quadratics: list[nn.Parameter]) -> Iterator[None]:
    """Around a step of the optimizer: c2 takes smaller steps and does not grow beyond its bound.

    All sites at once, so that the number of kernel launches does not grow with the net.
    """
    if not quadratics:
        yield
        return
    squares = [coef.detach()[2] for coef in quadratics]
    gradients = [coef.grad[2] for coef in quadratics if coef.grad is not None]
    # Of each batch alone, so that a resumed training has the same bounds.
    most = torch._foreach_abs(squares)
    torch._foreach_clamp_min_(most, SQUARES_MOST)
    if gradients:
        torch._foreach_mul_(gradients, SQUARES)
    yield
    torch._foreach_clamp_max_(squares, most)
    torch._foreach_clamp_min_(squares, torch._foreach_neg(most))


def state_of(optimizer: Optimizer, trained: Parameters) -> dict[str, Tensor]:
    """Copies of the optimizer's tensors, named kind.parameter, such as exp_avg.conv.weight."""
    tensors = {}
    for name, parameter in trained.items():
        for kind, value in optimizer.state.get(parameter, {}).items():
            if value is None:
                continue
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"{type(optimizer).__name__} has {kind}={value!r} beside the tensors of its "
                    f"state, which cannot be saved: use another optimizer, or run_dir=None"
                )
            tensors[f"{kind}.{name}"] = value.detach().cpu().contiguous().clone()
    return tensors


def load_state(
    optimizer: Optimizer, trained: Parameters, tensors: dict[str, Tensor]
) -> None:
    """Restore what `state_of` returned."""
    for key, value in tensors.items():
        kind, name = key.split(".", 1)
        parameter = trained[name]
        if kind == "step":  # a single number, on the CPU
            loaded = value.clone()
        elif value.shape == parameter.shape:  # a moment, laid out as its parameter
            loaded = torch.empty_like(parameter, requires_grad=False).copy_(value)
        else:
            loaded = value.to(parameter.device, copy=True)
        optimizer.state[parameter][kind] = loaded

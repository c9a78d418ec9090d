"""gather_form: the same net, with each site evaluating only the ReLUs that it keeps.

`where(mask, relu(x), x)` evaluates every ReLU, and private inference pays for every one. Here the
kept units are gathered, activated and written back:

    f = x.flatten(1)
    f[:, kept] = relu(f[:, kept])
    f[:, removed] = c2*f² + c1*f + c0       # where removed ReLUs are lines (c2 = 0) or quadratics

Nothing is left of a site that keeps no ReLU, unless its ReLUs became lines or quadratics.
"""

from __future__ import annotations

import copy
import operator
from collections import Counter
from typing import Any

import torch
from torch import Tensor, fx, nn

from fastbcd.graph.trace import Tracer, erase_calls, without_inplace
from fastbcd.kernels.geometry import compute_dtype
from fastbcd.masking.activations import (
    MaskedActivation,
    MaskedLine,
    MaskedPoly,
    MaskedReLU,
)
from fastbcd.masking.masks import mask_modules

FOLDABLE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.Conv2d, nn.Linear)


class GatheredReLU(nn.Module):
    """ReLU at the positions `kept` [n] of a flattened sample, the identity elsewhere."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.kept = nn.Buffer(_units(mask))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        relus = torch.relu(flat.index_select(1, self.kept))
        y = flat.index_copy(1, self.kept, relus)
        return y.reshape(x.shape)

    def extra_repr(self) -> str:
        return f"{len(self.kept):,} ReLUs"


class GatheredPoly(GatheredReLU):
    """ReLU at `kept`, c2*z² + c1*z + c0 at `removed`, coef [2 or 3, C] by the unit's `channel`."""

    def __init__(self, mask: Tensor, coef: nn.Parameter) -> None:
        super().__init__(mask)
        self.coef = coef
        self.removed = nn.Buffer(_units(~mask & _bent(mask, coef)))
        self.channel = nn.Buffer(self.removed // mask[0].numel())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        wide = compute_dtype(x.dtype)
        coef = self.coef.to(wide).index_select(1, self.channel)
        z = flat.index_select(1, self.removed).to(wide)
        values = polynomial(z, coef).to(x.dtype)
        y = flat.index_copy(1, self.removed, values)
        return super().forward(y).reshape(x.shape)


class Polynomial(nn.Module):
    """c2*z² + c1*z + c0 at every position, coef [2 or 3, C] by channel."""

    def __init__(self, coef: nn.Parameter) -> None:
        super().__init__()
        self.coef = coef

    def forward(self, x: Tensor) -> Tensor:
        wide = compute_dtype(x.dtype)
        coef = self.coef.to(wide)
        coef = coef.view(*coef.shape, *[1] * (x.ndim - 2))
        return polynomial(x.to(wide), coef).to(x.dtype)


def polynomial(z: Tensor, coef: Tensor) -> Tensor:
    """The line or quadratic of z, coef [2 or 3, ...].

    A quadratic has one square; (c2*z + c1)*z would be a product of two secrets, twice the bytes.
    """
    line = coef[1] * z + coef[0]
    if len(coef) == 2:
        return line
    return coef[2] * z.square() + line


def _units(mask: Tensor) -> Tensor:
    """The flat positions where the mask is 1."""
    return mask.flatten().nonzero().flatten()


class Copied(nn.Module):
    """A copy: a dropped site would share memory that the net overwrites."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


def gather_form(net: nn.Module) -> nn.Module:
    """A copy of the net in which each site evaluates only the ReLUs it keeps.

    The logits are bit-identical, with lines and quadratics up to rounding. A site that keeps all
    ReLUs becomes nn.ReLU. One that keeps none becomes its line or quadratic, or else is dropped: no
    call is left in the graph of a converted net, and nn.Identity in other nets, of which `export`
    leaves nothing. Only a net that overwrites memory which a dropped site would share, or that
    torch.fx cannot trace, has copies in their place. The lines of channels that keep no ReLU become
    a part of the batch norm or layer before, where nothing else reads that.

    >>> net = nn.Sequential(nn.Linear(4, 3), fastbcd.MaskedReLU(3), nn.Linear(3, 2))
    >>> fastbcd.set_masks(net, fastbcd.masks(net).without([1]))
    >>> small, x = gather_form(net), torch.randn(5, 4)
    >>> small[1], torch.equal(small(x), net(x))
    (GatheredReLU(2 ReLUs), True)
    """
    for name, module in mask_modules(net).items():
        if type(module) not in (MaskedReLU, MaskedLine, MaskedPoly):
            kind = f"site {name!r} is a {type(module).__name__} of an unfinished start"
            raise ValueError(f"{kind}: finish it first")
    twin = copy.deepcopy(net)
    if isinstance(twin, MaskedActivation):
        return _gathered(twin)
    _fold_lines(twin)
    gathered = {act: _gathered(act) for act in mask_modules(twin).values()}
    dropped: dict[Any, nn.Module] = {
        act: new for act, new in gathered.items() if type(new) is nn.Identity
    }
    if dropped:
        _drop(twin, dropped)
    _replace(twin, gathered)
    return twin


def _gathered(act: MaskedActivation) -> nn.Module:
    mask = act.mask.bool()
    coef = getattr(act, "coef", None)
    if mask.all():
        return nn.ReLU()
    if coef is None or not (~mask & _bent(mask, coef)).any():
        return GatheredReLU(mask) if mask.any() else nn.Identity()
    return GatheredPoly(mask, coef) if mask.any() else Polynomial(coef)


def _bent(mask: Tensor, coef: Tensor) -> Tensor:
    """Where the line or quadratic of the channel is not the identity, bool [C, ...]."""
    bent = (_identity(coef) != coef).any(0)
    return bent.view(-1, *[1] * (mask.ndim - 1)).expand_as(mask)


def _identity(coef: Tensor) -> Tensor:
    """Coefficients of the identity, like coef [2 or 3, C]."""
    identity = torch.zeros_like(coef)
    identity[1] = 1
    return identity


def _fold_lines(net: nn.Module) -> None:
    """Give the lines of channels without ReLUs to the layer before, where that is read once."""
    try:
        graph = _graph_of(net)
    except Exception:  # whatever the net's own forward raises on fx proxies
        return
    calls = graph.find_nodes(op="call_module")
    times = Counter(node.target for node in calls)
    for node in calls:
        act = net.get_submodule(node.target)
        before = node.args[0]
        if not isinstance(act, MaskedLine):
            continue
        if times[before.target] == 1 and len(before.users) == 1:
            _fold(net.get_submodule(before.target), act)


@torch.no_grad()
def _fold(layer: Any, act: MaskedLine) -> None:
    """The layer computes the lines of channels without ReLUs; theirs is the identity then."""
    bias = getattr(layer, "bias", None)
    if not isinstance(layer, FOLDABLE) or bias is None or len(bias) != len(act.mask):
        return
    empty = ~act.mask.view(len(act.mask), -1).any(1)
    identity = _identity(act.coef)
    shift, scale = torch.where(empty, act.coef, identity)
    layer.weight.mul_(scale.view(-1, *[1] * (layer.weight.ndim - 1)))
    bias.mul_(scale).add_(shift)
    act.coef.copy_(torch.where(empty, identity, act.coef))


def _graph_of(net: nn.Module) -> fx.Graph:
    return net.graph if isinstance(net, fx.GraphModule) else _Tracer().trace(net)


def _drop(net: nn.Module, dropped: dict[Any, nn.Module]) -> None:
    """Put these identities in, and erase their calls; copies where they would share memory."""
    _replace(net, dropped)
    try:
        without_inplace(net, _graph_of(net))  # refuses to overwrite what is read later
    except Exception:  # whatever the net's own forward raises on fx proxies
        _replace(net, {identity: Copied() for identity in dropped.values()})
        return
    for part in net.modules():
        if isinstance(part, fx.GraphModule):
            erase_calls(part, part.graph, set(dropped.values()))
            part.recompile()


def _replace(net: nn.Module, new: dict[Any, nn.Module]) -> None:
    """Put modules in the place of others, which may have several names."""
    for name, module in list(net.named_modules(remove_duplicate=False)):
        if module in new:
            owner, _, leaf = name.rpartition(".")
            twin = new[module].train(module.training)
            net.get_submodule(owner).register_module(leaf, twin)


def _recorded(function: Any) -> Any:
    return lambda x, y: x.tracer.create_proxy("call_function", function, (x, y), {})


class _Proxy(fx.Proxy):
    """x += y overwrites x; torch.fx alone takes it for x = x + y."""

    __iadd__ = _recorded(operator.iadd)
    __isub__ = _recorded(operator.isub)
    __imul__ = _recorded(operator.imul)
    __itruediv__ = _recorded(operator.itruediv)


class _Tracer(Tracer):
    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

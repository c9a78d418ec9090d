"""Forms that are kept between calls, for as long as the net and all that it computes with."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from fastbcd.masking.masks import MaskSet
from fastbcd.scoring.collapsed.form import Form
from fastbcd.scoring.program import Activation, Program


class Signature:
    """Everything that a program reads, apart from the bits of its masks.

    Tensors (weights, statistics, buffers of every kind) are compared number by number, the rest
    (structure, eps, strides, numbers in the code) as text: any change counts.
    """

    def __init__(self, program: Program) -> None:
        self.facts: list[Any] = []
        self.tensors: list[Tensor] = []
        for step in program.steps:
            self._add(step.node.name)
            if isinstance(step, Activation):
                self._add([step.site, type(step.module), step.x, step.residual])
                self._add([step.scale, step.shift])
            else:
                self._add([step.run, step.args, step.kwargs])
        self._add(program.constants)
        self._add(program.output)

    def _add(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self.facts.append((tuple(value.shape), value.dtype, value.device))
            self.tensors.append(value.detach())
        elif isinstance(value, nn.Module):
            self._add(type(value))
            own = {k: v for k, v in vars(value).items() if k[0] != "_" and k != "training"}
            self._add(own | dict(value.named_parameters()) | dict(value.named_buffers()))
        elif isinstance(value, dict):
            for key, item in value.items():
                self._add(key)
                self._add(item)
        elif isinstance(value, list | tuple):
            self.facts.append(len(value))
            for item in value:
                self._add(item)
        else:
            self.facts.append(value.name if isinstance(value, fx.Node) else repr(value))

    def equals(self, other: Signature) -> bool:
        return self.facts == other.facts and all(map(torch.equal, self.tensors, other.tensors))

    def kept(self) -> Signature:
        """The same with copies of the tensors, which the net may change in place."""
        self.tensors = [t.clone() for t in self.tensors]
        return self


class _CachedForm(NamedTuple):
    signature: Signature
    form: Form


_forms: weakref.WeakKeyDictionary[nn.Module, _CachedForm] = weakref.WeakKeyDictionary()
_checked: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()


def cached_form(net: nn.Module, signature: Signature, masks: MaskSet) -> Form | None:
    """The form that was built for this net, if it still holds, without the removed ReLUs."""
    cached = _forms.get(net)
    if cached is None:
        return None
    if not signature.equals(cached.signature) or not cached.form.holds(masks):
        del _forms[net]  # its memory is free before another is built
        return None
    cached.form.restrict(masks)
    return cached.form


def keep_form(net: nn.Module, signature: Signature, form: Form) -> None:
    """Remember the form for as long as the net lives and is not changed."""
    _forms[net] = _CachedForm(signature.kept(), form)


def drop_form(net: nn.Module) -> None:
    """Forget a form that turned out to be wrong."""
    _forms.pop(net, None)


def is_checked(net: nn.Module, signature: Signature) -> bool:
    """Was `mark_checked` called for this net with the same structure? Weights may differ."""
    return _checked.get(net) == signature.facts


def mark_checked(net: nn.Module, signature: Signature) -> None:
    _checked[net] = signature.facts

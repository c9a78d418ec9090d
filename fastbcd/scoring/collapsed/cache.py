"""Forms that are kept between calls, for as long as the net and all that it computes with."""

from __future__ import annotations

import weakref
from typing import Any

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
            if isinstance(step, Activation):
                self._add(tuple(step._replace(module=type(step.module))))  # type: ignore[arg-type]
            else:
                self._add(tuple(step))
        self._add([program.constants, program.output])

    def _add(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self.facts.append((tuple(value.shape), value.dtype, value.device))
            self.tensors.append(value.detach())
        elif isinstance(value, nn.Module):
            own = {k: v for k, v in vars(value).items() if k[0] != "_" and k != "training"}
            own |= dict(value.named_parameters()) | dict(value.named_buffers())
            self._add([type(value), own])
        elif isinstance(value, dict):
            self._add(list(value.items()))
        elif isinstance(value, list | tuple):
            self.facts.append(len(value))
            for item in value:
                self._add(item)
        else:
            self.facts.append(value.name if isinstance(value, fx.Node) else repr(value))

    def equals(self, other: Signature) -> bool:
        return self.facts == other.facts and all(map(torch.equal, self.tensors, other.tensors))


_forms: weakref.WeakKeyDictionary[nn.Module, tuple[Signature, Form]] = weakref.WeakKeyDictionary()
_checked: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()


def cached_form(net: nn.Module, signature: Signature, masks: MaskSet) -> Form | None:
    """The form that was built for this net, if it still holds, without the removed ReLUs."""
    if net not in _forms:
        return None
    known, form = _forms[net]
    if not signature.equals(known) or not form.holds(masks):
        drop_form(net)  # its memory is free before another is built
        return None
    form.restrict(masks)
    return form


def keep_form(net: nn.Module, signature: Signature, form: Form) -> None:
    """Remember the form for as long as the net lives and is not changed."""
    signature.tensors = [t.clone() for t in signature.tensors]  # the net may change its own
    _forms[net] = signature, form


def drop_form(net: nn.Module) -> None:
    """Forget a form that turned out to be wrong."""
    _forms.pop(net, None)


def is_checked(net: nn.Module, signature: Signature) -> bool:
    """Was `mark_checked` called for this net with the same structure? Weights may differ."""
    return _checked.get(net) == signature.facts


def mark_checked(net: nn.Module, signature: Signature) -> None:
    _checked[net] = signature.facts

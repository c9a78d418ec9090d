"""The public names: they exist with their promised signatures, and have examples.

`tests/test_quality.py` runs the examples; this file checks that there are some.
"""

from __future__ import annotations

import dataclasses
import doctest
import inspect
import re
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fastbcd

# Their examples need a file or a run; other tests create these.
FILES = ("load_snl", "load_autorep", "load_relupruner", "report.write")


def public(module: types.ModuleType = fastbcd) -> Iterator[tuple[str, Any]]:
    """Every public callable by name, in the package and in its public namespaces."""
    own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__]
    for name in getattr(module, "__all__", [n for n in own if not n.startswith("_")]):
        value = getattr(module, name)
        if isinstance(value, types.ModuleType):
            yield from public(value)
        elif callable(value):
            yield f"{module.__name__}.{name}", value


PUBLIC = dict(public())
OPS = [getattr(fastbcd.ops, name) for name in fastbcd.ops.__all__]


@pytest.mark.parametrize("name", PUBLIC)
def test_documented_by_an_example(name) -> None:
    text = PUBLIC[name].__doc__ or ""
    assert len(text.split()) > 3, f"{name} has no docstring"
    examples = doctest.DocTestParser().get_examples(text)
    assert examples, f"{name} has no example"
    if not name.endswith(FILES):
        assert any(doctest.SKIP not in e.options for e in examples), f"{name}: none runs"


@pytest.mark.parametrize("name", [n for n, v in PUBLIC.items() if inspect.isclass(v)])
def test_methods_are_documented(name) -> None:
    owner = PUBLIC[name]
    for method, value in vars(owner).items():
        is_method = isinstance(value, types.FunctionType | property | classmethod | staticmethod)
        if is_method and not method.startswith("_") and not hasattr(torch.nn.Module, method):
            assert inspect.getdoc(getattr(owner, method)), f"{name}.{method} has no docstring"


@pytest.mark.parametrize("settings", [fastbcd.Engine, fastbcd.Finetune])
def test_help_documents_every_setting(settings) -> None:
    """As `name: text`, `name, other: text`, or by the name in backticks."""
    documented = set(re.findall(r"\w+(?=: |, \w+: |`)", settings.__doc__))
    assert {field.name for field in dataclasses.fields(settings)} - documented == set()


@pytest.mark.parametrize("op", OPS, ids=fastbcd.ops.__all__)
def test_ops_document_their_shapes(op) -> None:
    text = op.__doc__ + fastbcd.ops.masked_relu.__doc__ * ("as in `masked_relu`" in op.__doc__)
    for tensor, parameter in inspect.signature(op).parameters.items():
        if parameter.annotation == "Tensor":
            documented = re.search(rf"\b{tensor}\b(: | is )\[[^]]+\]", text)
            assert documented, f"{op.__name__} does not document the shape of {tensor}"


@pytest.mark.parametrize("op", OPS, ids=fastbcd.ops.__all__)
def test_ops_equal_their_documented_formula(op) -> None:
    """The line "Equivalent to:" is evaluated."""
    torch.manual_seed(0)
    x, residual, alpha = torch.randn(5, 3, 4, 4), torch.randn(5, 3, 4, 4), torch.rand(3, 4, 4)
    scale, shift, coef = torch.rand(3), torch.randn(3), torch.randn(3, 3)
    tensors = {"x": x, "mask": alpha > 0.5, "coef": coef, "alpha": alpha, "aux": alpha,
               "residual": residual, "scale": scale, "shift": shift}  # fmt: skip
    asked = {n: t for n, t in tensors.items() if n in inspect.signature(op).parameters}
    z = x * scale.view(3, 1, 1) + shift.view(3, 1, 1) if "scale" in asked else x
    if op is fastbcd.ops.masked_line:
        asked["coef"] = coef[:2]
    names = {**tensors, "torch": torch, "masked_poly": fastbcd.ops.masked_poly, "z": z + residual}
    names.update(zip(("c0", "c1", "c2"), coef.view(3, 3, 1, 1), strict=True))
    text = re.search(r"^ *Equivalent to: (.*)$", op.__doc__, re.MULTILINE)
    assert text, f'{op.__name__} has no line "Equivalent to:"'
    assert torch.equal(op(**asked), eval(text[1], names))


# ------------------------------------------------------------------- promised signatures

# Parameters by name, place and default. A signature may have more defaults, and more parameters
# that have a default.
AFFINE = "scale=None, shift=None, residual=None"
PROMISED = {
    "convert": "model, example_input, replacement='identity'",
    "masks": "net",
    "set_masks": "net, masks",
    "Site": "name, shape, start",
    "MaskSet.count": "self",
    "MaskSet.counts": "self",
    "MaskSet.copy": "self",
    "MaskSet.without": "self, ids",
    "MaskSet.sample": "self, k, *, seed, step, trial",
    "MaskSet.iou": "self, other",
    "MaskSet.save": "self, path",
    "MaskSet.load": "path",
    "Engine": "name='auto', *, batch_size=None, memory=None, wave=8",
    "score": "net, removals, data, engine='auto'",
    "Scores": "correct, loss, base_correct, base_loss, samples, engine",
    "bcd": "net, data, budget, *, drc=100, rt=50, adt=0.3, "
    "finetune=fastbcd.Finetune(epochs=20, lr=1e-3), finetune_when='every_step', "
    "proposal=None, teacher=None, test=None, samples=None, seed=0, run_dir=None, "
    "resume='auto', engine='auto'",
    "steps": "net, data, budget, *, drc=100, rt=50, adt=0.3, proposal=None, test=None, "
    "samples=None, seed=0, run_dir=None, resume='auto', engine='auto'",
    "Run": "model, masks, history",
    "Finetune": "epochs=20, lr=1e-3",
    "snl": "net, data, budget",
    "autorep": "net, data, budget",
    "deepreduce": "net, data, budget",
    "relupruner": "net, data, budget",
    "load_run": "path",
    "load_snl": "path",
    "load_autorep": "path",
    "models.resnet18": "num_classes, image_size",
    "models.wide_resnet22_8": "num_classes, image_size",
    "models.resnet20": "num_classes, image_size",
    "MaskedReLU": "shape",
    "MaskedPoly": "shape",
    "ops.masked_relu": f"x, mask, *, {AFFINE}",
    "ops.masked_line": f"x, mask, coef, *, {AFFINE}",
    "ops.masked_poly": f"x, mask, coef, *, {AFFINE}",
    "backends": "",
}


def find(path: str) -> Any:
    found: Any = fastbcd
    for name in path.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("name", PROMISED)
def test_signatures(name) -> None:
    promised = inspect.signature(eval(f"lambda {PROMISED[name]}: 0", {"fastbcd": fastbcd}))
    mine = dict(inspect.signature(find(name)).parameters)
    by_place = [p.name for p in promised.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    places = [p.name for p in mine.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert places[: len(by_place)] == by_place
    for parameter in promised.parameters.values():
        assert parameter.name in mine, f"{name} has no {parameter.name}"
        found = mine.pop(parameter.name)
        if parameter.default is not parameter.empty:
            assert found.default == parameter.default, parameter.name
    for extra in mine.values():
        optional = extra.default is not extra.empty or extra.kind is extra.VAR_KEYWORD
        assert optional, f"{name} also requires {extra.name}"


@pytest.mark.parametrize("name", [n for n, v in PUBLIC.items() if inspect.isfunction(v)])
def test_beyond_three_arguments_calls_are_by_keyword(name) -> None:
    """Except for operators on tensors, and for `engine` in the promised signature of `score`."""
    found = inspect.signature(PUBLIC[name]).parameters.values()
    places = [p.name for p in found if p.kind is p.POSITIONAL_OR_KEYWORD]
    if not name.startswith("fastbcd.ops."):
        assert len(places) <= 3 + (name == "fastbcd.score"), places


def test_attributes() -> None:
    masks = fastbcd.MaskSet.full({"a": (2, 3), "b": (4,)})
    assert masks.sites == (("a", (2, 3), 0), ("b", (4,), 6))
    assert masks.total == 10
    assert masks.bits.dtype == torch.bool
    assert isinstance(fastbcd.Scores.drop, property)


def test_all_is_sorted_and_complete() -> None:
    assert fastbcd.__all__ == sorted(fastbcd.__all__)
    promised = {name.split(".")[0] for name in PROMISED} | {"ImageData", "ops", "models"}
    assert promised <= set(fastbcd.__all__)

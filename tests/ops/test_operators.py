"""The ops as torch operators: opcheck, torch.compile, torch.export, AMP."""

from __future__ import annotations

import warnings
from itertools import product

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from fastbcd import MaskedPoly, MaskedReLU, ops
from fastbcd.ops import registry
from helpers.op_cases import (
    DIFFERENTIABLE,
    MASKED,
    ORDERS,
    TRIALS,
    Case,
    arguments,
    equal,
    formula,
    function_of,
    leaves,
)

OPERATORS = torch.ops.fastbcd
SITE = (2, 3, 3, 4, 2)
# The arguments of each operator, by name.
ARGUMENTS = {
    "masked": "x unit coef scale shift residual aux trials kind",
    "masked_out": "x mask coef scale shift residual trials out",
    "masked_backward": "grad y_if_relu x unit coef scale shift residual trials no no no yes kind",
}


CHECKED = [
    *product(("masked", "masked_backward"), DIFFERENTIABLE),
    *product(("masked_out",), MASKED),
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("name", "stem"), CHECKED)
def test_opcheck(name, stem, order, device) -> None:
    forward = name == "masked"
    for full in (False, True):
        for trials in ("none", TRIALS[ORDERS.index(order) + 2])[: 1 + (full and forward)]:
            trials = trials if stem in MASKED else "none"
            case = Case(stem, "float32", trials, order, affine=full, residual=full, sizes=SITE)
            given = arguments(case, device)
            y = torch.randn_like(given["grad"])
            values = {
                **given, **(leaves(case, given) if forward else {}), "trials": case.stacked,
                "y": y, "out": y, "yes": True, "x_shared": False, "residual_shared": False,
                "eps": 1e-5, "statistics": torch.rand(2, 3, device=device), "no": False,
                "kind": 0,
            }  # fmt: skip
            values |= {"unit": values["mask"], "y_if_relu": y if stem == "masked_relu" else None}
            if stem == "soft_relu":
                values |= {"unit": values["alpha"], "kind": 1}
            if stem == "indicator_poly":
                values["kind"] = 1
            else:
                values["aux"] = None
            tensors = tuple(values[n] for n in ARGUMENTS[name].split())
            torch.library.opcheck(getattr(OPERATORS, name).default, tensors)


@pytest.mark.parametrize("order", ORDERS[:2])
@pytest.mark.parametrize("op", [*DIFFERENTIABLE, "shared"])
def test_compile_fullgraph(op, order, device) -> None:
    trials, op = ("shared x", "masked_relu") if op == "shared" else ("none", op)
    case = Case(op, "float32", trials, order, affine=op in MASKED, residual=True,
                sizes=(2, 3, 4, 3, 3))  # fmt: skip
    given = arguments(case, device)
    function = function_of(case, given)

    torch._dynamo.reset()  # the limit of recompilations is one per code object

    def net(inputs):
        return function(**{**inputs, "x": inputs["x"] * 2}).tanh()

    def run(net):
        inputs = leaves(case, given)
        y = net(inputs)
        y.square().sum().backward()
        return [y.detach(), *(t.grad for t in inputs.values())]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # inductor's own deprecations
        compiled = run(torch.compile(net, fullgraph=True, backend="aot_eager"))
    for a, b in zip(compiled, run(net), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("op", ["masked_relu", pytest.param("masked_poly", marks=pytest.mark.long)])
def test_compile_with_inductor(op, device, monkeypatch) -> None:
    monkeypatch.setenv("CI", "true")  # inductor is stricter there
    given = arguments(Case(op, affine=True, residual=True, sizes=(1, 3, 4, 3, 3)), device)
    function = function_of(Case(op), given)
    inputs = {n: given[n] for n in ("x", "scale", "shift", "residual")}
    inputs |= {"coef": given["coef"]} if op == "masked_poly" else {}
    no_cache = torch.compiler.config.patch(force_disable_caches=True)
    with warnings.catch_warnings(), no_cache:
        warnings.simplefilter("ignore")
        y = torch.compile(lambda inputs: function(**inputs) + 1, fullgraph=True)(inputs)
    torch.testing.assert_close(y, function(**inputs) + 1)


@pytest.mark.parametrize("kind", [MaskedReLU, MaskedPoly])
def test_export(kind, device) -> None:
    act = kind((4, 3, 3)).to(device)
    act.mask[1:3] = False
    net = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), act).to(device).eval()
    x = torch.randn(3, 2, 5, 5, device=device)
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(net, (x,), dynamic_shapes=({0: batch},))
    assert any("fastbcd.masked" in str(n.target) for n in program.graph.nodes)
    for images in (x, torch.randn(5, 2, 5, 5, device=device)):
        torch.testing.assert_close(program.module()(images), net(images))


def test_raw_operators_have_gradients() -> None:
    """Calling torch.ops directly does not lose the gradient."""
    given = arguments(Case("masked_relu"))
    x = given["x"].clone().requires_grad_()
    nothing = [None] * 5
    OPERATORS.masked.default(x, given["mask"], *nothing, False, 0).sum().backward()
    assert x.grad is not None


def test_autocast(device) -> None:
    """In a bf16 region the op takes the output of the convolution and keeps its dtype."""
    case = Case("masked_relu", "bfloat16", affine=True)
    given = arguments(case, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = ops.masked_relu(given["x"], given["mask"], scale=given["scale"], shift=given["shift"])
    assert equal(y, formula(case, given))


def test_inference_mode(device) -> None:
    given = arguments(Case("masked_relu"), device)
    with torch.inference_mode():
        x = given["x"].clone()
        assert ops.masked_relu(x, given["mask"], out=x) is x


class Watch(TorchDispatchMode):
    """Keeps the names of the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def forward_and_backward(case: Case) -> list[torch.Tensor]:
    given = arguments(case)
    inputs = leaves(case, given)
    y = function_of(case, given)(**inputs)
    return [y.detach(), *torch.autograd.grad(y, list(inputs.values()), given["grad"])]


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_a_call_is_one_node_only_where_something_watches(op, monkeypatch) -> None:
    """Otherwise it skips torch's dispatcher, forward and backward, with the same result."""
    case = Case(op, affine=op in MASKED, residual=True, sizes=SITE)
    with Watch() as watch:
        watched = forward_and_backward(case)
    names = [n for n in watch.seen if n.startswith("fastbcd")]
    assert {"fastbcd::masked", "fastbcd::masked_backward"} <= set(names)
    for implementation in registry.OPERATORS.values():
        monkeypatch.setattr(implementation, "default", None)
    assert all(map(torch.equal, forward_and_backward(case), watched))


def test_tracers_see_one_node() -> None:
    x, mask = torch.randn(2, 3, 4), torch.rand(3, 4) > 0.5
    graph = make_fx(lambda x: ops.masked_relu(x, mask) + 1)(x).graph
    assert [n.target for n in graph.nodes if "fastbcd" in str(n.target)] == [
        OPERATORS.masked.default
    ]
    with FakeTensorMode() as mode:
        assert ops.masked_relu(mode.from_tensor(x), mode.from_tensor(mask)).shape == x.shape
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated, and names what it compares
        traced = torch.jit.trace(lambda x: ops.masked_relu(x, mask), x)
    assert "fastbcd::masked(" in str(traced.graph)
    assert ops.masked_relu(x.to("meta"), mask.to("meta")).is_meta

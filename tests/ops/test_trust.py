"""A kernel that has not agreed with the reference is not used (a module stands in for a GPU's)."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fastbcd
from fastbcd import kernels, ops
from fastbcd.ops import reference, selfcheck
from fastbcd.ops.kink import kink
from fastbcd.runtime import warn_once

pytestmark = pytest.mark.skipif(kernels.INTERPRETED, reason="the C++ kernels are not in use")
X, MASK = torch.randn(2, 3, 4, 4), torch.rand(3, 4, 4) > 0.5
NAMES = [n for n in vars(kernels.CPU.module) if n.endswith(("_forward", "_backward", "kink"))]


@pytest.fixture
def module(monkeypatch) -> SimpleNamespace:
    """A module with the C++ kernels that counts its calls; none is trusted."""
    calls: list[tuple[str, int]] = []

    def counted(name: str) -> Any:
        def kernel(*given: Any) -> None:
            calls.append((name, given[0].numel()))
            getattr(kernels.CPU.module, name)(*given)

        return kernel

    fake = SimpleNamespace(**{name: counted(name) for name in NAMES})
    fake.TRUSTED, fake.DTYPES, fake.calls = False, kernels.CPU.module.DTYPES, calls
    fake.describe = lambda: "Triton 9 on a GPU"
    monkeypatch.setattr(kernels, "module_for", lambda x: fake)
    monkeypatch.setattr(selfcheck, "_verdicts", {})
    monkeypatch.setattr(warn_once, "_issued", set())
    return fake


def wrong(out: torch.Tensor, *given: Any) -> None:
    out.fill_(7.0)


def does_not_compile(*given: Any) -> None:
    raise RuntimeError("ptxas fatal: Value 'sm_90a' is not defined")


def test_a_kernel_is_compared_at_its_first_use_for_each_dtype(module) -> None:
    for _ in range(3):
        ops.masked_relu(X, MASK)
    assert [n for _, n in module.calls].count(X.numel()) == 3
    assert len(module.calls) == 3 + 3
    ops.masked_relu(X.half(), MASK)
    assert len(module.calls) == 3 + 3 + 1 + 3
    x = X.clone().requires_grad_()
    ops.masked_relu(x, MASK).sum().backward()
    assert [name for name, _ in module.calls].count("masked_backward") == 1 + 3


@pytest.mark.parametrize("broken", [wrong, does_not_compile])
@pytest.mark.parametrize("name", ["masked_forward", "masked_backward"])
def test_a_kernel_that_fails_is_replaced_with_one_warning(module, name, broken) -> None:
    setattr(module, name, broken)
    x = X.clone().requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            y = ops.masked_relu(x, MASK)
            (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y, reference.masked(x, MASK))
    assert torch.equal(dx, torch.where(MASK & (y <= 0), 0.0, 1.0))
    (message,) = {str(w.message) for w in caught}
    for words in (name, "float32", fastbcd.__version__, torch.__version__, "Triton 9", "--check"):
        assert words in message
    assert ("sm_90a" if broken is does_not_compile else "differ, first at") in message


def test_only_the_variant_that_fails_is_replaced(module) -> None:
    right = module.masked_forward

    def broken(y, x, mask, coef, *rest):
        right(y, x, mask, coef, *rest)
        if coef is not None and len(coef) == 3:
            wrong(y)

    module.masked_forward = broken
    with pytest.warns(RuntimeWarning, match="masked_forward"):
        ops.masked_poly(X, MASK, torch.ones(3))
    before = len(module.calls)
    ops.masked_relu(X, MASK)
    assert len(module.calls) == before + 1 + 3


def test_the_kink_is_compared_too(module) -> None:
    module.kink = wrong
    c = torch.tensor([[[1.0, -3.0]]])
    with pytest.warns(RuntimeWarning, match="kink"):
        kink(c, torch.ones(1, 2), torch.ones(1, 1, dtype=torch.uint8), fresh=False)
    assert c.tolist() == [[[0.0, 2.0]]]


def test_no_verdict_without_memory_for_the_comparison(module) -> None:
    def no_memory(*given: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    right, module.masked_forward = module.masked_forward, no_memory
    with pytest.raises(torch.OutOfMemoryError):
        ops.masked_relu(X, MASK)
    assert not selfcheck._verdicts
    module.masked_forward = right
    assert torch.equal(ops.masked_relu(X, MASK), reference.masked(X, MASK))


@pytest.mark.parametrize("name", NAMES)
def test_every_kernel_has_a_comparison(module, name) -> None:
    x = torch.empty(0)
    for variant in selfcheck.VARIANTS.get(name, ("",)):
        assert selfcheck.trusted(name, variant, getattr(module, name), x)
    selfcheck._verdicts.clear()
    with pytest.warns(RuntimeWarning, match=name):
        assert not selfcheck.trusted(name, variant, does_not_compile, x)


def test_on_a_cuda_device(gpu, monkeypatch, capsys) -> None:
    """The comparison runs on the device of x, once: later calls do not synchronise."""
    monkeypatch.setattr(selfcheck, "_verdicts", {})
    monkeypatch.setattr(kernels.TRITON.module, "TRUSTED", False)
    x, mask = X.to("cuda:1"), MASK.to("cuda:1")
    y = ops.masked_relu(x, mask)
    assert torch.equal(y.cpu(), reference.masked(X, MASK))
    key = ("masked_forward", "identity", torch.float32, torch.device("cuda:1"))
    assert selfcheck._verdicts == {key: True}
    gpu.reset()
    ops.masked_relu(x, mask)
    assert "sync" not in gpu.counts
    assert all(not bad for _, bad in selfcheck.comparisons("cuda:0"))

"""Every kernel compared with its formula in the reference, on small random tensors.

No kernel of a GPU is used before it agreed with its formula once in the process, for its dtype.

The schema of a kernel's operator names its arguments; `arguments` draws one for each name.
Elementwise results must be equal to the last bit, sums over the batch nearly so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbcd import kernels
from fastbcd.kernels.geometry import compute_dtype
from fastbcd.ops.calls import KERNELS, by_formula, by_kernel
from fastbcd.runtime.version import __version__
from fastbcd.runtime.warn_once import warn_once

TRIALS = ("none", "stacked", "shared x", "shared residual", "both shared")
ITEMS = ("x", "residual", "grad", "y")  # arguments [B, *S] or [T, B, *S]
ELEMENTWISE = ("y", "dx", "dresidual")  # all other results are sums
# Of a kernel's checks, those at its first use: order, optional arguments, trials.
FIRST = (
    ("contiguous", "bare", "none"),
    ("channels_last", "full", "none"),
    ("contiguous", "full", "both shared"),
)
T, B, SITE = 3, 5, (24, 7, 6)  # trials, batch, and the shape of a site


class Check(NamedTuple):
    """One call of a kernel."""

    kernel: str
    dtype: torch.dtype
    order: str  # contiguous or channels_last
    optional: str  # full: with every optional argument; bare: with none
    trials: str = "none"

    def __str__(self) -> str:
        return "-".join(map(str, self)).replace("torch.", "").replace(" ", "_")


def checks(kernel: str, dtype: torch.dtype) -> Iterator[Check]:
    """The calls of a kernel that are compared."""
    for order, optional in product(("contiguous", "channels_last"), ("bare", "full")):
        yield Check(kernel, dtype, order, optional)
        if "bool trials" in KERNELS[kernel].schema:
            for trials in TRIALS[1 : 5 if optional == "full" else 3]:
                yield Check(kernel, dtype, order, optional, trials)


def comparisons(device: str) -> Iterator[tuple[Check, list[str]]]:
    """(what was compared, what differs) for every kernel that this device uses."""
    module: Any = kernels.module_for(torch.empty(0, device=device))
    for kernel, dtype in product(KERNELS, getattr(module, "DTYPES", ())):
        for check in checks(kernel, dtype) if hasattr(module, kernel) else ():
            bad = disagreement(check, getattr(module, kernel), device)
            if bad is not None:
                yield check, bad


def trusted(kernel: str, function: Any, x: Tensor) -> bool:
    """Does a kernel agree with its formula? Compared once per dtype and device of a process."""
    key = (kernel, x.dtype, x.device)
    if key not in _verdicts:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return True  # a CUDA graph cannot contain the comparison
        first = [c for c in checks(kernel, x.dtype) if (c.order, c.optional, c.trials) in FIRST]
        found = ((check, disagreement(check, function, x.device)) for check in first)
        wrong = next(((check, bad) for check, bad in found if bad), None)
        _verdicts[key] = wrong is None
        if wrong is not None:
            warn_once(
                f"fastbcd uses its slow reference for {kernel} on {x.device} from now on: the "
                f"kernel fails its check at first use, {wrong[0]}: {'; '.join(wrong[1])} "
                f"(fastbcd {__version__}, torch {torch.__version__}, "
                f"{kernels.module_for(x).describe()}). Please report this with the output of "
                f"`python -m fastbcd.info --check`."
            )
    return _verdicts[key]


_verdicts: dict[tuple[str, torch.dtype, torch.device], bool] = {}


def disagreement(check: Check, function: Callable[..., None], device: Any) -> list[str] | None:
    """How a kernel differs from its formula in one call; None if no kernel takes the call."""
    schema, lay_out, formula = KERNELS[check.kernel]
    found, wanted = (lay_out(*arguments(check, device)) for _ in range(2))
    if not found.fits:
        return None
    by_formula(formula, wanted)
    try:
        by_kernel(function, found)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # it does not compile, or does not start
        return [f"{type(error).__name__}: {error}"]
    names = re.findall(r"Tensor (\w+)", schema.partition("->")[2]) or ["y"]
    got, want = (
        {n: t for n, t in zip(names, call.outputs, strict=True) if t is not None}
        for call in (found, wanted)
    )
    # All results of a batch norm depend on sums.
    return differences(got, want, () if check.kernel.startswith("norm") else ELEMENTWISE)


def arguments(check: Check, device: Any, site: tuple[int, ...] = SITE) -> list[Any]:
    """The arguments of an operator, the same every time."""
    schema = KERNELS[check.kernel].schema
    g = torch.Generator().manual_seed(0)
    stacked, full = check.trials != "none", check.optional == "full"
    lead = (T,) if stacked else ()
    shared = {n: check.trials in (f"shared {n}", "both shared") for n in ("x", "residual")}
    values = {"trials": stacked, "eps": 1e-5, **{f"{n}_shared": shared[n] for n in shared}}
    shapes = {n: (*(() if shared.get(n) else lead), B, *site) for n in ITEMS}
    shapes |= {"mask": (*lead, *site), "alpha": site, "aux": site, "coef": (3, site[0])}
    shapes |= {"statistics": (2, site[0]), "c": (B, T, 9), "a": (B, 9), "bits": (B, T)}

    def draw(kind: str, name: str) -> Any:
        if kind in ("bool", "float"):
            return values.get(name, full)
        if kind == "Tensor?" and not full:
            return None
        t = torch.randn(shapes.get(name, site[:1]), generator=g, dtype=torch.float64, device="cpu")
        if name in ("mask", "bits"):
            t = (t > 0).to(torch.bool if name == "mask" else torch.uint8)
        else:
            t = t.abs() if name == "statistics" else t
            t = t.to(check.dtype if name in (*ITEMS, "c", "a") else compute_dtype(check.dtype))
        channel = t.ndim - len(site)
        if check.order == "channels_last" and channel >= 0 and name != "c":
            return t.movedim(channel, -1).contiguous().to(device).movedim(-1, channel)
        return t.to(device)

    inputs = re.findall(r"(Tensor\??|bool|float) (\w+)", schema.partition("->")[0])
    return [draw(kind, name) for kind, name in inputs]


def differences(
    found: dict[str, Tensor],
    wanted: dict[str, Tensor],
    elementwise: tuple[str, ...] = ELEMENTWISE,
    rounding: float = 128,
) -> list[str]:
    """How results differ: elementwise ones in any bit, sums by more than `rounding` eps."""
    lines = []
    for name, want in wanted.items():
        got = found[name]
        if got.shape != want.shape or got.dtype != want.dtype:
            lines.append(f"{name} is {got.dtype} {tuple(got.shape)}, not {tuple(want.shape)}")
            continue
        same = (got == want) | (got.isnan() & want.isnan())
        if name not in elementwise and want.numel():
            size = 1 + want.nan_to_num(0, 0, 0).abs().max()
            same |= (got - want).abs() <= rounding * torch.finfo(want.dtype).eps * size
        if not same.all():
            at = tuple((~same).nonzero()[0].tolist())
            lines.append(
                f"{name}: {(~same).sum().item()} of {same.numel()} differ, "
                f"first at {at}: {got[at].item()!r}, expected {want[at].item()!r}"
            )
    return lines

"""Every kernel compared with its formula in the reference, on small random tensors.

No kernel of a GPU is used before it agreed with its formula once in the process, for its dtype and
for the constants that it is compiled with.

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
ORDERS = ("contiguous", "channels_last")
BITS = ("identity", "line", "quadratic")
UNITS = ("identity signed", "identity absolute", "line absolute", "quadratic signed",
         "quadratic absolute", "soft identity signed")  # fmt: skip
VARIANTS = {
    "masked_forward": (*BITS, *(f"soft {name}" for name in BITS)),
    "masked_backward": (*BITS, *UNITS, "soft line signed", "soft quadratic signed"),
}
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
    variant: str
    dtype: torch.dtype
    order: str  # contiguous or channels_last
    optional: str  # full: with every optional argument; bare: with none
    trials: str = "none"

    def __str__(self) -> str:
        return (
            "-".join(filter(None, map(str, self)))
            .replace("torch.", "")
            .replace(" ", "_")
        )

    def shared(self, name: str) -> bool:
        """Do all trials use the same tensor of this name? Only x and residual can be shared."""
        both = name in ("x", "residual") and self.trials == "both shared"
        return both or self.trials == f"shared {name}"

    @property
    def rows(self) -> int:
        """Rows of coef; 0: none."""
        return 2 * ("line" in self.variant) + 3 * ("quadratic" in self.variant)

    @property
    def units(self) -> int:
        """What is summed for each unit."""
        return 1 * ("signed" in self.variant) + 2 * ("absolute" in self.variant)


def checks(
    kernel: str, dtype: torch.dtype, variants: tuple[str, ...] = ()
) -> Iterator[Check]:
    """The calls of a kernel that are compared, of all or of some variants."""
    variants = variants or VARIANTS.get(kernel, ("",))
    for variant, order, optional in product(variants, ORDERS, ("bare", "full")):
        yield Check(kernel, variant, dtype, order, optional)
        if variant in BITS:
            for trials in TRIALS[1 : 5 if optional == "full" else 3]:
                yield Check(kernel, variant, dtype, order, optional, trials)


def comparisons(device: str) -> Iterator[tuple[Check, list[str]]]:
    """(what was compared, what differs) for every kernel that this device uses."""
    module: Any = kernels.module_for(torch.empty(0, device=device))
    for kernel, dtype in product(KERNELS, getattr(module, "DTYPES", ())):
        function = getattr(module, kernel, None)
        if function is None:
            continue
        for check in checks(kernel, dtype):
            lines = disagreement(check, function, device)
            if lines is not None:
                yield check, lines


def first_use(dtypes: tuple[torch.dtype, ...]) -> int:
    """How many kernels a first scoring and training step compiles to compare them.

    That is for lines, the saliency included; a net's own memory orders and alignments add a few.
    """
    used = (("masked_forward", "line"), ("masked_backward", "line"),
            ("masked_backward", "line absolute"))  # fmt: skip
    return sum(
        (check.order, check.optional, check.trials) in FIRST
        for (kernel, variant), dtype in product(used, dtypes)
        for check in checks(kernel, dtype, (variant,))
    )


def trusted(kernel: str, variant: str, function: Any, x: Tensor) -> bool:
    """Does a kernel agree with its formula? Compared once per dtype and device of a process."""
    key = (kernel, variant, x.dtype, x.device)
    if key in _verdicts:
        return _verdicts[key]
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return True  # a CUDA graph cannot contain the comparison
    complaint = _first_complaint(kernel, variant, function, x)
    _verdicts[key] = complaint is None
    if complaint is not None:
        warn_once(
            f"fastbcd uses its slow reference for {kernel} on {x.device} from now on: the kernel "
            f"fails its check at first use, {complaint} (fastbcd {__version__}, torch "
            f"{torch.__version__}, {kernels.module_for(x).describe()}). Please report this with "
            f"the output of `python -m fastbcd.info --check`."
        )
    return _verdicts[key]


_verdicts: dict[tuple[str, str, torch.dtype, torch.device], bool] = {}


def _first_complaint(kernel: str, variant: str, function: Any, x: Tensor) -> str | None:
    """What differs in the first check that fails."""
    for check in checks(kernel, x.dtype, (variant,)):
        if (check.order, check.optional, check.trials) in FIRST:
            lines = disagreement(check, function, x.device)
            if lines:
                return f"{check}: {'; '.join(lines)}"
    return None


def disagreement(
    check: Check, function: Callable[..., None], device: Any
) -> list[str] | None:
    """How a kernel differs from its formula in one call; None if no kernel takes the call."""
    schema, lay_out, formula = KERNELS[check.kernel]
    call = lay_out(*arguments(check, device))
    if not call.fits:
        return None
    same = arguments(check, device)
    truth = lay_out(*same)
    by_formula(formula, truth, same)
    try:
        by_kernel(function, call)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # it does not compile, or does not start
        return [f"{type(error).__name__}: {error}"]
    names = re.findall(r"Tensor (\w+)", schema.partition("->")[2]) or ["y"]
    wanted = {n: t for n, t in zip(names, truth.outputs, strict=True) if t is not None}
    actual = dict(zip(names, call.outputs, strict=True))
    return differences(actual, wanted)


def arguments(check: Check, device: Any, site: tuple[int, ...] = SITE) -> list[Any]:
    """The arguments of an operator, the same every time."""
    inputs = KERNELS[check.kernel].schema.partition("->")[0]
    generator = torch.Generator().manual_seed(0)
    full = check.optional == "full"
    flags = {
        "trials": check.trials != "none",
        "x_shared": check.shared("x"),
        "residual_shared": check.shared("residual"),
        "want_small": full or (check.rows > 0 and not check.units),
        "units": check.units,
    }
    from_output = check.kernel == "masked_backward" and check.variant == "identity"
    bare = not full
    absent = {
        "y": not from_output,
        "x": from_output and bare,
        "coef": not check.rows,
        "shift": from_output or bare,
        "residual": from_output or bare,
        "units": True,
    }
    if check.units or "soft" in check.variant:
        absent["scale"] = absent["shift"] = True
    values: list[Any] = []
    for kind, name in re.findall(r"(Tensor\??|bool|int|float) (\w+)", inputs):
        if not kind.startswith("Tensor"):
            values.append(flags.get(name, full))
        elif kind == "Tensor?" and absent.get(name, bare):
            values.append(None)
        else:
            values.append(_draw(name, check, site, generator).to(device))
    return values


def _draw(
    name: str, check: Check, site: tuple[int, ...], generator: torch.Generator
) -> Tensor:
    """A random tensor for the argument of this name, in the memory order of the check."""
    shape = _shape(name, check, site)
    t = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    if name == "mask" and "soft" not in check.variant:
        t = t > 0
    elif name == "bits":
        t = (t > 0).to(torch.uint8)
    elif name in (*ITEMS, "c", "a"):
        t = t.to(check.dtype)
    else:
        t = t.to(compute_dtype(check.dtype))
    channel = t.ndim - len(site)
    if check.order == "channels_last" and channel >= 0 and name != "c":
        return t.movedim(channel, -1).contiguous().movedim(-1, channel)
    return t


def _shape(name: str, check: Check, site: tuple[int, ...]) -> tuple[int, ...]:
    lead = () if check.trials == "none" else (T,)
    if name in ITEMS:
        return (B, *site) if check.shared(name) else (*lead, B, *site)
    shapes = {
        "mask": (*lead, *site),
        "coef": (check.rows, site[0]),
        "c": (B, T, 9),
        "a": (B, 9),
        "bits": (B, T),
    }
    return shapes.get(name, site[:1])


def differences(
    actual: dict[str, Tensor],
    wanted: dict[str, Tensor],
    elementwise: tuple[str, ...] = ELEMENTWISE,
    rounding: float = 128,
) -> list[str]:
    """How results differ: elementwise ones in any bit, sums by more than `rounding` eps."""
    lines = []
    for name, want in wanted.items():
        got = actual[name]
        if got.shape != want.shape or got.dtype != want.dtype:
            lines.append(
                f"{name} is {got.dtype} {tuple(got.shape)}, not {tuple(want.shape)}"
            )
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

"""Run cases on the interpreted Triton kernels and print {case: differences} as JSON.

A process of its own, because TRITON_INTERPRET=1 must be set before triton is imported:
TRITON_INTERPRET=1 python tests/helpers/interpreter_run.py [all]
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from triton.runtime.interpreter import InterpretedFunction

from fastbcd import kernels
from helpers.op_cases import (
    MASKED,
    Case,
    compare,
    compare_kink,
    compare_out,
    grid,
    groups,
    odd_cases,
)

DTYPES = ("float32", "float16", "bfloat16")
KINKS = [(1, 1, 1), (17, 2, 3), (5, 3, 130), (3, 1, 256)]
ULPS = 1  # the interpreter truncates to bf16, a GPU rounds


def cases(everything: bool) -> Iterator[Case]:
    """Every group with one of its variants, or with all."""
    for i, group in enumerate(groups(DTYPES)):
        variants = grid(*group)
        # Neighbours in the list of groups get other variants.
        yield from variants if everything else [variants[-1 - i % len(variants)]]
    odd = list(odd_cases())
    yield from odd if everything else odd[::9]


def prepare_helpers_once() -> None:
    """Half of the time: the interpreter prepares triton.language again in every call of a helper.

    The first call does so for all of its module, inside a launch that did the same.
    """
    prepared = set()
    prepare_and_call = InterpretedFunction.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__ in prepared:
            return self.rewrite()(*args, **kwargs)
        prepared.add(self.fn.__module__)
        return prepare_and_call(self, *args, **kwargs)

    InterpretedFunction.__call__ = call


def results(everything: bool) -> dict[str, list[str]]:
    """{case: differences}; an exception counts as one."""
    triton_kernels = kernels.TRITON.module
    assert triton_kernels is not None, kernels.TRITON.reason
    assert kernels.choose("kink", torch.zeros(1)) is triton_kernels.kink
    torch.set_num_threads(1)
    prepare_helpers_once()
    torch.use_deterministic_algorithms(True)  # torch.empty is then NaN
    np.seterr(all="ignore")  # overflow is part of the cases
    checks: dict[str, Callable[[], list[str]]] = {}
    for case in cases(everything):
        checks[str(case)] = partial(compare, case, ulps=ULPS)
        if case.op in MASKED and case.dtype == "float32":
            checks[f"out {case}"] = partial(compare_out, case, ulps=ULPS)
    for sizes in KINKS:
        for fresh in (False, True):
            checks[f"kink {sizes} {fresh}"] = partial(compare_kink, "cpu", fresh, sizes)
    found = {}
    for i, (name, check) in enumerate(checks.items()):
        # One item per program, or several with a rest.
        items = (10**9, 1) if i % 2 else (1, 2)
        triton_kernels.common.ELEMENTWISE = triton_kernels.common.REDUCING = items
        triton_kernels.common.PARTIALS = 100.0  # however large the sums are
        try:
            found[name] = check()
        except Exception:
            found[name] = [traceback.format_exc()]
    return found


if __name__ == "__main__":
    json.dump(results("all" in sys.argv), sys.stdout)

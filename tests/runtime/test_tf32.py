"""Precision settings: readable by the older interface inside, restored afterwards."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from fastbcd.runtime.tf32 import products, repeatable_convolutions

MATMUL, CUDNN = torch.backends.cuda.matmul, torch.backends.cudnn


def everything() -> dict[str, object]:
    """Every setting by the old and the new interface; "raises" where torch refuses to read it."""
    readers = {
        "allow matmul": lambda: MATMUL.allow_tf32,
        "allow cudnn": lambda: CUDNN.allow_tf32,
        "precision": torch.get_float32_matmul_precision,
        "matmul": lambda: MATMUL.fp32_precision,
        "conv": lambda: CUDNN.conv.fp32_precision,
        "rnn": lambda: CUDNN.rnn.fp32_precision,
        "cpu matmul": lambda: torch.backends.mkldnn.matmul.fp32_precision,
        "cpu conv": lambda: torch.backends.mkldnn.conv.fp32_precision,
        "deterministic": lambda: CUDNN.deterministic,
    }
    found: dict[str, object] = dict.fromkeys(readers, "raises")
    for name, read in readers.items():
        with suppress(RuntimeError):
            found[name] = read()
    return found


@pytest.mark.parametrize("tf32", [False, True])
def test_old_flags_are_readable_inside(tf32) -> None:
    before = everything()
    with products(tf32=tf32):
        inside = everything()
        with repeatable_convolutions(tf32=tf32):
            assert everything() == {**inside, "deterministic": True}
        assert inside["allow matmul"] is inside["allow cudnn"] is tf32
        assert inside["precision"] == ("high" if tf32 else "highest")
        for name in ("matmul", "conv", "rnn"):
            assert inside[name] == ("tf32" if tf32 else "ieee")
        assert inside["cpu matmul"] == inside["cpu conv"] == "ieee"
    assert everything() == before


@pytest.mark.parametrize("precision", ["medium", "high", "highest"])
def test_the_matmul_precision_is_restored(precision) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        own = everything()
        for tf32 in (False, True):
            with products(tf32=tf32), repeatable_convolutions():
                pass
            assert everything() == own
        assert own["precision"] == precision
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("precision", ["ieee", "tf32", "none"])
def test_settings_of_the_new_interface_are_restored(precision) -> None:
    """They make the old flags unreadable, before and after."""
    places = (MATMUL, CUDNN.conv)
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = precision
        own = everything()
        for tf32 in (False, True):
            with products(tf32=tf32):
                assert CUDNN.conv.fp32_precision == ("tf32" if tf32 else "ieee")
            assert everything() == own
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value

"""Training that repeats to the last bit: seeds, and deterministic algorithms."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fastbcd.runtime import ranks
from fastbcd.runtime.tf32 import fast_convolutions, repeatable_convolutions

_GENERATORS = threading.RLock()


@contextmanager
def repeatable(
    device: torch.device, seed: int, number: int, fast: bool = False
) -> Iterator[None]:
    """Seed torch by (seed, number, rank) and use deterministic algorithms; restored on exit.

    fast: the fastest convolutions instead.
    """
    seed = (seed * 1_000_003 + number) * 65_537 + ranks.rank()
    algorithms = deterministic(device)
    if fast:
        algorithms = fast_convolutions()
    with algorithms, seeded(device, seed):
        yield


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed torch's generators; on exit, restore their states. One thread at a time."""
    if not _GENERATORS.acquire(blocking=False):
        raise RuntimeError(
            "another thread of this process trains a net: torch's random numbers belong to the "
            "process, so neither training would repeat; start a process for each"
        )
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed & (2**63 - 1))
            yield
    finally:
        _GENERATORS.release()


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Deterministic convolutions; on a GPU all algorithms that torch has, with a warning else."""
    with repeatable_convolutions(tf32=True):
        if device.type == "cpu" or torch.are_deterministic_algorithms_enabled():
            yield
            return
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it
        memory: Any = torch.utils.deterministic
        fill = memory.fill_uninitialized_memory
        memory.fill_uninitialized_memory = False  # it costs time
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)
            memory.fill_uninitialized_memory = fill

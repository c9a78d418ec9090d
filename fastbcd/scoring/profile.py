"""Profile: what a device computes and moves per second, for the estimates of engines."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch

from fastbcd.runtime.tf32 import products

TABLE = json.loads(Path(__file__).with_name("devices.json").read_text())
SIDE = 4096  # of the matrices that are multiplied
BYTES = 2**28  # that are copied
LAUNCHES = 1000


class Profile(NamedTuple):
    """Rates of a device.

    >>> profile_of(torch.device("cpu")).seconds("float32", 5e10)
    1.0
    """

    name: str
    float32: float  # multiply-adds per second
    tf32: float
    bf16: float
    bandwidth: float  # bytes per second
    launch: float  # seconds of the host

    def seconds(
        self,
        precision: str,
        multiply_adds: float,
        moved: float = 0,
        launches: float = 0,
    ) -> float:
        """Of what takes longest; the three overlap. moved: bytes."""
        computing = multiply_adds / getattr(self, precision)
        return max(computing, moved / self.bandwidth, launches * self.launch)


@cache
def profile_of(device: torch.device) -> Profile:
    """From the table, or measured, which takes about a second."""
    name = "cpu"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    for part, rates in TABLE.items():
        if part and part in name:
            return Profile(name, **rates)
    return measured(device, name)


def measured(device: torch.device, name: str) -> Profile:
    """The profile of a device that is not in the table."""
    matrix = torch.zeros(SIDE, SIDE, device=device)
    factors = {"float32": matrix, "tf32": matrix, "bf16": matrix.bfloat16()}
    rates = {}
    for precision, factor in factors.items():
        with products(tf32=precision == "tf32"):
            seconds = _seconds(device, partial(torch.mm, factor, factor))
        rates[precision] = SIDE**3 / seconds
    values = torch.zeros(BYTES, dtype=torch.uint8, device=device)
    small = values[:1]
    begin = time.perf_counter()
    for _ in range(LAUNCHES):
        small.zero_()
    launch = (time.perf_counter() - begin) / LAUNCHES
    bandwidth = 2 * BYTES / _seconds(device, values.clone)
    return Profile(name, **rates, bandwidth=bandwidth, launch=launch)


def _seconds(device: torch.device, run: Callable[[], object]) -> float:
    """The least of a few runs, after one that prepares."""
    times = []
    for _ in range(4):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times[1:])


CPU = profile_of(torch.device("cpu"))

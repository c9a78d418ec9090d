"""Versions and backends of this machine: `python -m fastbcd.info` or `fastbcd info`.

With --check every kernel is compared with the reference on every device, in seconds: the first
thing to run on a new machine.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
import time
from contextlib import suppress
from itertools import groupby

import torch

import fastbcd
from fastbcd import kernels
from fastbcd.ops.selfcheck import comparisons, first_use

PACKAGES = ("torch", "triton", "numpy", "safetensors", "torchvision", "matplotlib")


def versions() -> dict[str, str]:
    """Installed versions by package, or "not installed"."""
    found = {"fastbcd": fastbcd.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        found[package] = "not installed"
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def devices() -> list[str]:
    """cpu and every CUDA device."""
    return ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]


def compare(device: str) -> int:
    """Compare every kernel with the reference on a device; returns the number of failures."""
    module = kernels.module_for(torch.empty(0, device=device))
    described = "the reference itself"
    if module is not None:
        described = module.describe()
    print(f"{device}: {described}")
    failures = 0
    for kernel, pairs in groupby(comparisons(device), lambda pair: pair[0].kernel):
        start = time.perf_counter()
        cases = list(pairs)
        seconds = time.perf_counter() - start
        failed = [
            f"FAILED {device} {case}: {'; '.join(bad)}" for case, bad in cases if bad
        ]
        result = "agrees"
        if failed:
            result = f"{len(failed)} of {len(cases)} cases differ"
        print(f"  {kernel:<24} {result} ({len(cases)} cases, {seconds:.1f} s)")
        for line in failed:
            print(f"    {line}")
        failures += len(failed)
    return failures


def info(check: bool = False) -> int:
    """Print versions and backends of this machine.

    Args:
        check: compare every kernel with the reference; the exit status is 1 if one differs
    """
    for name, version in versions().items():
        print(f"{name:<12} {version}")
    for device in devices()[1:]:
        p = torch.cuda.get_device_properties(device)
        print(
            f"{device:<12} {p.name}, sm_{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB"
        )
    print("", *fastbcd.backends(), "", sep="\n")
    if not check:
        return 0
    failures = sum(map(compare, devices()))
    count = first_use((torch.float32, torch.bfloat16))
    print(
        f"on a GPU a first scoring and training step compiles {count} kernels to compare them"
    )
    if failures:
        print(f"{failures} cases failed. Please report all of this output.")
        return 1
    print("all kernels agree with the reference")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    sys.exit(info(**vars(parser.parse_args())))

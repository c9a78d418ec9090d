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
from fastbcd.ops.selfcheck import comparisons

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


def check() -> int:
    """Compare every kernel with the reference on every device; return the number of failures."""
    failures = 0
    for device in devices():
        module = kernels.module_for(torch.empty(0, device=device))
        print(f"{device}: {module.describe() if module else 'the reference itself'}")
        for kernel, found in groupby(comparisons(device), lambda pair: pair[0].kernel):
            start, cases = time.perf_counter(), list(found)
            failed = [f"FAILED {device} {case}: {'; '.join(bad)}" for case, bad in cases if bad]
            result = f"{len(failed)} of {len(cases)} cases differ" if failed else "agrees"
            seconds = time.perf_counter() - start
            print(
                f"  {kernel:<24} {result} ({len(cases)} cases, {seconds:.1f} s)",
                *failed,
                sep="\n    ",
            )
            failures += len(failed)
    if failures:
        print(f"{failures} cases failed. Please report all of this output.")
    else:
        print("all kernels agree with the reference")
    return failures


def main(arguments: list[str] | None = None) -> int:
    """Print versions and backends; with --check, compare kernels with the reference."""
    parser = argparse.ArgumentParser(prog="fastbcd info", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare every kernel here")
    options = parser.parse_args(arguments)
    for name, version in versions().items():
        print(f"{name:<12} {version}")
    for device in devices()[1:]:
        p = torch.cuda.get_device_properties(device)
        print(f"{device:<12} {p.name}, sm_{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB")
    print("", *fastbcd.backends(), "", sep="\n")
    return 1 if options.check and check() else 0


if __name__ == "__main__":
    sys.exit(main())

"""Check, test and measure the kernels of a GPU, and write one page to send us: `make gpu`.

    python benchmarks/gpu.py                    writes benchmarks/RESULTS-<gpu>.md
    python benchmarks/gpu.py --device cuda:1    another GPU

The page has the output of `fastbcd info --check` and of the GPU tests, where the time of a short
`linearize` goes, the bandwidth of every kernel, and the benchmarks of `make bench` that run on a
GPU: ours, the authors' loop as published and torch.compile of it take turns in one run, with
torch's defaults (TF32 in convolutions) for the peers. The bytes of a call are those of its
arguments and results, each counted once; the bandwidth of the card is the one it was built for.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import profile, supported_activities

import fastbcd
from fastbcd import kernels
from fastbcd.ops.calls import KERNELS, KernelCall, by_kernel
from fastbcd.ops.selfcheck import BITS, VARIANTS, B, Check, arguments, checks
from table import machine

HERE = Path(__file__).parent
SITE, BATCH = (64, 32, 32), 500  # 131 MB of float32, more than a cache holds
KINKS = (4096, 16, 512)


class Row(NamedTuple):
    """One kernel on one kind of arguments."""

    name: str
    seconds: float
    bytes: int

    def line(self, card: float | None, copy: float) -> str:
        """A row of the table; card, copy: bytes per second."""
        rate = self.bytes / self.seconds
        share = f"{rate / card:.0%}" if card else "unknown"
        return (
            f"| {self.name} | {1e3 * self.seconds:.3f} | {rate / 1e9:.0f} | {share} | "
            f"{rate / copy:.0%} |"
        )


def median_time(call: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Seconds, after a few calls that are not counted."""
    times = []
    for number in range(rounds + 3):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize(device)
            seconds = begin.elapsed_time(end) / 1e3
        else:
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
        times += [seconds] if number >= 3 else []
    return sorted(times)[len(times) // 2]


def large_call(
    check: Check, device: torch.device, site: tuple[int, ...], batch: int
) -> KernelCall:
    """The call of a check, with many copies of its batch."""
    if check.kernel == "kink":
        n, trials, items = KINKS if site == SITE else (8, 3, 32)
        c, a = (
            torch.randn(n, trials, items, device=device),
            torch.randn(n, items, device=device),
        )
        bits = torch.ones(n, trials, dtype=torch.uint8, device=device)
        return KERNELS["kink"].lay_out(c, a, bits, check.optional == "full")
    given = arguments(check, device, site)
    copies = batch // B
    return KERNELS[check.kernel].lay_out(*(
        torch.cat([t] * copies) if isinstance(t, Tensor) and t.shape == (B, *site) else t
        for t in given
    ))  # fmt: skip


def bandwidths(
    device: torch.device,
    site: tuple[int, ...] = SITE,
    batch: int = BATCH,
    rounds: int = 20,
) -> Iterator[Row]:
    """The kernels of the device: every variant in float32, the plain ones in every dtype."""
    module = kernels.module_for(torch.empty(0, device=device))
    for kernel, dtype in product(KERNELS, module.DTYPES):
        function = getattr(module, kernel, None)
        variants = VARIANTS.get(kernel, ("",))
        if function is None:
            continue
        if dtype != torch.float32:
            variants = tuple(v for v in variants if v in ("", *BITS))
        for check in checks(kernel, dtype, variants):
            if check.trials == "none":
                yield from measured(check, function, device, site, batch, rounds)


def measured(
    check: Check,
    function: Callable[..., None],
    device: torch.device,
    site: tuple[int, ...],
    batch: int,
    rounds: int,
) -> Iterator[Row]:
    """The row of one check, if the kernel takes its call."""
    call = large_call(check, device, site, batch)
    if not call.fits:
        return
    seconds = median_time(lambda: by_kernel(function, call), device, rounds)
    tensors = [t for t in (*call.outputs, *call.inputs) if isinstance(t, Tensor)]
    size = sum(t.nbytes for t in tensors)
    yield Row(str(check).removesuffix("-none"), seconds, size)


def card_bandwidth(device: torch.device) -> float | None:
    """Bytes per second: two transfers per clock and line of the memory bus."""
    if device.type != "cuda":
        return None
    p = torch.cuda.get_device_properties(device)
    clock, lines = getattr(p, "memory_clock_rate", 0), getattr(p, "memory_bus_width", 0)
    return 2 * clock * 1e3 * lines / 8 or None


def copy_bandwidth(
    device: torch.device, elements: int = 2**27, rounds: int = 20
) -> float:
    """Bytes per second, read and written, of torch's own copy."""
    x = torch.zeros(elements, device=device)
    y = torch.empty_like(x)
    return (
        2
        * x.numel()
        * x.element_size()
        / median_time(lambda: y.copy_(x), device, rounds)
    )


def table(rows: list[Row], card: float | None, copy: float) -> str:
    """The bandwidths as Markdown."""
    known = (
        f"{card / 1e9:.0f} GB/s by its specification"
        if card
        else "of unknown bandwidth"
    )
    head = "| kernel | ms | GB/s | of the card | of a copy |\n|---|---|---|---|---|"
    lines = "\n".join(row.line(card, copy) for row in rows)
    return (
        f"The card: {known}; a copy reaches {copy / 1e9:.0f} GB/s.\n\n{head}\n{lines}"
    )


def short_run(device: torch.device, images: int = 5000, epochs: float = 6) -> None:
    """`linearize` of a ResNet-20 on random images."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (images, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.arange(images) % 10
    data = fastbcd.ImageData.from_arrays(x, labels).to(device)
    net = fastbcd.models.resnet20(num_classes=10, image_size=32).to(device)
    fastbcd.linearize(net, data, budget=50_000, epochs=epochs)


def shares(seconds: float, events: Iterable[tuple[str, float]]) -> str:
    """Where the time of a run went; events: the name and seconds of each on the device."""
    busy = {"kernels": 0.0, "copies": 0.0}
    for name, duration in events:
        copied = name.startswith(("Memcpy", "Memset"))
        busy["copies" if copied else "kernels"] += duration
    idle = max(0.0, seconds - sum(busy.values()))
    numbers = " | ".join(f"{t / seconds:.0%}" for t in (*busy.values(), idle))
    return (
        "| seconds | kernels | copies | the device waits for the host |\n"
        f"|---|---|---|---|\n| {seconds:.1f} | {numbers} |"
    )


def profiled(call: Callable[[], object], device: torch.device) -> str:
    """`shares` of a call, by torch's profiler; the first call is not counted."""
    call()
    with profile(activities=supported_activities()) as watched:
        start = time.perf_counter()
        call()
        torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
    on_device = [e for e in watched.events() if e.device_type == DeviceType.CUDA]
    return shares(
        seconds, ((e.name, 1e-6 * e.self_device_time_total) for e in on_device)
    )


def output_of(*command: str) -> tuple[bool, str]:
    """Whether a command of this Python succeeds, and what it prints."""
    print("running", *command, file=sys.stderr)
    done = subprocess.run(
        [sys.executable, *command], cwd=HERE.parent, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return done.returncode == 0, done.stdout.strip()


def page(gpu: str, sections: dict[str, str]) -> str:
    """The whole page; texts of commands are shown as they are."""
    parts = [f"# fastbcd on {gpu}", machine()]
    parts += [f"## {title}\n\n{text}" for title, text in sections.items()]
    return "\n\n".join(parts) + "\n"


def main(given: list[str] | None = None) -> int:
    """Write the page; 1 if the check or a test failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda:0", type=torch.device)
    device = parser.parse_args(given).device
    if device.type != "cuda" or not torch.cuda.is_available():
        print(
            f"{device}: no CUDA device here; see `python -m fastbcd.info`",
            file=sys.stderr,
        )
        return 1
    torch.cuda.set_device(device)
    gpu = torch.cuda.get_device_name(device)
    checked, check = output_of("-m", "fastbcd.info", "--check")
    tested, tests = output_of("-m", "pytest", "tests/kernels/test_gpu.py", "tests/ops")
    sections = {
        "fastbcd info --check": f"```\n{check}\n```",
        "GPU tests": f"```\n{tests}\n```",
    }
    print("running linearize", file=sys.stderr)
    sections["A short linearize, ResNet-20"] = profiled(
        lambda: short_run(device), device
    )
    print("measuring bandwidths", file=sys.stderr)
    rows = list(bandwidths(device))
    sections["Bandwidth"] = table(rows, card_bandwidth(device), copy_bandwidth(device))
    _, benchmarks = output_of(str(HERE / "table.py"), "-k", "cuda")
    sections["make bench"] = f"```\n{benchmarks}\n```"
    path = HERE / f"RESULTS-{re.sub(r'[^A-Za-z0-9]+', '-', gpu).strip('-')}.md"
    path.write_text(page(gpu, sections))
    print(f"{path}: please send us this page")
    return 0 if checked and tested else 1


if __name__ == "__main__":
    sys.exit(main())

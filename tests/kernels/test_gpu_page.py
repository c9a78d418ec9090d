"""The page of `make gpu`, written from measurements on the CPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import gpu
from fastbcd import kernels
from fastbcd.ops.calls import KERNELS

pytestmark = pytest.mark.skipif(kernels.INTERPRETED, reason="the C++ kernels are not in use")
CPU = torch.device("cpu")
SITE = (8, 2, 2)


def test_every_kernel_is_measured() -> None:
    rows = list(gpu.bandwidths(CPU, SITE, 10, rounds=1))
    for kernel in KERNELS:
        assert any(row.name.startswith(kernel) for row in rows), kernel
    assert len({row.name for row in rows}) == len(rows)
    assert all(row.seconds > 0 for row in rows)


def test_bytes_are_those_of_arguments_and_results() -> None:
    found = {row.name: row.bytes for row in gpu.bandwidths(CPU, SITE, 10, rounds=1)}
    items, units, channels = 10 * 32, 32, 8
    full = "masked_forward-identity-float32-contiguous-full"
    assert found[full] == 3 * 4 * items + units + 2 * 4 * channels
    assert found["masked_forward-identity-float16-channels_last-bare"] == 2 * 2 * items + units
    soft = "masked_backward-soft_identity_signed-float32-contiguous-bare"
    assert found[soft] == 3 * 4 * items + 2 * 4 * units


def test_the_page_has_the_share_of_the_card(monkeypatch) -> None:
    rows = [gpu.Row("masked_forward-identity-float32-contiguous-bare", 1e-3, 2 * 10**9)]
    text = gpu.page("A GPU", {"Bandwidth": gpu.table(rows, 4e12, 2.5e12)})
    assert text.startswith("# fastbcd on A GPU\n")
    assert "| masked_forward-identity-float32-contiguous-bare | 1.000 | 2000 | 50% | 80% |" in text
    assert "4000 GB/s by its specification; a copy reaches 2500 GB/s" in text
    assert "unknown" in gpu.table(rows, None, 2.5e12)
    assert gpu.copy_bandwidth(CPU, elements=1000, rounds=1) > 0
    assert gpu.card_bandwidth(CPU) is None


def test_the_time_of_a_run_is_shared_out() -> None:
    events = [
        ("masked_forward_kernel", 0.5),
        ("Memcpy HtoD (Pinned -> Device)", 0.2),
        ("conv", 0.3),
    ]
    text = gpu.shares(2.0, events)
    assert text.endswith("| 2.0 | 40% | 10% | 50% |")
    assert "| 0% | 0% | 100% |" in gpu.shares(1.0, [])


@pytest.mark.long
def test_the_whole_page_on_the_simulated_device(request, monkeypatch, tmp_path, capsys) -> None:
    """Except what runs in other processes, which do not have the device."""
    request.getfixturevalue("gpu")
    commands = []

    def output_of(*command: str) -> tuple[bool, str]:
        commands.append(command)
        return True, f"printed by {command[-1]}"

    for name, value in {"HERE": tmp_path, "output_of": output_of}.items():
        monkeypatch.setattr(gpu, name, value)
    sizes = {"site": SITE, "batch": 10, "rounds": 1}
    monkeypatch.setattr(gpu, "bandwidths", partial(gpu.bandwidths, **sizes))
    monkeypatch.setattr(gpu, "copy_bandwidth", partial(gpu.copy_bandwidth, elements=8, rounds=1))
    monkeypatch.setattr(gpu, "short_run", partial(gpu.short_run, images=20, epochs=1))
    monkeypatch.setattr(gpu, "median_time", lambda call, *_: (call(), 1e-3)[1])
    assert gpu.main([]) == 0
    page = (tmp_path / "RESULTS-Fake-A100.md").read_text()
    titles = [line for line in page.splitlines() if line.startswith("#")]
    assert titles == [
        "# fastbcd on Fake A100", "## fastbcd info --check", "## GPU tests",
        "## A short linearize, ResNet-20", "## Bandwidth", "## make bench",
    ]  # fmt: skip
    assert "| masked_backward-line-float32-channels_last-full | 1.000 |" in page
    assert "please send us this page" in capsys.readouterr().out
    assert len(commands) == 3


def test_the_bandwidth_of_a_card(monkeypatch) -> None:
    class H100:
        memory_clock_rate, memory_bus_width = 2_619_000, 5120  # kHz, bits

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H100)
    assert gpu.card_bandwidth(torch.device("cuda:0")) == pytest.approx(3.35e12, rel=0.01)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(capsys) -> None:
    assert gpu.main([]) == 1
    assert "cuda:0: no CUDA device here" in capsys.readouterr().err

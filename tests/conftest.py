"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

from helpers import fake_cuda  # before torch

# isort: split
import torch

from helpers.saved_runs import cut_short, finished, stages  # noqa: F401  # fixtures

# Processes that tests start find `helpers`, too.
HERE = Path(__file__).parent
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))

# Workers of pytest-xdist (`make test`) and the processes they start share the cores.
if "PYTEST_XDIST_WORKER" in os.environ:
    THREADS = max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
    torch.set_num_threads(THREADS)

# The longest files, which start first, so that no worker waits long for the last one.
LONGEST = (
    "runtime/test_ranks.py",
    "cli/test_commands.py",
    "kernels/test_interpreter.py",
    "kernels/test_compiled.py",
    "training/test_processes.py",
    "starts/test_snl.py",
    "scoring/test_choose.py",
    "scoring/test_surroundings.py",
    "descent/test_bcd.py",
    "test_quality.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; the others stay in their order."""
    order = {str(HERE / name): place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(str(item.path), len(order)))


# A loaded machine breaks nothing; `make test` draws the same examples every time.
hypothesis.settings.register_profile(
    "fastbcd",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize="FASTBCD_HOSTILE_SECONDS" not in os.environ,
)
hypothesis.settings.load_profile("fastbcd")

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def gpu():
    """Two CUDA devices that are simulated, see helpers/fake_cuda.py."""
    with fake_cuda.device() as simulated:
        yield simulated


@pytest.fixture
def nan_empty():
    """torch.empty returns NaN, so that an unwritten output is noticed."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def import_torchvision():
    """Import torchvision; beside a CPU build of torch it needs two operator schemas first."""
    try:
        import torchvision
    except ImportError:
        return pytest.importorskip("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define(
            "qnms(Tensor dets, Tensor scores, float iou_threshold, float dets_scale, "
            "int dets_zero_point) -> Tensor"
        )
        _keep.append(library)
        import torchvision
    return torchvision


_keep: list[torch.library.Library] = []


@pytest.fixture(scope="session")
def torchvision():
    return import_torchvision()

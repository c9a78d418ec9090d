"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

# Processes that tests start find `helpers` too.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
)

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def nan_empty():
    """torch.empty returns NaN, so that an output left unwritten shows."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def import_torchvision():
    """torchvision beside a CPU build of torch needs two operator schemas before it imports."""
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

"""docs/networks.py, which makes the table of docs/networks.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import networks

PAGE = Path(__file__).parent.parent.parent / "docs/networks.md"


@pytest.mark.filterwarnings("ignore:nonlinear operations stay")
def test_a_row_says_what_was_exchanged_and_what_was_left() -> None:
    image = torch.randn(1, 3, 6, 6)
    exact = nn.Sequential(nn.ReLU(), nn.MaxPool2d(3), nn.Sigmoid()).eval()
    assert networks.row("exact", exact, image) == "| exact | 108 | 1 | – | 96 | 1 sigmoid |"
    other = nn.Sequential(nn.ReLU6(), nn.SiLU(), nn.ReLU6()).eval()
    assert networks.row("other", other, image) == "| other | 324 | 3 | 2 ReLU6, 1 SiLU | 0 | – |"


def test_the_logits_are_compared(monkeypatch) -> None:
    model, image = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.randn(2, 3)
    other = networks.fastbcd.convert(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), image)
    monkeypatch.setattr(networks.fastbcd, "convert", lambda model, image: other)
    with pytest.raises(AssertionError):
        networks.row("wrong", model, image)


def test_the_page_has_every_network() -> None:
    names = [f"torchvision {name}" for name in networks.TORCHVISION.split()]
    names += [f"timm {name}" for name in networks.TIMM.split()]
    assert len(names) >= 25
    assert re.findall(r"^\| ((?:torchvision|timm) \w+) \|", PAGE.read_text(), re.M) == names

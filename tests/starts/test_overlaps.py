"""Overlaps: stored masks are evenly spread over the epochs, also after resuming."""

from __future__ import annotations

import pytest
import torch

from fastbcd.starts.overlaps import MOST, Overlaps


def test_overlaps_keep_evenly_spread_masks_and_resume() -> None:
    straight, first = Overlaps(8), Overlaps(8)
    g = torch.Generator().manual_seed(0)
    masks = torch.rand(300, 8, generator=g) > 0.3
    for epoch in range(300):
        straight.add(epoch, masks[epoch])
        if epoch < 150:
            first.add(epoch, masks[epoch])
    assert len(straight.packed) <= MOST
    assert sorted(straight.packed)[:3] == [0, 8, 16]
    resumed = Overlaps(8)
    resumed.load(first.state(), 150)
    found = [resumed.add(epoch, masks[epoch]) for epoch in range(150, 300)]
    assert resumed.pairs(0) == straight.pairs(0)
    both = (masks[149] & masks[150]).sum() / min(masks[149].sum(), masks[150].sum())
    assert found[0] == pytest.approx(float(both))

"""The published curves: one value per number of ReLUs, from a figure or a table."""

from __future__ import annotations

from fastbcd.report import published


def test_published_curves() -> None:
    methods = {curve.method for curve in published.every_curve()}
    assert methods >= {"SNL", "DeepReDuce", "CryptoNAS", "Sphynx", "SENet", "AutoReP", "BCD"}
    for curve in published.every_curve():
        counts = [relus for relus, _ in curve.points]
        assert counts == sorted(set(counts)), curve
        assert all(45 < accuracy < 100 for _, accuracy in curve.points), curve
        assert curve.source.startswith(("Figure", "Table"))
        assert ("ReLUPruner" in curve.source) == (curve.method == "ReLUPruner")


def test_of_two_sources_the_one_with_more_points_is_taken() -> None:
    snl = next(c for c in published.curves("resnet18", "cifar10") if c.method == "SNL")
    assert len(snl.points) == 17
    assert dict(snl.points)[180_000] == 94.78
    assert [c.method for c in published.curves("wide_resnet22_8", "cifar100")] == [
        "SENet", "SNL", "BCD", "AutoReP", "BCD on AutoReP", "ReLUPruner",
    ]  # fmt: skip
    assert published.curves("resnet20", "cifar10") == []

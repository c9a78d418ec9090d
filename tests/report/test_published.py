"""The published curves: one value per number of ReLUs, and figures that agree with each other."""

from __future__ import annotations

import pytest

from fastbcd.report import published


def test_published_curves() -> None:
    methods = {c.method for c in published.every_curve()}
    assert methods >= {"SNL", "DeepReDuce", "CryptoNAS", "Sphynx", "SENet", "AutoReP", "BCD"}
    assert {c.method for c in published.every_curve() if "ReLUPruner" in c.source} == {"ReLUPruner"}
    assert sum("SENet++" in m for m in methods) == 2
    for curve in published.every_curve():
        counts = [n for n, _ in curve.points]
        assert counts == sorted(set(counts)), curve
        assert all(45 < y < 102 for _, y in curve.points), curve
        assert curve.source.startswith(("Figure", "Table"))
    snl = next(c for c in published.curves("resnet18", "cifar10") if c.method == "SNL")
    assert len(snl.points) == 17
    assert dict(snl.points)[180_000] == 94.78
    assert [c.method for c in published.curves("wide_resnet22_8", "cifar100")] == [
        "SENet", "SNL", "BCD", "AutoReP", "BCD on AutoReP", "ReLUPruner",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="metric='loss'"):
        published.curves("resnet18", "cifar10", "loss")


@pytest.mark.parametrize("data", ["cifar10", "cifar100", "tiny-imagenet"])
def test_relative_curves_are_accuracies_over_the_baseline(data) -> None:
    def bcd(metric):
        curves = published.every_curve()
        wanted = ("resnet18", data, "BCD", metric)
        found = [c for c in curves if (c.arch, c.data, c.method, c.metric) == wanted]
        return dict(found[0].points)

    accuracy, relative = bcd("accuracy"), bcd("relative to baseline")
    dense = published.baseline("resnet18", data)
    assert accuracy.keys() == relative.keys()
    for n in accuracy:
        assert relative[n] == pytest.approx(100 * accuracy[n] / dense, abs=0.06)


def test_accuracies_of_senet_are_shares_of_its_own_dense_net() -> None:
    """The paper states 80.82 % for it on CIFAR-100 with Wide-ResNet-22-8, and no other."""
    found = [c for c in published.every_curve() if c.method == "SENet" and c.data == "cifar100"]
    shares, accuracies = (
        dict(c.points) for c in sorted(found, key=lambda c: c.metric, reverse=True)
        if c.arch == "wide_resnet22_8"
    )  # fmt: skip
    assert shares.keys() == accuracies.keys()
    for n, share in shares.items():
        assert accuracies[n] == pytest.approx(0.8082 * share, abs=0.006)


def test_distribution() -> None:
    d = published.distribution()
    assert sum(d["full"]) == 491_520
    assert {name: sum(kept) for name, kept in d["kept"].items()} == {
        "SNL at 30K": 29_896, "SNL at 15K": 14_621, "BCD at 15K": 14_996,
    }  # fmt: skip
    assert published.baseline("resnet20", "cifar10") is None

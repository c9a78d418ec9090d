"""Recipes: the paper's rows and settings, plans, the listing, the published curves."""

from __future__ import annotations

import dataclasses
import json

import pytest

from fastbcd import models, recipes
from fastbcd.cli.main import main
from fastbcd.data.sources import KNOWN
from fastbcd.report import published

# name: B_ref, budget, DRC, ADT, RT, epochs, optimizer, lr, start's accuracy, BCD's
ROWS = {
    "resnet18-cifar10-20k": (30_000, 20_000, 100, 0.3, 50, 20, "sgd", 1e-3, 90.76, 90.78),
    "resnet18-cifar100-15k": (30_000, 15_000, 100, 0.3, 50, 20, "sgd", 1e-3, 67.17, 68.85),
    "resnet18-cifar100-150k": (200_000, 150_000, 100, 0.3, 50, 20, "sgd", 1e-3, 76.13, 77.27),
    "resnet18-tiny-59.1k": (80_000, 59_100, 100, 0.3, 50, 5, "sgd", 1e-3, 54.24, 56.6),
    "wrn22-8-cifar10-240k": (400_000, 240_000, 100, 0.1, 50, 20, "adam", 3.5e-5, 94.24, 95.29),
    "wrn22-8-tiny-200k": (300_000, 200_000, 300, 0.1, 50, 5, "adam", 3.5e-5, 58.4, 60.5),
    "wrn22-8-tiny-488.8k": (570_000, 488_800, 300, 0.1, 50, 5, "adam", 3.5e-5, 64.42, 65.04),
    "resnet18-cifar100-autorep-6k": (30_000, 6_000, 100, 0.1, 50, 20, "adam", 3.5e-5, 71.63, 72.94),
    "ablation-drc-500": (30_000, 15_000, 500, 0.3, 50, 20, "sgd", 1e-3, 67.17, 62.68),
    "ablation-adt-0.5": (30_000, 15_000, 100, 0.5, 50, 20, "sgd", 1e-3, 67.17, 68.66),
    "ablation-epochs-5": (30_000, 15_000, 100, 0.3, 50, 5, "sgd", 1e-3, 67.17, 63.63),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows(name) -> None:
    r = recipes.get(name)
    found = (r.b_ref, r.budget, r.drc, r.adt, r.rt, r.epochs, r.optimizer, r.lr)
    assert (*found, r.published_start, r.published) == ROWS[name]
    assert r.start == ("autorep" if "autorep" in name else "snl")


def test_every_table_row_is_there() -> None:
    by_source: dict[str, int] = {}
    for recipe in recipes.RECIPES.values():
        by_source[recipe.source] = by_source.get(recipe.source, 0) + 1
    assert by_source == {"Table 2": 16, "Table 3": 10, "Figure 4": 7, "Figure 5": 10}


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_recipes_can_be_run(name) -> None:
    """Their nets and data exist, and the net has more ReLUs than B_ref."""
    r = recipes.get(name)
    assert r.arch in models.NAMES
    assert KNOWN[r.data][2] == r.shape.classes
    full = {("resnet18", 32): 491_520, ("resnet18", 64): 1_966_080,
            ("wide_resnet22_8", 32): 1_359_872, ("wide_resnet22_8", 64): 5_439_488}  # fmt: skip
    assert r.budget < r.b_ref < full[r.arch, r.shape.image_size]
    assert r.published > r.published_start or name.startswith("ablation")
    json.dumps(dataclasses.asdict(r))


def test_recipes_agree_with_the_published_curves() -> None:
    """The numbers were entered twice: from the tables and from the figures."""
    methods = {"snl": ("SNL", "BCD"), "autorep": ("AutoReP", "BCD on AutoReP")}
    compared = 0
    for r in recipes.RECIPES.values():
        for method, value in zip(methods[r.start], (r.published_start, r.published), strict=True):
            for curve in published.every_curve():
                same = (curve.arch, curve.data, curve.method) == (r.arch, r.data, method)
                if same and curve.metric == "accuracy" and "ablation" not in r.name:
                    at = dict(curve.points).get(r.budget)
                    assert at in (None, value), (r.name, curve.source)
                    compared += at is not None
    assert compared >= 90


@pytest.mark.parametrize(
    ("arch", "size", "giga"),
    [("resnet18", 32, 0.555), ("resnet18", 64, 2.22), ("wide_resnet22_8", 32, 2.454)],
)
def test_multiply_adds(arch, size, giga) -> None:
    assert recipes.multiply_adds(arch, 100, size) / 1e9 == pytest.approx(giga, rel=2e-3)


def test_plan() -> None:
    """2.78 PFLOP of scoring and 4.44 of fine-tuning per step on ResNet18 and CIFAR."""
    p = recipes.plan(recipes.get("resnet18-cifar100-15k"))
    assert (p.steps, p.epochs, p.passes) == (150, 3_000, 7_500)
    assert p.scoring / p.steps == pytest.approx(2.78, abs=0.005)
    assert p.finetuning / p.steps == pytest.approx(4.44, abs=0.005)
    assert p.dense == pytest.approx(160 * 3 * 2 * 555_468_800 * 50_000 / 1e15)
    text = str(p)
    for words in (
        "150 steps of 100",
        "7,500 passes",
        "3,000 epochs",
        "BCD 68.85 %",
        "2.78 per step",
    ):
        assert words in text
    # the last step is a short one
    assert recipes.plan(recipes.get("wrn22-8-tiny-200k")).steps == 334


def test_listing(capsys) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(recipes.RECIPES)
    assert max(map(len, lines)) < 140
    assert main(["recipes", "wrn22-8-tiny-*", "ablation-base"]) == 0
    out = capsys.readouterr().out
    assert out.count("wrn22-8-tiny") == 3
    assert "published       SNL 67.17 %, BCD 68.89 %" in out


def test_bad_names(capsys) -> None:
    with pytest.raises(ValueError, match="did you mean resnet18-cifar100-15k"):
        recipes.get("resnet18-cifar100-15K")
    assert main(["recipes", "resnet18-cifar100-15"]) == 2
    assert "did you mean resnet18-cifar100-15" in capsys.readouterr().err
    base = recipes.get("ablation-base")
    for changes, words in (
        ({"start": "none"}, "start='none'"),
        ({"data": "mnist"}, "data='mnist'"),
        ({"budget": 31_000}, "budget=31,000"),
    ):
        with pytest.raises(ValueError, match=words):
            dataclasses.replace(base, **changes)


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

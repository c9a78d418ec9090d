"""deepreduce: stages, criticality, culling, thinning, reshaping, the trainings."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F

import fastbcd
from fastbcd import MaskSet
from fastbcd.report import published
from fastbcd.starts.deepreduce import candidates, criticality, deepreduce, only, reshaped, stages
from helpers.nets import make
from helpers.start_cases import NONE, data

QUICK = {"epochs": 9, "trial_epochs": 1, "lr": 0.02, "batch_size": 32, "finetune": NONE}

# ------------------------------------------------------------------------- sets of ReLUs


def full(**shapes: tuple[int, ...]) -> MaskSet:
    return MaskSet.full(shapes)


def names(found: list) -> list[list[str]]:
    return [[site.name for site in stage] for stage in found]


def test_a_stage_ends_where_the_resolution_changes() -> None:
    m = full(stem=(4, 8, 8), a=(16, 8, 8), b=(16, 4, 4), c=(4, 8, 8), d=(5,), e=(5,), f=(7,))
    assert names(stages(m)) == [["stem", "a"], ["b"], ["c"], ["d", "e"], ["f"]]
    empty = m.without(torch.arange(m.sites[2].start, m.sites[3].start))
    assert names(stages(empty)) == [["stem", "a", "c"], ["d", "e"], ["f"]], "b keeps no ReLU"


def test_the_stages_of_the_papers_networks() -> None:
    nets = fastbcd.models.resnet18(10, 32), fastbcd.models.resnet20(10, 32)
    sizes = [[sum(s.numel for s in stage) for stage in stages(fastbcd.masks(n))] for n in nets]
    assert sizes == [[262_144, 131_072, 65_536, 32_768], [114_688, 49_152, 24_576]]


def test_culling_and_thinning_give_the_published_numbers_of_relus() -> None:
    """Those of ResNet18 on CIFAR-100; reshaping halves the channels once or more."""
    m = fastbcd.masks(fastbcd.models.resnet18(100, 32))
    later, counts = stages(m)[1:], set()
    for kept in (later, later[:2]):
        whole, thin = (
            only(m, [site for stage in kept for site in stage[::step]]).count() for step in (1, 2)
        )
        counts |= {whole, thin, thin // 2, thin // 4, thin // 8}
    points = [
        n
        for curve in published.curves("resnet18", "cifar100")
        if curve.method == "DeepReDuce"
        for n, _ in curve.points
    ]
    assert len(points) == 7
    assert all(any(abs(n - count) < 0.007 * count for count in counts) for n in points)


def shares(sizes: list[int], budget: int) -> list[int]:
    """The plain rule: round down, then one more for the largest remainders, in order."""
    exact = [n * budget / sum(sizes) for n in sizes]
    found = [math.floor(x + 1e-9) for x in exact]
    order = sorted(range(len(sizes)), key=lambda i: -(round(exact[i] - found[i], 9)))
    for i in order[: budget - sum(found)]:
        found[i] += 1
    return found


def plain_reshaped(m: MaskSet, scores: torch.Tensor, budget: int) -> set[int]:
    """Ids of the ReLUs that stay, unit by unit."""
    stay: set[int] = set()
    for site, kept, quota in zip(
        m.sites, m.split(), shares(list(m.counts().values()), budget), strict=True
    ):
        width = site.numel // site.shape[0]
        units = [(int(i), float(scores[site.start + i])) for i in kept.flatten().nonzero()]

        def mean_of(channel: int, units: list = units, width: int = width) -> float:
            own = [score for i, score in units if i // width == channel]
            return sum(own) / len(own)

        order = sorted(units, key=lambda u: (-mean_of(u[0] // width), -u[1]))
        stay |= {site.start + i for i, _ in order[:quota]}
    return stay


@pytest.mark.parametrize("seed", range(3))
def test_every_budget_is_met_by_the_same_share_of_each_site_and_whole_channels(seed) -> None:
    g = torch.Generator().manual_seed(seed)
    m = full(a=(4, 3, 3), b=(6, 2), c=(5,), d=(2, 2, 2, 2))
    m = m.without((torch.rand(m.total, generator=g) < 0.2).nonzero().flatten())
    scores = torch.rand(m.total, generator=g)
    for budget in range(m.count() + 1):
        found = reshaped(m, scores, budget)
        assert found.count() == budget
        assert set(found.bits.nonzero().flatten().tolist()) == plain_reshaped(m, scores, budget)


def test_candidates_are_culled_in_order_and_thinned() -> None:
    m = full(a=(4, 4, 4), b=(4, 4, 4), c=(4, 4, 4), d=(8, 2, 2), e=(8, 2, 2), f=(8,))
    scores = torch.rand(m.total)
    expected = {
        "0 stages culled": "abcdef", "0 stages culled, thinned": "acdf",
        "1 stages culled": "abcde", "1 stages culled, thinned": "acd",
        "2 stages culled": "de", "2 stages culled, thinned": "d",
    }  # fmt: skip
    found = candidates(m, [2, 0, 1], scores, 32)
    assert list(found) == list(expected)
    for name, kept in found.items():
        coarse = only(m, [site for site in m.sites if site.name in expected[name]])
        assert kept == reshaped(coarse, scores, 32), name
    assert list(candidates(m, [2, 0, 1], scores, 33)) == list(expected)[:5], "d has 32"
    assert list(candidates(m, [2, 0, 1], scores, m.count())) == ["0 stages culled"]
    assert len(candidates(m, [2, 0, 1], scores, 0)) == 1, "equal masks are listed once"


# ------------------------------------------------------------------------------- trainings


def plain_training(net, masks, train, epochs, first, lr):
    """SGD with momentum, CE + KD, a cosine; from the given weights with other masks."""
    teacher, student = copy.deepcopy(net).eval(), copy.deepcopy(net).train()
    fastbcd.set_masks(student, masks)
    sgd = torch.optim.SGD(student.parameters(), lr, momentum=0.9, weight_decay=5e-4)
    for epoch in range(epochs):
        sgd.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * epoch / epochs)) / 2
        for x, labels, _, _ in train.train_batches(
            32, seed=0, step=0, epoch=first + epoch, padding=1
        ):
            s = student(x)
            with torch.no_grad():
                t = teacher(x)
            kd = F.kl_div(F.log_softmax(s / 4, 1), F.softmax(t / 4, 1), reduction="batchmean") * 16
            loss = F.cross_entropy(s, labels) + kd
            sgd.zero_grad()
            loss.backward()
            sgd.step()
    return student.eval()


def test_the_trainings_are_the_published_ones() -> None:
    """Each stage alone, then the candidates, then the best: all from the given weights."""
    net, train, budget = make("resnet"), data(), 100
    given, start = copy.deepcopy(net), fastbcd.masks(net).copy()
    parts = stages(start)
    found = deepreduce(net, train, budget, **QUICK)
    records = found.history
    assert len(records) == 9
    assert len(parts) == 2
    first, value = 0, []
    for k, stage in enumerate(parts):
        mask = only(start, stage)
        student = plain_training(given, mask, train, 1, first, 0.02)
        measured = fastbcd.accuracy(student, train)
        record = records[first]
        assert record.notes["training"] == f"stage {k + 1} alone"
        assert record.count == mask.count()
        assert record.notes["train_accuracy"] == pytest.approx(
            measured, abs=1.1
        )  # one image: rounding
        value.append(criticality(record.notes["train_accuracy"], mask.count()))
        assert record.notes["criticality"] == value[-1]
        first += 1
    scores = fastbcd.saliency(given, train)
    order = sorted(range(len(parts)), key=lambda k: value[k])
    trials = candidates(start, order, scores, budget)
    assert len(trials) > 1
    for name in trials:
        assert records[first].notes["training"] == name
        assert records[first].count == budget
        assert "criticality" not in records[first].notes
        first += 1
    reached = {r.notes["training"]: r.notes.get("train_accuracy") for r in records}
    best = max(trials, key=lambda name: reached[name])
    assert {r.notes["training"] for r in records[first:]} == {f"{best}: the result"}
    assert found.masks == trials[best]
    student = plain_training(given, trials[best], train, 9 - first, first, 0.02)
    for key, tensor in student.state_dict().items():
        torch.testing.assert_close(net.state_dict()[key], tensor, rtol=1e-3, atol=1e-3)

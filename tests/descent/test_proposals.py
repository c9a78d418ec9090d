"""Proposals and schedules: draws that favour small saliency, DRC that follows the run."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fastbcd
from fastbcd.descent import proposals
from fastbcd.descent import saliency as saliencies
from fastbcd.descent.proposals import favouring
from fastbcd.descent.saliency import ranking
from fastbcd.runs import fingerprint as snapshots
from fastbcd.runs.directory import RunDirectory
from helpers.nets import images, make, thinned
from helpers.run_cases import contents, small_run


def problem(name: str, n: int = 40):
    """A net and labels that it mostly gets right, as on a train set."""
    net, (x, labels) = thinned(make(name)), images(n)
    with torch.no_grad():
        answers = net(x).argmax(1)
    return net, (x, torch.where(torch.arange(n) % 7 == 0, labels, answers))


# ------------------------------------------------------------------------------------ drawing


@example(n=50, share=0.5, width=5e-324, seed=0, step=0, trial=1)
@given(
    n=st.integers(1, 60), share=st.floats(0, 1), width=st.floats(0, 1e9),
    seed=st.integers(0, 2**63 - 1), step=st.integers(0, 2**63 - 1), trial=st.integers(0, 2**40),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_a_draw_is_a_set_of_the_given_ids(n, share, width, seed, step, trial) -> None:
    order = torch.randperm(n, generator=torch.Generator().manual_seed(n)) * 3
    size = int(share * n)
    options = {"seed": seed, "step": step, "trial": trial}
    found = favouring(order, size, width, **options)
    assert len(found.unique()) == len(found) == size
    assert set(found.tolist()) <= set(order.tolist())
    assert torch.equal(found, favouring(order.clone(), size, width, **options))


def test_draws_stay_the_same_for_ever() -> None:
    """Runs of other versions resume: these numbers must not change."""
    found = favouring(torch.arange(1000), 6, 40.0, seed=5, step=2, trial=1)
    assert sorted(found.tolist()) == [19, 22, 32, 34, 45, 49]


def test_the_chances_are_those_of_drawing_one_after_the_other() -> None:
    """Sets of two out of four, against the formula w_i/W · w_j/(W - w_i)."""
    order, width, draws = torch.arange(4), 1.3, 4000
    weights = np.exp(-np.arange(4) / width)
    counts: dict[tuple[int, int], int] = {}
    for trial in range(1, draws + 1):
        i, j = sorted(favouring(order, 2, width, seed=0, step=0, trial=trial).tolist())
        counts[i, j] = counts.get((i, j), 0) + 1
    for i in range(4):
        for j in range(i + 1, 4):
            a, b, total = weights[i], weights[j], weights.sum()
            chance = a / total * b / (total - a) + b / total * a / (total - b)
            noise = math.sqrt(chance * (1 - chance) / draws)
            assert abs(counts[i, j] / draws - chance) < 5 * noise, (i, j)


def test_the_temperature_goes_from_greedy_to_uniform() -> None:
    order, size = torch.arange(2000), 200
    means = []
    for temperature in (0.0, 0.1, 0.5, 2.0, 20.0, math.inf):
        draws = [
            favouring(order, size, temperature * size, seed=1, step=1, trial=t)
            for t in range(1, 30)
        ]
        means.append(torch.stack(draws).double().mean().item())
    assert means[0] == 99.5, "the smallest"
    assert means == sorted(means)
    assert means[-1] == pytest.approx(999.5, abs=30), "uniform"


def test_ranking_minds_neither_the_last_bits_nor_removed_units() -> None:
    g = torch.Generator().manual_seed(0)
    grid = torch.randint(1, 50, (300,), generator=g).double() / 64
    kept = torch.rand(300, generator=g) > 0.3
    order = ranking(grid.masked_fill(~kept, math.inf), kept)
    assert torch.equal(order.sort().values, kept.nonzero().flatten())
    assert torch.equal(grid[order], grid[order].sort().values)
    shaken = grid * (1 + 1e-8 * torch.randn(300, generator=g, dtype=torch.float64))
    assert torch.equal(ranking(shaken, kept), order)
    zeros = torch.zeros(300, dtype=torch.float64)
    assert torch.equal(ranking(zeros, kept), kept.nonzero().flatten())
    tiny = torch.tensor([3e-300, 1e-300, 5e-324], dtype=torch.float64)
    assert ranking(tiny, torch.ones(3, dtype=torch.bool)).tolist() == [2, 1, 0]


# ------------------------------------------------------------------------------------ in a run


def test_hypothesis_0_has_the_smallest_saliency() -> None:
    net, data = problem("resnet")
    s = fastbcd.saliency(net, data)
    draw = fastbcd.Saliency()(net, fastbcd.data.sources.as_data(data), 25, seed=0, step=1)
    rest = torch.ones(len(s), dtype=torch.bool)
    rest[draw(0)] = False
    assert s[draw(0)].max() <= s[rest].min() * (1 + 1e-5)
    assert not torch.equal(draw(0), draw(1))
    assert torch.equal(draw(1), draw(1))


def test_the_saliency_is_taken_once_a_step_on_the_scoring_data(monkeypatch) -> None:
    seen = []

    def counted(net, data, *, kind, **options):
        seen.append((len(data), kind))
        return saliencies.saliency(net, data, kind=kind, **options)

    monkeypatch.setattr(proposals, "saliency", counted)
    net, data = problem("mlp")
    run = fastbcd.bcd(
        net, data, 4, drc=10, rt=4, adt=-100.0, finetune=None, samples=15,
        proposal=fastbcd.Saliency(kind="abs_mean"),
    )  # fmt: skip
    assert seen == [(15, "abs_mean")] * len(run.history)
    assert [s.tried for s in run.history] == [4] * len(run.history)


def test_the_saliency_of_the_loss_with_the_teacher(tmp_path, monkeypatch) -> None:
    """The teacher's logits of the scored images, with T and the weight of Finetune."""
    seen = []

    def counted(net, data, *, distill, **options):
        seen.append((len(data), distill))
        return saliencies.saliency(net, data, distill=distill, **options)

    monkeypatch.setattr(proposals, "saliency", counted)
    (net, data), teacher = problem("mlp"), problem("mlp")[0]
    options = {
        "drc": 10, "rt": 2, "samples": 15, "run_dir": tmp_path,
        "finetune": fastbcd.Finetune(epochs=1, temperature=2.0, distill=0.5, padding=0),
    }  # fmt: skip
    proposal = fastbcd.Saliency(distilled=True)
    with pytest.raises(ValueError, match=r"distilled=True\) needs teacher= and finetune=Finetune"):
        fastbcd.bcd(net, data, 4, proposal=proposal, **options)
    with pytest.raises(ValueError, match="needs bcd with a teacher"):
        proposal(net, data, 3, seed=0, step=1)
    run = fastbcd.bcd(net, data, 4, proposal=proposal, teacher=teacher, **options)
    assert len(seen) == len(run.history)
    x = next(fastbcd.data.sources.as_data(data).batches(15))[0]
    for size, distill in seen:
        assert (size, distill[1:]) == (15, (2.0, 0.5))
        torch.testing.assert_close(distill.logits, teacher.eval()(x).detach())
    settings = json.loads((tmp_path / "config.json").read_text())["settings"]
    assert settings["proposal"]["distilled"] is True


@pytest.mark.parametrize("name", ["mlp", "resnet", "mixture"])
def test_decisions_depend_neither_on_waves_nor_on_engines(name) -> None:
    found = []
    for engine, wave, batch in (("sequential", 1, 7), ("stacked", 3, None), ("auto", 8, 16)):
        net, data = problem(name)
        run = fastbcd.bcd(
            net, data, 5, drc=fastbcd.Fraction(0.4), rt=5, adt=0.5, finetune=None,
            proposal="saliency", engine=fastbcd.Engine(engine, wave=wave, batch_size=batch),
        )  # fmt: skip
        found.append((run.masks.bits.tolist(), [(s.chosen, s.accepted) for s in run.history]))
    assert found[0] == found[1] == found[2]


def test_greedy_tries_one_hypothesis() -> None:
    net, data = problem("mlp")
    greedy = fastbcd.Saliency(temperature=0)
    run = fastbcd.bcd(net, data, 5, drc=10, rt=9, adt=-100.0, finetune=None, proposal=greedy)
    assert {(s.chosen, s.tried, len(s.drops)) for s in run.history} == {(0, 1, 1)}


@pytest.mark.parametrize("drc", [fastbcd.Fraction(0.3), fastbcd.Adaptive(10, grow=2.0)])
def test_a_resumed_run_ends_like_one_that_was_not_interrupted(drc, tmp_path) -> None:
    options = {"proposal": "saliency", "drc": drc, "adt": 2.0}
    whole = small_run(tmp_path / "whole", **options)
    write = RunDirectory.write

    def dies_after_two(self, state):
        write(self, state)
        if len(state.history) == 2:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunDirectory, "write", dies_after_two)
        with pytest.raises(KeyboardInterrupt):
            small_run(tmp_path / "part", **options)
    again = small_run(tmp_path / "part", **options)
    assert len(again.history) == len(whole.history) > 3
    assert contents(tmp_path / "part") == contents(tmp_path / "whole")
    state, other = (snapshots.take(r.model) for r in (whole, again))
    assert all(torch.equal(state[k], other[k]) for k in state)


def test_what_config_says(tmp_path) -> None:
    given = fastbcd.Saliency(temperature=2), fastbcd.Adaptive(20, most=40)
    small_run(tmp_path / "a", proposal=given[0], drc=given[1])
    settings = json.loads((tmp_path / "a" / "config.json").read_text())["settings"]
    assert settings["proposal"] == {"name": "saliency", "temperature": 2.0, "kind": "mean_abs"}
    assert settings["drc"] == {
        "schedule": "Adaptive", "start": 20, "grow": 1.25, "shrink": 0.5, "least": 1, "most": 40,
    }  # fmt: skip
    with pytest.raises(ValueError, match="drc"):
        small_run(tmp_path / "a", proposal=given[0], drc=fastbcd.Adaptive(20, most=41))
    small_run(tmp_path / "b", proposal="saliency")
    small_run(tmp_path / "b", proposal=fastbcd.Saliency())  # the same, so it is done


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"temperature": -1}, ValueError, "temperature=-1; it must be finite and at least 0"),
        ({"temperature": math.nan}, ValueError, "temperature=nan"),
        ({"temperature": "hot"}, TypeError, "temperature='hot'"),
        ({"kind": "max"}, ValueError, "kind='max'; choose from"),
    ],
)
def test_bad_proposals(options, error, words) -> None:
    with pytest.raises(error, match=words):
        fastbcd.Saliency(**options)


# ---------------------------------------------------------------------------------- schedules


def step(chosen: int, accepted: bool) -> fastbcd.Step:
    return fastbcd.Step(
        number=1, before=9, after=8, drc=1, tried=1, chosen=chosen, accepted=accepted, drops={},
        base_accuracy=0.0, base_loss=0.0, chosen_accuracy=0.0, chosen_loss=0.0, engine="stacked",
        sites=[8],
    )  # fmt: skip


def test_adaptive_follows_the_history() -> None:
    schedule = fastbcd.Adaptive(10, grow=1.5, shrink=0.5, least=4, most=40)
    easy, hard, none = step(0, True), step(3, True), step(2, False)
    histories = ([], [easy], [easy] * 2, [easy] * 9, [hard], [none], [none] * 9, [none, easy])
    assert [schedule.size(1000, h) for h in histories] == [10, 15, 23, 40, 10, 5, 4, 8]
    assert fastbcd.Adaptive(1, grow=1.01).size(9, [easy]) == 2, "it grows by one at least"


@given(share=st.floats(1e-6, 1), least=st.integers(1, 50), count=st.integers(1, 10**7))
@settings(max_examples=100, deadline=None)
def test_fraction(share, least, count) -> None:
    size = fastbcd.Fraction(share, least).size(count, [])
    assert size >= least
    assert size == least or abs(size - share * count) < 1


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: fastbcd.Fraction(0), ValueError, "share=0; it must be finite and above 0"),
        (lambda: fastbcd.Fraction(1.5), ValueError, "share=1.5"),
        (lambda: fastbcd.Fraction("8%"), TypeError, "share='8%'"),
        (lambda: fastbcd.Fraction(0.1, least=0), ValueError, "least=0"),
        (lambda: fastbcd.Adaptive(0), ValueError, "start=0"),
        (lambda: fastbcd.Adaptive(10, least=11), ValueError, "start=10"),
        (lambda: fastbcd.Adaptive(10, most=9), ValueError, "most=9"),
        (lambda: fastbcd.Adaptive(10, grow=0.9), ValueError, "grow=0.9"),
        (lambda: fastbcd.Adaptive(10, shrink=0.0), ValueError, "shrink=0.0"),
        (lambda: fastbcd.Adaptive(10, shrink=math.nan), ValueError, "shrink=nan; it must be"),
        (lambda: fastbcd.Adaptive(10, grow=math.inf), ValueError, "grow=inf; it must be finite"),
        (lambda: fastbcd.Adaptive(2.5), TypeError, "start=2.5"),
    ],
)
def test_bad_schedules(make, error, words) -> None:
    with pytest.raises(error, match=words):
        make()


class Halves(fastbcd.Schedule):
    """A user's own."""

    def size(self, count, history):
        return count // 2 if len(history) < 2 else 0


def test_a_schedule_of_ones_own() -> None:
    net, data = problem("mlp")
    before = fastbcd.masks(net).count()
    assert Halves().describe() == {"schedule": "Halves"}
    with pytest.raises(ValueError, match=r"drc\(8\)=0; it must be a whole number, 1"):
        fastbcd.bcd(net, data, 1, drc=Halves(), rt=1, finetune=None)
    assert fastbcd.masks(net).count() == before  # it is refused before any work


# ------------------------------------------------------------------------ proposals of one's own


@dataclasses.dataclass
class Lowest(fastbcd.Proposal):
    """The lowest ids, from hypothesis `first` on."""

    first: int = 0

    def __call__(self, net, data, size, *, seed, step):
        kept = fastbcd.masks(net).bits.nonzero().flatten()
        return lambda trial: kept[self.first + trial :][:size]


def test_a_proposal_of_ones_own(tmp_path) -> None:
    proposal = Lowest()
    run = small_run(tmp_path, proposal=proposal, drc=30, rt=1, finetune=None)
    assert run.masks.bits.nonzero().flatten().tolist() == list(range(90, 98))
    settings = json.loads((tmp_path / "config.json").read_text())["settings"]
    assert settings["proposal"] == proposal.describe()
    assert small_run(tmp_path, proposal=proposal, drc=30, rt=1, finetune=None).masks == run.masks
    with pytest.raises(ValueError, match=r"proposal"):
        small_run(tmp_path, proposal=Lowest(first=1), drc=30, rt=1, finetune=None)


class Unrecorded(Lowest):
    def describe(self):
        return {"function": print}


@pytest.mark.parametrize(
    ("proposal", "error", "words"),
    [
        ("gradient", ValueError, "proposal='gradient'; choose from uniform, saliency"),
        (3, TypeError, "proposal=3; it must be Proposal or a text"),
        (Lowest, TypeError, "it must be Proposal or a text"),
        (Unrecorded(), TypeError, r"proposal Unrecorded: describe\(\) must return JSON"),
    ],
)
def test_bad_proposals_of_ones_own_are_refused_before_any_work(
    proposal, error, words, tmp_path
) -> None:
    with pytest.raises(error, match=words):
        small_run(tmp_path / "run", proposal=proposal)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "ids",
    [torch.tensor(3), torch.tensor([1, 1]), torch.tensor([1]), torch.tensor([[1, 2]]), [1, 2, 3]],
)
def test_hypotheses_that_are_no_set_of_drc_relus_are_refused(ids) -> None:
    class Bad(Lowest):
        def __call__(self, net, data, size, *, seed, step):
            return lambda trial: ids

    with pytest.raises(ValueError, match=r"proposal .*Bad: hypothesis 0 is .*expected 2 ids"):
        small_run(None, proposal=Bad(), drc=2)


def test_removed_relus_are_not_proposed_twice() -> None:
    class Same(Lowest):
        def __call__(self, net, data, size, *, seed, step):
            return lambda trial: torch.arange(size)

    with pytest.raises(ValueError, match=r"id 0 \(site '2'.*is not kept"):
        small_run(None, proposal=Same(), drc=2, finetune=None)

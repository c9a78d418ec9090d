"""choose: the decisions of the one-by-one loop, with less work."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastbcd
from fastbcd import Engine, choose, score
from fastbcd.scoring.answers import Answers
from fastbcd.scoring.decision import Selection
from fastbcd.scoring.exact import Exact
from fastbcd.scoring.metric import Criterion
from helpers.nets import images, make, thinned
from helpers.whole_scores import all_images


def one_by_one(net, hypotheses, data, adt):
    """Algorithm 1's inner loop, word for word: (number, accepted, tried)."""
    best, least = 0, (-1, 0.0)
    for number, ids in enumerate(hypotheses):
        s = score(net, [ids], data, engine="sequential")
        if s.drop[0] < adt:
            return number, True, number + 1
        correct, loss = int(s.correct[0]), s.loss[0].item()
        tie = correct == least[0] and loss < least[1] - 1e-5 * max(1.0, least[1])
        if correct > least[0] or tie:
            best, least = number, (correct, loss)
    return best, False, len(hypotheses)


def trained(name: str, n: int, noise: int, seed: int):
    """A net and labels that it mostly gets right, as on a train set."""
    net, (x, labels) = thinned(make(name)), images(n, seed)
    with torch.no_grad():
        answers = net(x).argmax(1)
    return net, (x, torch.where(torch.arange(n) % noise == 0, labels, answers))


def distance(outputs, targets):
    return 1 - (outputs.softmax(1).argmax(1) - targets).abs() / 4


distance.bounds = (0.0, 1.0)


@given(
    name=st.sampled_from(["mlp", "resnet", "mixture"]), n=st.integers(1, 40),
    noise=st.integers(2, 20), adt=st.sampled_from([-50.0, -3.0, 0.0, 0.1, 2.6, 5.0, 20.0, 200.0]),
    count=st.integers(1, 7), size=st.integers(1, 60), wave=st.integers(1, 8),
    batch=st.integers(1, 13), seed=st.integers(0, 50),
)  # fmt: skip
@settings(max_examples=50, deadline=None)
def test_the_choice_is_that_of_the_loop(
    name, n, noise, adt, count, size, wave, batch, seed
) -> None:
    net, data = trained(name, n, noise, seed)
    masks = fastbcd.masks(net)
    size = min(size, masks.count())
    hypotheses = [masks.sample(size, seed=seed, step=0, trial=t) for t in range(count)]
    number, accepted, _ = one_by_one(net, hypotheses, data, adt)
    engine = Engine(wave=wave, batch_size=batch)
    found = choose(net, iter(hypotheses), data, adt=adt, engine=engine)
    assert (found.number, found.accepted) == (number, accepted)
    assert torch.equal(found.removal, hypotheses[number])
    assert found.images <= found.tried * n


def test_hypotheses_are_drawn_lazily() -> None:
    net, data = trained("mlp", 20, 5, 0)
    masks, drawn = fastbcd.masks(net), []

    def source():
        for t in range(50):
            drawn.append(t)
            yield masks.sample(1, seed=0, step=0, trial=t)

    found = choose(net, source(), data, adt=100.0, engine=Engine(wave=4))
    assert found.number == 0
    assert drawn == [0]
    found = choose(net, source(), data, adt=-100.0, engine=Engine(wave=4))
    assert (found.tried, found.accepted, drawn) == (50, False, [0, *range(50)])


def test_hopeless_hypotheses_are_dropped_early() -> None:
    """Removing everything ruins the net within a few images; removing nothing much passes."""
    net, data = trained("mlp", 200, 40, 3)
    masks = fastbcd.masks(net)
    everything = masks.bits.nonzero().flatten()
    assert score(net, [everything], data).drop[0] > 20
    mild = masks.sample(1, seed=0, step=0, trial=0)
    engine = Engine(batch_size=10)
    fast = choose(net, [everything, mild], data, adt=3.0, engine=engine)
    with all_images():
        slow = choose(net, [everything, mild], data, adt=3.0, engine=engine)
    assert (fast.number, fast.accepted) == (slow.number, slow.accepted) == (1, True)
    assert slow.images == 400
    assert fast.images < 380


@pytest.mark.parametrize("adt", [-3.0, 0.0, 2.6, 20.0])
@pytest.mark.parametrize("metric", [None, distance])
def test_answers_are_read_when_a_decision_is_possible(monkeypatch, adt, metric) -> None:
    """The choice is as if they were read after every batch; hardly more is scored."""
    net, data = trained("mlp", 120, 7, 2)
    hypotheses = [fastbcd.masks(net).sample(k, seed=2, step=0, trial=0) for k in (29, 9, 3, 30, 1)]
    options = {"adt": adt, "engine": Engine(batch_size=3), "metric": metric}
    reads, plain = [], Answers.__call__
    monkeypatch.setattr(Answers, "__call__", lambda *a: reads.append(a) or plain(*a))
    few, count = choose(net, hypotheses, data, **options), len(reads)
    monkeypatch.setattr(Exact, "until", lambda self, numbers: min(self.seen(numbers[0]) + 3, 120))
    all_ = choose(net, hypotheses, data, **options)
    assert (few.number, few.accepted) == (all_.number, all_.accepted)
    assert (few.value, few.loss) == pytest.approx((all_.value, all_.loss))
    assert few.images <= 1.07 * all_.images + 3 * len(hypotheses)
    assert count < 0.9 * (len(reads) - count)


def exact_choice(rows: torch.Tensor, adt: float, bounds, losses=None):
    """The choice from values of a metric [1 + K, N], the base's first; and what each has seen."""

    def metric(outputs, targets):
        raise NotImplementedError

    metric.bounds = bounds
    losses = torch.zeros(len(rows)) if losses is None else torch.tensor(losses)
    count, total = len(rows) - 1, rows.shape[1]

    def run(numbers, begin, end):
        parts = {k: rows[k + 1, begin:end].double() for k in numbers}
        return {k: torch.stack([p, losses[k + 1].expand(len(p))]) for k, p in parts.items()}

    decision = Exact(Criterion(metric), total, adt=adt)
    decision.batch = 2
    search = Selection(run, decision)
    search.complete(-1)
    return search.choose([[k] for k in range(count)]), [decision.seen(k) for k in range(count)]


def test_images_ahead_may_have_the_least_value_of_the_metric() -> None:
    """A hypothesis that leads by far on the first half and ends below ADT; values of -1 to 1."""
    rows = torch.full((3, 100), 0.2)
    rows[1] = torch.arange(100).lt(50) * 2.0 - 1.0
    for bounds in ((-1, 1), (-1.5, 1.5), (0.2 - 5, 4)):
        assert exact_choice(rows, 1.0, bounds)[0] == (1, True)
    rows[1, 60:] = 0.9  # certain to pass before the end, and not sooner
    assert exact_choice(rows, 1.0, (-1, 1))[0] == (0, True)


def test_near_ties_are_continued_for_their_losses() -> None:
    """The second cannot reach the first except by rounding, and has the smaller loss."""
    rows = torch.ones(3, 100, dtype=torch.float64)
    rows[1, 98:], rows[2, :2] = 0.0, 0.0
    for difference, losses, best in ((5e-4, (0.0, 2.0, 1.0), 1), (5e-4, (0.0, 1.0, 2.0), 0),
                                     (5e-3, (0.0, 2.0, 1.0), 0)):  # fmt: skip
        rows[2, 0] = -difference
        choice, seen = exact_choice(rows, 1.0, (-1, 1), losses)
        with all_images():
            assert choice == exact_choice(rows, 1.0, (-1, 1), losses)[0] == (best, False)
        assert seen[0] == 100
        assert (seen[1] == 100) == (difference < 1e-3)


def test_bad_input() -> None:
    net, data = trained("mlp", 5, 2, 0)
    with pytest.raises(ValueError, match="no hypothesis"):
        choose(net, [], data, adt=1.0)
    with pytest.raises(IndexError, match="hypothesis 1: id 999 is out of range"):
        choose(net, [torch.tensor([0]), torch.tensor([999])], data, adt=-500.0)
    assert not net.training

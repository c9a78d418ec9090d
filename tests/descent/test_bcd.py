"""bcd and steps: the decisions of Algorithm 1 taken one hypothesis at a time, and exact budgets."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fastbcd
from fastbcd.runs import fingerprint as snapshots
from fastbcd.runs.step import decode, encode
from fastbcd.scoring.engine import ENGINES
from fastbcd.training.settings import Finetune
from helpers.nets import images, make, thinned

NETS = ["mlp", "resnet", "line", "poly", "mixture", "untraceable"]


def problem(name: str, n: int = 40, noise: int = 7, seed: int = 0):
    """A net and labels that it mostly gets right, as on a train set."""
    net, (x, labels) = thinned(make(name)), images(n, seed)
    with torch.no_grad():
        answers = net(x).argmax(1)
    return net, (x, torch.where(torch.arange(n) % noise == 0, labels, answers))


def shake(net: nn.Module, step) -> None:
    """Training that is quick, changes the answers, and depends on the step alone."""
    generator = torch.Generator().manual_seed(int(step))
    with torch.no_grad():
        for p in net.parameters():
            p += 0.03 * torch.randn(p.shape, generator=generator)


def better(one, other) -> bool:
    """More correct answers, or as many and a smaller loss (rounding apart)."""
    tie = one[0] == other[0] and one[1] < other[1] - 1e-5 * max(1.0, other[1])
    return one[0] > other[0] or tie


def algorithm_1(net, data, *, budget, drc, rt, adt, seed, train, when):
    """The paper's pseudo code, word for word: (chosen, accepted, tried, count) of every step."""
    x, labels = data
    net.eval()

    @torch.no_grad()
    def evaluate():
        logits = net(x)
        return int((logits.argmax(1) == labels).sum()), F.cross_entropy(logits.double(), labels)

    record, t = [], 0
    while (count := fastbcd.masks(net).count()) > budget:
        t, m = t + 1, fastbcd.masks(net)
        m = fastbcd.MaskSet(m.sites, m.bits)
        size = min(drc(count) if callable(drc) else drc, count - budget)
        accuracy, _ = evaluate()
        n, found, best = 0, False, None
        while n < rt and not found:
            fastbcd.set_masks(net, m.without(m.sample(size, seed=seed, step=t, trial=n)))
            correct, loss = evaluate()
            correct_enough = 100.0 * (accuracy - correct) / len(x) < adt
            if correct_enough or best is None or better((correct, loss), best[1:]):
                found, best = correct_enough, (n, correct, loss)
            n += 1
        fastbcd.set_masks(net, m.without(m.sample(size, seed=seed, step=t, trial=best[0])))
        if train and (when == "every_step" or not found):
            train(net, t)
        record.append((best[0], found, n, fastbcd.masks(net).count()))
    return record


def can_score(name: str, engine: str) -> bool:
    """Some engines refuse some nets, with the reason."""
    net, data = problem(name, 4)
    try:
        fastbcd.score(net, torch.empty(0, 1, dtype=torch.int64), data, engine=engine)
    except ValueError:
        return False
    return True


@pytest.mark.filterwarnings("ignore:fastbcd scores:RuntimeWarning")
@pytest.mark.parametrize("engine", ENGINES)
@given(
    name=st.sampled_from(NETS), n=st.integers(5, 40), noise=st.integers(2, 12),
    removed=st.floats(0.02, 1.0), parts=st.floats(1.0, 4.0),
    schedule=st.booleans(), rt=st.integers(1, 5),
    adt=st.sampled_from([-200.0, -3.0, 0.0, 2.6, 7.0, 20.0, 200.0]), seed=st.integers(0, 99),
    wave=st.integers(1, 6), batch=st.integers(1, 17),
    when=st.sampled_from(["every_step", "on_reject"]), train=st.sampled_from([None, shake]),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_the_decisions_are_those_of_algorithm_1(
    engine, name, n, noise, removed, parts, schedule, rt, adt, seed, wave, batch, when, train
) -> None:
    if not can_score(name, engine):
        engine = "auto"
    net, data = problem(name, n, noise, seed)
    count = fastbcd.masks(net).count()
    budget = int(count * (1 - removed))
    fixed = max(1, int((count - budget) / parts))
    drc = (lambda kept: max(1, kept // 3)) if schedule else fixed
    budget = max(budget, count // 5) if schedule else budget
    common = {"budget": budget, "drc": drc, "rt": rt, "adt": adt, "seed": seed}
    other = copy.deepcopy(net)
    expected = algorithm_1(other, data, **common, train=train, when=when)
    run = fastbcd.bcd(
        net, data, **common, finetune=train, finetune_when=when,
        engine=fastbcd.Engine(engine, wave=wave, batch_size=batch),
    )  # fmt: skip
    assert [(s.chosen, s.accepted, s.tried, s.after) for s in run.history] == expected
    assert run.masks == fastbcd.masks(other)
    assert run.masks.count() == min(budget, count)
    for name_, tensor in other.state_dict().items():
        assert torch.equal(net.state_dict()[name_], tensor)


def test_the_record_of_a_step() -> None:
    net, data = problem("resnet")
    before = fastbcd.masks(net).count()
    run = fastbcd.bcd(
        net, data, budget=before - 250, drc=100, rt=3, adt=-100.0, test=images(30, 5),
        finetune=lambda net, step: {"loss": 0.5 + step.number},
    )  # fmt: skip
    assert [(s.number, s.before, s.after, s.drc) for s in run.history] == [
        (1, before, before - 100, 100),
        (2, before - 100, before - 200, 100),
        (3, before - 200, before - 250, 50),
    ]
    first = run.history[0]
    assert (first.tried, first.accepted, first.train_loss) == (3, False, 1.5)
    net, _ = problem("resnet")
    masks = fastbcd.masks(net)
    removals = [masks.sample(100, seed=0, step=1, trial=t) for t in range(3)]
    scores = fastbcd.score(net, removals, data)
    assert first.base_accuracy == 100.0 * scores.base_correct / 40
    assert first.base_loss == pytest.approx(scores.base_loss)
    assert first.chosen_accuracy == 100.0 * scores.correct[first.chosen] / 40
    assert first.chosen_loss == pytest.approx(scores.loss[first.chosen].item())
    assert first.drops[first.chosen] == pytest.approx(scores.drop.min().item())
    assert first.test_accuracy is not None
    assert set(first.seconds) == {"propose", "score", "finetune", "test"}
    assert decode(fastbcd.Step, encode(first), "here") == first
    assert "exhausted after 3" in str(first)


def test_the_samples_are_the_first_train_images() -> None:
    net, (x, labels) = problem("mlp", 40)
    other = copy.deepcopy(net)
    few = fastbcd.bcd(net, (x, labels), 10, drc=3, rt=4, adt=1.0, finetune=None, samples=15)
    cut = fastbcd.bcd(other, (x[:15], labels[:15]), 10, drc=3, rt=4, adt=1.0, finetune=None)
    assert few.masks == cut.masks
    assert [s.base_loss for s in few.history] == [s.base_loss for s in cut.history]


def test_steps_is_bcd_with_the_training_in_the_body() -> None:
    net, data = problem("mlp")
    other = copy.deepcopy(net)
    numbers = []
    for step in fastbcd.steps(net, data, budget=5, drc=6, rt=3, adt=0.0):
        assert fastbcd.masks(net).count() == step.after, "the removal is done"
        shake(net, step)
        numbers.append(step.number)
    fastbcd.bcd(other, data, budget=5, drc=6, rt=3, adt=0.0, finetune=shake)
    assert numbers == list(range(1, len(numbers) + 1))
    for name, tensor in other.state_dict().items():
        assert torch.equal(net.state_dict()[name], tensor)


def test_real_fine_tuning_takes_part_and_repeats() -> None:
    data = fastbcd.load("fashion-mnist-mini").first(96)
    torch.manual_seed(0)
    net = fastbcd.models.resnet20(image_size=28, in_channels=1, width=2, blocks=1)
    first, second, teacher = net, copy.deepcopy(net), copy.deepcopy(net)
    options = {"drc": 500, "rt": 2, "adt": 0.0, "teacher": teacher}
    runs = [
        fastbcd.bcd(n, data, fastbcd.masks(n).count() - 900, finetune=Finetune(epochs=1), **options)
        for n in (first, second)
    ]
    weight = next(first.parameters())
    assert not torch.equal(weight, next(teacher.parameters())), "it was trained"
    for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert all(math.isfinite(s.train_loss) for s in runs[0].history)


def test_a_callable_sees_the_same_random_numbers_in_the_same_step() -> None:
    seen: list[float] = []

    def train(net, step):
        seen.append(torch.rand(()).item())

    for _ in range(2):
        net, data = problem("mlp", 10)
        fastbcd.bcd(net, data, budget=0, drc=20, rt=1, finetune=train)
        torch.rand(3)
    half = len(seen) // 2
    assert seen[:half] == seen[half:]
    assert len(set(seen)) == half


# ------------------------------------------------------------------------------- bad input


def test_a_budget_that_is_met_is_done_at_once(capsys) -> None:
    net, data = problem("mlp")
    before = snapshots.take(net)
    count = fastbcd.masks(net).count()
    run = fastbcd.bcd(net, data, budget=count, finetune=shake)
    assert run.history == []
    assert f"the run is done: 0 steps, {count} ReLUs kept" in capsys.readouterr().out
    assert all(torch.equal(before[k], v) for k, v in snapshots.take(net).items())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"budget": -1}, ValueError, "budget=-1; it must be a whole number, 0 or more"),
        ({"budget": 2.5}, TypeError, "budget=2.5; it must be a whole number"),
        ({"drc": True}, ValueError, "drc=True"),
        ({"drc": lambda count: 0}, ValueError, r"drc\(30\)=0"),
        ({"drc": lambda count: count / 2}, TypeError, r"drc\(30\)=15.0"),
        ({"adt": math.nan}, ValueError, "adt=nan; it must be finite"),
        ({"samples": 41}, ValueError, "samples=41; there are 40 train images"),
        ({"finetune_when": "never"}, ValueError, "finetune_when='never'; choose from every_step"),
        ({"engine": None}, TypeError, "engine=None; it must be"),
        ({"resume": "maybe"}, ValueError, "resume='maybe'"),
        ({"finetune": 3}, TypeError, "finetune is a int"),
        ({"teacher": nn.Sequential(nn.Flatten(), nn.Linear(192, 7))}, ValueError,
         "the teacher returns|only Finetune distils"),
        ({"test": images(3)[0]}, TypeError, "data is a Tensor"),
        ({"test": (images(3)[0], torch.tensor([0, 1, 9]))}, ValueError, "label 9 of image 2"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("finetune", [None, Finetune(epochs=1)])
def test_bad_input_is_refused_before_any_work(options, error, message, finetune, tmp_path) -> None:
    net, data = problem("mlp")
    before = snapshots.take(net)
    run_dir = tmp_path / "run"
    options = {"budget": 5, "drc": 2, "finetune": finetune, "run_dir": run_dir, **options}
    with pytest.raises(error, match=message):
        fastbcd.bcd(net, data, **options)
    assert not run_dir.exists()
    assert all(torch.equal(before[k], v) for k, v in snapshots.take(net).items())


def test_a_net_without_masks_and_empty_data() -> None:
    net, (x, labels) = problem("mlp")
    with pytest.raises(ValueError, match=r"no masked activations: fastbcd\.convert it"):
        fastbcd.bcd(nn.Linear(3, 3), (x, labels), budget=0)
    with pytest.raises(ValueError, match="no images"):
        fastbcd.bcd(net, (x[:0], labels[:0]), budget=0)


def test_training_must_not_change_the_masks() -> None:
    net, data = problem("mlp")
    last = {}

    def clears_a_bit(net, step) -> None:
        if step.number == 2:
            fastbcd.set_masks(net, fastbcd.masks(net).without(last["kept"][-1:]))
        last["kept"] = fastbcd.masks(net).bits.nonzero().flatten()
        last["state"] = last.get("state") or snapshots.take(net)

    name = fastbcd.masks(net).sites[-1].name
    with pytest.raises(RuntimeError, match=f"1 bits, the first at site '{name}'"):
        fastbcd.bcd(net, data, budget=2, drc=5, rt=2, finetune=clears_a_bit)
    assert all(torch.equal(last["state"][k], v) for k, v in snapshots.take(net).items())


@pytest.mark.parametrize("error", [KeyboardInterrupt, FloatingPointError])
def test_an_exception_leaves_the_last_finished_step(error) -> None:
    net, data = problem("resnet")
    net.train()
    next(net.children()).eval()
    modes = {name: m.training for name, m in net.named_modules()}
    states = []

    def train(net, step) -> None:
        if step.number == 3:
            net.train()
            shake(net, step)
            raise error
        shake(net, step)
        states.append(snapshots.take(net))

    with pytest.raises(error):
        fastbcd.bcd(net, data, budget=0, drc=50, rt=2, finetune=train)
    assert all(torch.equal(states[1][k], v) for k, v in snapshots.take(net).items())
    assert {name: m.training for name, m in net.named_modules()} == modes


def test_leaving_the_body_undoes_the_step() -> None:
    net, data = problem("mlp")
    for step in fastbcd.steps(net, data, budget=0, drc=4, rt=1):
        shake(net, step)
        if step.number == 2:
            break
        first = snapshots.take(net)
    assert all(torch.equal(first[k], v) for k, v in snapshots.take(net).items())


def test_a_run_prints_a_summary() -> None:
    net, data = problem("mlp")
    kept, total = fastbcd.masks(net).count(), fastbcd.masks(net).total
    run = fastbcd.bcd(net, data, kept - 5, drc=3, rt=1, finetune=None, test=data)
    last = run.history[-1]
    assert repr(run) == (
        f"Run({kept - 5} of {total} ReLUs kept in {len(run.masks.sites)} sites after 2 steps, "
        f"train {last.chosen_accuracy:.2f} %, test {last.test_accuracy:.2f} %)"
    )
    model, _, history = run
    assert (model, len(history)) == (net, 2)

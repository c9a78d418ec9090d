"""A metric and a loss of one's own: every engine gives the values of a plain loop."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import fastbcd
from fastbcd import Engine, MaskedReLU, choose, score
from helpers.nets import images, make, thinned
from helpers.whole_scores import all_images


class Task(nn.Module):
    """Two convolutions and two heads: outputs in the structure that `kind` names."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.act1 = nn.Conv2d(3, 4, 3, padding=1), MaskedReLU((4, 8, 8))
        self.second, self.act2 = nn.Conv2d(4, 4, 3, padding=1), MaskedReLU((4, 8, 8))
        self.pixels, self.head = nn.Conv2d(4, 3, 1), nn.Linear(4, 5)

    def forward(self, x):
        early = self.act1(self.first(x))
        y = self.act2(self.second(early))
        vector = self.head(y.mean((2, 3)))
        if self.kind == "tuple":
            return vector, early.mean((2, 3))  # the second depends on the first site alone
        if self.kind == "dict":
            return {"out": self.pixels(y), "aux": [vector, x.mean((1, 2, 3))]}
        return self.pixels(y) if self.kind == "segmentation" else vector


def bounded(low: float, high: float):
    def mark(metric):
        metric.bounds = (low, high)
        return metric

    return mark


@bounded(0, 1)
def pixel_accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean((1, 2))


@bounded(0, 1)
def labels_right(outputs, targets):
    return ((outputs.sigmoid_() > 0.5) == targets.bool()).float().mean(1)  # in place: its own copy


def closeness(outputs, targets):
    return -(outputs - targets).abs().mean(1)


@bounded(-1, 3)
def of_tuple(outputs, targets):
    vector, early = outputs
    return (vector.argmax(1) == targets).float() + early.mean(1).tanh()


@bounded(0, 2)
def of_dict(outputs, targets):
    vector, mean = outputs["aux"]
    hit = vector.argmax(1) == targets
    return hit.float() + outputs["out"].mean((1, 2, 3)).sigmoid() * (mean > 0)


def squares(outputs, targets):
    return (outputs - targets).square().mean(1)


def of_first(outputs, targets):
    logits = outputs[0] if isinstance(outputs, tuple) else outputs["aux"][0]
    return F.cross_entropy(logits, targets)


TASKS = {
    "segmentation": (pixel_accuracy, None, lambda n: torch.randint(3, (n, 8, 8))),
    "several labels": (
        labels_right,
        F.binary_cross_entropy_with_logits,
        lambda n: torch.randint(2, (n, 5)).float(),
    ),
    "regression": (closeness, squares, lambda n: torch.randn(n, 5)),
    "tuple": (of_tuple, of_first, lambda n: torch.randint(5, (n,))),
    "dict": (of_dict, of_first, lambda n: torch.randint(5, (n,))),
}


def task(name: str, n: int = 11, seed: int = 0):
    torch.manual_seed(seed)
    metric, loss, targets = TASKS[name]
    net = Task(name).eval()
    net = thinned(net, 0.5)
    with torch.no_grad():
        net.pixels.weight.mul_(3)
        net.head.weight.mul_(9)
    return net, (torch.randn(n, 3, 8, 8), targets(n)), {"metric": metric, "loss": loss}


def removals_of(net, count: int = 5, size: int = 40) -> list[torch.Tensor]:
    masks = fastbcd.masks(net)
    found = [masks.sample(size, seed=1, step=0, trial=t) for t in range(count)]
    kept = masks.bits.nonzero().flatten()
    return [*found, kept[-9:], kept[:0]]  # one that changes the last site alone, one that does not


def plain(net, removals, data, metric, loss):
    """One hypothesis and one image at a time: (mean metric, mean loss) of each, and of the base."""
    before, rows = fastbcd.masks(net).copy(), []
    for ids in [*removals, torch.empty(0, dtype=torch.int64)]:
        fastbcd.set_masks(net, before.without(ids))
        values, losses = [], []
        for x, target in zip(*data, strict=True):
            with torch.no_grad():
                each = F.cross_entropy if loss is None else loss
                losses.append(each(net(x[None]), target[None]).mean())
                values.append(metric(net(x[None]), target[None]))
        rows.append((torch.stack(values).mean().item(), torch.stack(losses).mean().item()))
    fastbcd.set_masks(net, before)
    return rows


@pytest.mark.parametrize("engine", ["sequential", "stacked", "auto"])
@pytest.mark.parametrize("name", TASKS)
def test_engines_equal_a_plain_loop(name, engine) -> None:
    net, data, criterion = task(name)
    removals = removals_of(net)
    *rows, base = plain(net, removals, data, **criterion)
    assert len({loss for _, loss in rows}) == 7, "the hypotheses differ, so a mix-up would show"
    for batch_size, memory in ((4, 2**40), (11, 1)):  # lanes together, and one at a time
        options = Engine(engine, batch_size=batch_size, memory=memory)
        found = score(net, removals, data, options, **criterion)
        assert found.engine == ("stacked" if engine == "auto" else engine)
        assert found.correct is None
        assert found.base_correct is None
        assert found.value.tolist() == pytest.approx([value for value, _ in rows], abs=1e-5)
        assert found.loss.tolist() == pytest.approx([loss for _, loss in rows], abs=1e-5)
        assert (found.base_value, found.base_loss) == pytest.approx(base, abs=1e-5)
        low, high = getattr(criterion["metric"], "bounds", (0, 100))
        drop = 100 / (high - low) * (found.base_value - found.value)
        torch.testing.assert_close(found.drop, drop)


@pytest.mark.parametrize("name", ["segmentation", "several labels", "regression"])
def test_collapsed_scores_one_tensor_of_any_shape(name) -> None:
    net, data, criterion = task(name)
    removals = removals_of(net)
    truth = score(net, removals, data, "sequential", **criterion)
    for _ in range(2):  # a form that is built, and one that is kept
        found = score(net, removals, data, Engine("collapsed", batch_size=4), **criterion)
        assert found.engine == "collapsed"
        torch.testing.assert_close(found.value, truth.value, rtol=0, atol=1e-5)
        torch.testing.assert_close(found.loss, truth.loss, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["tuple", "dict"])
def test_collapsed_refuses_several_tensors(name) -> None:
    net, data, criterion = task(name)
    with pytest.raises(ValueError, match="it returns several tensors instead of one; use engine="):
        score(net, removals_of(net), data, "collapsed", **criterion)


@given(
    name=st.sampled_from([*TASKS]), n=st.integers(1, 25), count=st.integers(1, 6),
    adt=st.sampled_from([-20.0, -1.0, 0.0, 0.3, 2.0, 10.0, 100.0]), wave=st.integers(1, 5),
    batch=st.integers(1, 9), seed=st.integers(0, 50), size=st.integers(1, 90),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_early_decisions_are_those_of_all_images(
    name, n, count, adt, wave, batch, seed, size
) -> None:
    net, data, criterion = task(name, n, seed)
    removals = removals_of(net, count, size)
    truth = score(net, removals, data, "sequential", **criterion)
    passing = [k for k, drop in enumerate(truth.drop.tolist()) if drop < adt - 1e-6]
    engine = Engine("stacked", wave=wave, batch_size=batch)
    early = choose(net, removals, data, adt=adt, engine=engine, **criterion)
    with all_images():
        full = choose(net, removals, data, adt=adt, engine=engine, **criterion)
    assert (early.number, early.accepted) == (full.number, full.accepted)
    assert early.value == pytest.approx(truth.value[early.number].item(), abs=1e-5)
    if passing:
        assert full.accepted
        assert full.number <= passing[0]
    assert early.images <= full.images
    if name == "regression":
        assert early.images == full.images, "without bounds every image counts"


def test_top1_as_a_metric_of_ones_own() -> None:
    net, data = thinned(make("resnet")), images(23)
    removals = removals_of(net, 4, 9)

    @bounded(0, 1)
    def top1(outputs, targets):
        return outputs.argmax(1) == targets

    truth, found = score(net, removals, data), score(net, removals, data, metric=top1)
    assert truth.correct is not None
    torch.testing.assert_close(found.value, truth.value)
    torch.testing.assert_close(found.drop, truth.drop)
    torch.testing.assert_close(found.loss, truth.loss)
    assert fastbcd.accuracy(net, data, metric=top1) == pytest.approx(fastbcd.accuracy(net, data))


def test_top1_with_a_loss_of_ones_own() -> None:
    net, data = thinned(make("resnet")), images(23)
    removals = removals_of(net, 4, 9)
    truth = score(net, removals, data)
    found = score(net, removals, data, loss=F.cross_entropy)  # the mean of a batch
    assert torch.equal(found.correct, truth.correct)
    assert found.base_correct == truth.base_correct
    torch.testing.assert_close(found.loss, truth.loss, rtol=0, atol=1e-5)
    chosen = [choose(net, removals, data, adt=-200.0, loss=loss).number
              for loss in (None, F.cross_entropy)]  # fmt: skip
    assert chosen[0] == chosen[1]
    with pytest.raises(ValueError, match=r"the loss returns float32 \[2, 5\] for a batch of 2"):
        score(net, removals, data, loss=lambda outputs, targets: outputs)


def test_accuracy_is_the_mean_of_the_metric() -> None:
    for name in TASKS:
        net, data, criterion = task(name)
        mean = plain(net, [], data, **criterion)[0][0]
        low, high = getattr(criterion["metric"], "bounds", (0, 100))
        found = fastbcd.accuracy(net, data, 4, metric=criterion["metric"])
        assert found == pytest.approx(100 * (mean - low) / (high - low), abs=1e-3)


# ------------------------------------------------------------------------------- bad metrics


def scalar(outputs, targets):
    return pixel_accuracy(outputs, targets).mean()


@bounded(0, 1)
def twice(outputs, targets):
    return 2 * pixel_accuracy(outputs, targets) + 1


def undefined(outputs, targets):
    return pixel_accuracy(outputs, targets) / 0 * 0


@bounded(1, 1)
def empty(outputs, targets):
    return pixel_accuracy(outputs, targets)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"metric": scalar}, ValueError,
         r"the metric returns float32 \[\] for a batch of 2; .* a tensor \[2\]"),
        ({"metric": lambda o, t: 0.5}, ValueError, "the metric returns 0.5 for a batch of 2"),
        ({"metric": lambda o, t: (o, [t])}, ValueError,
         r"returns \('float32 \[2, 3, 8, 8\]', \['int64 \[2, 8, 8\]'\]\)"),
        ({"metric": twice}, ValueError, r"returns 1\.\d+ for image 0 and the net; .*"
         r"lie in its bounds \(0\.0, 1\.0\)"),
        ({"metric": undefined}, ValueError, "returns nan for image 0 and the net; its"),
        ({"metric": empty}, ValueError, r"metric.bounds=\(1, 1\); it must be two numbers"),
        ({"metric": "accuracy"}, TypeError, "metric='accuracy'; it must be a callable"),
        ({"loss": 3}, TypeError, "loss=3; it must be a callable"),
        ({"loss": lambda o, t: o}, ValueError, r"the loss returns float32 \[2, 3, 8, 8\]"),
        ({"loss": lambda o, t: o.sum() * torch.nan}, FloatingPointError, "has a loss of NaN"),
        ({"metric": None}, ValueError, r"must return logits \[B, classes\], unless metric="),
    ],
)  # fmt: skip
def test_bad_metrics(options, error, words) -> None:
    net, data, criterion = task("segmentation")
    with pytest.raises(error, match=words):
        score(net, removals_of(net), data, **(criterion | options))


def test_values_at_their_bounds_may_be_rounded() -> None:
    net, data, _ = task("segmentation")

    @bounded(0, 1)
    def above(outputs, targets):
        return torch.full((len(targets),), 1 + 1e-7, dtype=torch.float64)

    assert score(net, removals_of(net), data, metric=above).value.tolist() == [1.0] * 7


class Answer:
    """A result that torch cannot look into."""

    def __init__(self, logits) -> None:
        self.answer = logits


class Wrapped(Task):
    def forward(self, x):
        return Answer(super().forward(x))


@pytest.mark.filterwarnings("ignore:fastbcd scores Wrapped one hypothesis at a time")
def test_results_of_any_class_are_scored_sequentially() -> None:
    net, data, criterion = task("regression")
    other = Wrapped("regression").eval()
    other.load_state_dict(net.state_dict())
    truth = score(net, removals_of(net), data, "sequential", **criterion)
    found = score(other, removals_of(net), data,
                  metric=lambda o, t: closeness(o.answer, t),
                  loss=lambda o, t: squares(o.answer, t))  # fmt: skip
    assert found.engine == "sequential"
    assert torch.equal(found.value, truth.value)
    assert torch.equal(found.loss, truth.loss)


def test_targets_that_cross_entropy_does_not_fit() -> None:
    for name in ("several labels", "regression", "tuple"):
        net, data, criterion = task(name)
        with pytest.raises(ValueError, match=r"cross-entropy needs logits .* pass loss="):
            score(net, removals_of(net), data, metric=criterion["metric"])
    net, (x, targets), criterion = task("segmentation")
    with pytest.raises(ValueError, match="target 3 is out of range: the net has 3 classes"):
        score(net, removals_of(net), (x, targets + 1), **criterion)
    with pytest.raises(ValueError, match=r"needs class indices, but the labels are .*\[11, 5\]"):
        score(make("resnet"), torch.tensor([[0]]), (x, torch.randn(11, 5)))


def test_values_that_become_invalid_name_the_hypothesis_and_the_image() -> None:
    net, data, _ = task("segmentation", 9)
    base = net(data[0]).detach()

    @bounded(-100, 100)
    def moved(outputs, targets):  # by more than its bounds for image 6, if a ReLU is removed
        i = next(i for i in range(9) if torch.equal(data[1][i], targets[0]))
        far = (outputs - base[i : i + len(outputs)]).abs().amax((1, 2, 3)) > 1e-3
        late = torch.arange(i, i + len(outputs)) == 6
        return torch.where(far & late, 7e3, 0.5)

    removals = removals_of(net)[-1::-1]
    for engine in ("sequential", "stacked"):
        with pytest.raises(ValueError, match="returns 7000 for image 6 and hypothesis 1; its"):
            score(net, removals[:2], data, Engine(engine, batch_size=3), metric=moved)


# ---------------------------------------------------------------------------------- wrappers


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_wrapped_nets_are_scored_as_the_net_inside(process_group) -> None:
    net, data = thinned(make("resnet")), images(12)
    removals = removals_of(net, 3, 5)
    truth = score(net, removals, data)
    assert truth.engine == "stacked"
    wrappers = (nn.DataParallel(net), DistributedDataParallel(net), torch.compile(net),
                AveragedModel(net), torch.compile(nn.DataParallel(net)))  # fmt: skip
    for wrapped in wrappers:
        found = score(wrapped, removals, data)
        assert found.engine == "stacked", type(wrapped).__name__
        assert torch.equal(found.loss, truth.loss)
        assert choose(wrapped, removals, data, adt=-200.0).value == truth.value.max()
        assert fastbcd.accuracy(wrapped, data) == 100 * truth.base_value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_margins_and_losses_are_those_of_plain_formulas(dtype) -> None:
    """Bit for bit, ties and values that are not finite included."""
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(3, 40, 4, generator=generator).round(decimals=1).to(dtype)
    outputs[:, :4] = 0
    outputs[1, 4:8, :2] = torch.inf
    outputs[2, 8:12, 1] = torch.nan
    targets = torch.arange(40) % 4
    values, losses = fastbcd.scoring.metric.DEFAULT.each(outputs, targets).unbind(1)
    for hypothesis in range(3):
        logits = outputs[hypothesis].double()
        others = logits.clone()
        others[range(40), targets] = -torch.inf
        margin = logits[range(40), targets] - others.amax(1)
        margin[(logits.argmax(1) == targets) & (margin == 0)] = 1e-300
        torch.testing.assert_close(values[hypothesis], margin, rtol=0, atol=0, equal_nan=True)
        loss = F.cross_entropy(logits, targets, reduction="none")
        torch.testing.assert_close(losses[hypothesis], loss, rtol=0, atol=0, equal_nan=True)
    assert (values[:, :4] > 0).any()
    assert (values[:, :4] == 0).any()

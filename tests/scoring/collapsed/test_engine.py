"""score with the collapsed engine: its forms are kept, noticed as stale, and refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastbcd import Engine, MaskedLine, MaskedReLU, MaskSet, bcd, masks, models, score, set_masks
from fastbcd.scoring import plan
from fastbcd.scoring.collapsed import affine_net
from fastbcd.scoring.collapsed import build as building
from fastbcd.scoring.collapsed.affine_net import AffineNet
from fastbcd.scoring.collapsed.form import find
from fastbcd.scoring.compiled import Signature, compiled
from fastbcd.scoring.engine import Request
from fastbcd.scoring.program import make_program
from helpers.affine_nets import engine_of, some_removals, worst_difference, zoo
from helpers.nets import images, make, randomize, thinned


@pytest.mark.parametrize("batch", [None, 5])
def test_scores_equal_those_of_sequential(batch) -> None:
    for net in (thinned(make("resnet")), thinned(zoo())):
        data = images(41)
        ids = list(some_removals(net).values())
        truth = score(net, ids, data, engine="sequential")
        found = score(net, ids, data, Engine("collapsed", batch_size=batch))
        assert found.engine == "collapsed"
        assert found.correct.tolist() == truth.correct.tolist()
        assert torch.allclose(found.loss, truth.loss, atol=1e-5)
        assert found.base_correct == truth.base_correct


@pytest.mark.parametrize("name", ["resnet18", "wide_resnet22_8"])
def test_the_papers_nets(name) -> None:
    """Random weights, few ReLUs: logits within 1e-4 of the net's own."""
    torch.manual_seed(0)
    net = randomize(models.build(name, num_classes=20, image_size=8)).eval()
    now = masks(net)
    kept = MaskSet.full({s.name: s.shape for s in now.sites}).sample(150, seed=0, step=0, trial=0)
    bits = torch.zeros(now.total, dtype=torch.bool)
    bits[kept] = True
    set_masks(net, MaskSet(now.sites, bits))
    x = torch.randn(3, 3, 8, 8)
    assert worst_difference(net, engine_of(net, x), x, some_removals(net, 3, 20), 4) < 1e-4


@pytest.fixture
def builds(monkeypatch) -> list[int]:
    """How many forms were built, by their number of kinks."""
    made: list[int] = []
    plain = building.FormBuilder.build

    def build(self, with_image):
        made.append(len(self.ids))
        return plain(self, with_image)

    monkeypatch.setattr(building.FormBuilder, "build", build)
    return made


def test_a_removal_shrinks_the_form(builds) -> None:
    net, data = thinned(make("resnet")), images(30)
    for step in range(3):
        ids = [masks(net).sample(120, seed=5, step=step, trial=t) for t in range(3)]
        # Other batches each time, so that the affine part is computed again.
        found = score(net, ids, data, Engine("collapsed", batch_size=7 + step))
        truth = score(net, ids, data, engine="sequential")
        assert found.correct.tolist() == truth.correct.tolist()
        assert torch.allclose(found.loss, truth.loss, atol=1e-5)
        set_masks(net, masks(net).without(ids[1]))
    assert len(builds) == 1
    now = masks(net).copy()
    small, fresh = (
        compiled(net).form_of(Signature(make_program(net, data[0][:1])), now),
        engine_of(net, data[0]).form,
    )
    assert small is not None
    # The order of kinks follows the tiles of what was there at first; their values do not.
    place = find(small.ids, fresh.ids)
    assert torch.equal(small.ids[place], fresh.ids)
    # Those of the logits.
    assert torch.allclose(small.responses[-1][:, place], fresh.responses[-1], atol=1e-6)
    sizes = [[matrix.numel() for matrix in form.responses] for form in (small, fresh)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("change", ["data", "step", "load", "statistics", "masks"])
def test_changes_are_noticed(builds, change) -> None:
    net, data = thinned(make("resnet")), images(30)
    ids = [masks(net).sample(9, seed=5, step=0, trial=t) for t in range(3)]
    before = score(net, ids, data, engine="collapsed")
    conv = next(m for m in net.modules() if isinstance(m, nn.Conv2d))
    if change == "data":
        conv.weight.data[0] *= 1.5
    elif change == "step":
        conv.weight.grad = torch.ones_like(conv.weight)
        torch.optim.SGD([conv.weight], 0.1).step()
    elif change == "load":
        state = net.state_dict()
        net.load_state_dict({k: v * 1.1 if v.is_floating_point() else v for k, v in state.items()})
    elif change == "statistics":
        next(m for m in net.modules() if isinstance(m, nn.BatchNorm2d)).running_var.mul_(3)
    else:  # a ReLU is kept again
        bits = masks(net).bits.clone()
        bits[(~bits).nonzero()[0]] = True
        set_masks(net, MaskSet(masks(net).sites, bits))
    found = score(net, ids, data, engine="collapsed")
    truth = score(net, ids, data, engine="sequential")
    assert len(builds) == 2
    assert torch.allclose(found.loss, truth.loss, atol=1e-5)
    assert not torch.equal(found.loss, before.loss)


class ReadsMore(nn.Module):
    """Computes with a buffer that is not saved, and with a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.act, self.head = MaskedReLU((4, 8, 8)), nn.Linear(4, 5)
        self.last = nn.BatchNorm1d(5)  # neither a convolution before it nor an activation after it
        self.register_buffer("gain", torch.rand(4, 1, 1), persistent=False)
        self.factor = 1.0

    def forward(self, x):
        y = self.act(self.norm(self.first(x)) * self.gain)
        return self.last(self.head(y.mean((2, 3)) * self.factor))


@pytest.mark.parametrize("change", ["buffer", "eps", "statistics", "attribute", "padding"])
def test_changes_outside_the_state_dict_are_noticed(builds, change) -> None:
    torch.manual_seed(0)
    net, data = thinned(randomize(ReadsMore()).eval()), images(30)
    ids = [masks(net).sample(9, seed=5, step=0, trial=t) for t in range(3)]
    before = score(net, ids, data, engine="collapsed")
    if change == "buffer":
        net.gain.mul_(3)
    elif change == "eps":
        net.norm.eps = 2.0
    elif change == "statistics":
        net.last.running_var.mul_(3)
    elif change == "attribute":
        net.factor = 2.5
    else:
        net.first.dilation, net.first.padding = (2, 2), (2, 2)
    found = score(net, ids, data, engine="collapsed")
    truth = score(net, ids, data, engine="sequential")
    assert len(builds) == 2
    assert torch.allclose(found.loss, truth.loss, atol=1e-5)
    assert not torch.equal(found.loss, before.loss)


def test_what_is_cached_is_checked(monkeypatch) -> None:
    """A form that no longer belongs to the net is refused."""
    net, data = thinned(make("resnet")), images(30)
    ids = [masks(net).sample(9, seed=5, step=0, trial=0)]
    score(net, ids, data, engine="collapsed")
    monkeypatch.setattr(Signature, "equals", lambda *_: True)
    hook = net.register_forward_hook(lambda module, args, outputs: 2 * outputs)
    with pytest.raises(ValueError, match="from those of its collapsed form"):
        score(net, ids, data, engine="collapsed")
    hook.remove()
    assert score(net, ids, data, engine="collapsed").engine == "collapsed"  # it was built again


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act = nn.Conv2d(3, 6, 3, padding=1), MaskedReLU((6, 8, 8))
        self.branch, self.last = nn.Conv2d(3, 3, 3, padding=1), MaskedReLU((3, 8, 8))
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        kept, changed = self.act(self.first(x)).chunk(2, dim=1)
        y = torch.cat([kept, self.last(self.branch(changed))], 1)
        return self.head(y.mean((2, 3)))


def test_tuples_are_followed() -> None:
    torch.manual_seed(0)
    net = thinned(Halves().double().eval(), 0.05)
    x = images(7)[0].double()
    assert worst_difference(net, engine_of(net, x), x, some_removals(net, 3, 3), 4) < 1e-12


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rule_that_loses_a_path_is_noticed(monkeypatch, lost) -> None:
    """However small its effect on the logits is: impulses are compared at every site."""

    def loses(program):
        parts = plain(program)
        node = next(node for node in parts if node.target == "chunk")
        chunk = parts[node]

        def less(values, n):
            halves = list(chunk(values, n))
            halves[lost] = 0 * halves[lost]
            return halves

        return parts | {node: less}

    plain = affine_net.linear_parts
    monkeypatch.setattr(affine_net, "linear_parts", loses)
    net = thinned(Halves().eval(), 0.05)
    net.head.weight.data[:, :3] *= 1e-5  # the logits hardly depend on the first half
    with pytest.raises(ValueError, match=r"node 'getitem.* is not an affine function"):
        score(net, [masks(net).sample(2, seed=0, step=0, trial=0)], images(9), engine="collapsed")


def count_images(monkeypatch) -> list[int]:
    """How many images went through the affine net in each call."""
    calls: list[int] = []
    plain = AffineNet.values_at

    def values_at(self, places, bounds, x):
        calls.append(len(x))
        return plain(self, places, bounds, x)

    monkeypatch.setattr(AffineNet, "values_at", values_at)
    return calls


def test_the_affine_part_is_computed_once(monkeypatch) -> None:
    net, (x, labels) = thinned(make("resnet")), images(50)
    ids = list(some_removals(net).values())
    calls = count_images(monkeypatch)
    first = score(net, ids, (x, labels), Engine("collapsed", batch_size=20))
    spent = len(calls)
    again = score(net, ids, (x, labels), Engine("collapsed", batch_size=20))
    assert len(calls) == spent
    assert torch.equal(first.loss, again.loss)
    other = score(net, ids, (x + 1, labels), Engine("collapsed", batch_size=20))
    truth = score(net, ids, (x + 1, labels), engine="sequential")
    assert torch.allclose(other.loss, truth.loss, atol=1e-5)
    assert len(calls) > spent + 2


def test_a_batch_is_found_by_its_number(monkeypatch) -> None:
    """One comparison for each batch, and images that changed later on are noticed."""
    net, (x, labels) = thinned(make("resnet"), 0.1), images(50)
    ids = list(some_removals(net, 2).values())
    engine, compared, plain = Engine("collapsed", batch_size=5), [], torch.equal
    score(net, ids, (x, labels), engine)
    monkeypatch.setattr(torch, "equal", lambda a, b: compared.append(a.shape) or plain(a, b))
    score(net, ids, (x, labels), engine)
    assert compared.count(x[:5].shape) == 10
    x[30] += 1
    found = score(net, ids, (x, labels), engine)
    truth = score(net, ids, (x, labels), engine="sequential")
    assert torch.allclose(found.loss, truth.loss, atol=1e-5)


def test_images_are_found_in_any_order(monkeypatch) -> None:
    """Each image goes through the affine net once, whichever batches it comes in."""
    net, (x, _) = thinned(make("resnet"), 0.1), images(40)
    calls = count_images(monkeypatch)
    request = Request(net.eval(), masks(net).copy(), [], 1, 40, x[:2], None, 2**30)
    with torch.inference_mode():
        engine = plan.make_plan(request, "collapsed").engine
        truth = engine.affine_part(x, None)
        calls.clear()
        for seed, count, new in ((0, 20, 20), (1, 20, None), (2, 40, None), (3, 40, 0), (3, 7, 0)):
            some = torch.randperm(40, generator=torch.Generator().manual_seed(seed))[:count]
            before = sum(calls)
            found = torch.cat(
                [engine.affine_part(x[part], part) for part in some.split(8)], 1
            )  # fmt: skip
            torch.testing.assert_close(found, truth[:, some])
            assert new is None or sum(calls) - before == new
        assert sum(calls) == 40
        engine.cache.begin(x[:2], 2**30)  # another call
        other = torch.cat([x[:30], x[30:] + 1])
        found, expected = (engine.affine_part(other, n) for n in (torch.arange(40), None))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("when", ["every_step", "on_reject"])
def test_the_form_is_released_before_training(builds, when) -> None:
    """Its memory and that of its values; without training the form is kept."""
    net, data = thinned(make("resnet"), 0.1), images(30)
    held, kept = [], masks(net).count()
    options = {
        "finetune": lambda net, step: held.append(compiled(net).form is not None),
        "adt": 1000.0,
    }
    engine = Engine("collapsed", batch_size=10)
    bcd(net, data, kept - 9, drc=3, rt=1, finetune_when=when, engine=engine, **options)
    assert held == ([False] * 3 if when == "every_step" else [])
    assert len(builds) == (3 if when == "every_step" else 1)
    assert (compiled(net).form is not None) == (when == "on_reject")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dense", "max_pool2d"),
        ("poly", "are quadratics"),
        ("mixture", "removed ReLUs of site 'act' are quadratics"),
    ],
)
def test_what_stops_it_is_named(name, words) -> None:
    net, data = make(name), images(10)
    with pytest.raises(ValueError, match=words):
        score(net, torch.tensor([[0]]), data, engine="collapsed")
    assert score(net, torch.tensor([[0]]), data, engine="auto").engine == "stacked"


@pytest.mark.parametrize(
    "function",
    [
        torch.softmax,
        torch.sigmoid,
        lambda y, _: y * y,
        lambda y, _: 1 / y,
        lambda y, _: y.abs(),
        lambda y, _: torch.where(y > 1, y, -y),
        lambda y, _: y.clamp(max=5000.0),
    ],
)
def test_nonlinear_steps_are_refused(function) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.act, self.head = nn.Linear(192, 9), MaskedReLU(9), nn.Linear(9, 5)

        def forward(self, x):
            y = self.act(self.first(x.flatten(1)))
            return self.head(function(y, 1) if function is torch.softmax else odd(y))

    def odd(y):
        return torch.sigmoid(y) if function is torch.sigmoid else function(y, 1)

    words = "is not an affine function of the image|its linear part cannot be computed"
    with pytest.raises(ValueError, match=words):
        score(Odd().eval(), torch.tensor([[0]]), images(10), engine="collapsed")


def test_the_memory_of_a_form_is_known_to_the_byte(builds) -> None:
    """It is built in `peak_bytes` and kept in `form_bytes`; one byte less is refused."""
    net, x = thinned(make("resnet"), 0.2), images(2)[0]
    removals = [masks(net).sample(3, seed=0, step=0, trial=0)]

    def planner(memory: int) -> plan.CollapsedPlanner:
        request = Request(net, masks(net).copy(), removals, 4, 40, x, None, memory)
        return plan.CollapsedPlanner(request, make_program(net, x[:1]))

    with torch.inference_mode():
        peak = planner(2**40).peak
        with pytest.raises(ValueError, match="while it is built"):
            planner(peak - 1).plan("asked for", {})
        assert not builds
        made = planner(peak).plan("asked for", {})
        form = made.engine.form
        held = sum(matrix.nbytes for matrix in form.responses)
        assert made.bytes == (made.lanes + 2) * made.batch * form.kinks * 4
        with pytest.raises(ValueError, match="while it is built"):
            planner(held - 1).plan("asked for", {})
        assert planner(held).plan("asked for", {}).engine.form is form


def test_images_that_are_known_are_not_estimated_again() -> None:
    net, (x, labels) = thinned(make("resnet"), 0.1), images(50)
    ids = list(some_removals(net, 2).values())

    def estimate() -> int:
        request = Request(net, masks(net).copy(), ids, 2, 50, x[:2], None, 2**40)
        with torch.inference_mode():
            return plan.CollapsedPlanner(request, make_program(net, x[:1])).affine

    assert estimate() > 0
    score(net, ids, (x, labels), engine="collapsed")
    assert estimate() == 0


def test_too_little_memory_is_refused_before_any_work(builds) -> None:
    net, data = make("resnet"), images(10)
    with pytest.raises(ValueError, match=r"form of 1,024 ReLUs takes .* MiB.*memory=.*stacked"):
        score(net, torch.tensor([[0]]), data, Engine("collapsed", memory=2**24))
    assert not builds


def test_auto_takes_what_costs_less(monkeypatch, capsys) -> None:
    monkeypatch.setattr(plan, "WORTH", 0)
    net, data = make("resnet"), images(400)
    ids = [masks(net).sample(5, seed=0, step=0, trial=t) for t in range(30)]
    assert score(net, ids, data, explain=True).engine == "stacked"
    net = thinned(net, 0.05)
    ids = [masks(net).sample(5, seed=0, step=0, trial=t) for t in range(30)]
    found = score(net, ids, data, explain=True)
    assert found.engine == "collapsed"
    assert f"{masks(net).count()} kinks" in capsys.readouterr().out
    truth = score(net, ids, data, engine="sequential")
    assert found.correct.tolist() == truth.correct.tolist()


def test_no_relus_left() -> None:
    net, data = make("resnet"), images(10)
    set_masks(net, masks(net).without(masks(net).bits.nonzero().flatten()))
    empty = [torch.empty(0, dtype=torch.int64)]
    found = score(net, empty, data, engine="collapsed")
    assert found.correct.tolist() == [found.base_correct]
    assert found.base_loss == pytest.approx(
        score(net, empty, data, engine="sequential").base_loss, abs=1e-6
    )


def test_a_kept_form_follows_the_lines() -> None:
    """Fewer ReLUs keep the form; other coefficients do not."""
    net, data = thinned(make("line"), 0.3), images(30)
    for change in (None, "removal", "line"):
        if change == "removal":
            gone = masks(net).sample(9, seed=5, step=0, trial=0)
            set_masks(net, masks(net).without(gone))
        if change == "line":
            with torch.no_grad():
                next(m for m in net.modules() if isinstance(m, MaskedLine)).coef += 0.1
        removals = torch.stack([masks(net).sample(7, seed=1, step=2, trial=t)
                                for t in range(5)])  # fmt: skip
        found, truth = (score(net, removals, data, e) for e in ("collapsed", "sequential"))
        assert found.correct.tolist() == truth.correct.tolist()
        torch.testing.assert_close(found.loss, truth.loss, atol=1e-5, rtol=0)
        assert abs(found.base_loss - truth.base_loss) < 1e-5


class HardlySeen(nn.Module):
    """A part whose effect on the logits is below what their comparison can see."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.head = nn.Linear(192, 9), MaskedReLU(9), nn.Linear(9, 5)
        self.part = nn.Identity()

    def forward(self, x):
        y = self.act(self.first(x.flatten(1)))
        return self.head(y) + 1e-7 * self.part(y)[:, :5]


def test_every_structure_of_a_net_is_checked() -> None:
    torch.manual_seed(0)
    net, data, ids = HardlySeen().eval(), images(10), torch.tensor([[0]])
    for part in (nn.Identity(), nn.Tanh(), nn.Identity(), nn.Softsign()):
        net.part = part
        if isinstance(part, nn.Identity):
            assert score(net, ids, data, engine="collapsed").engine == "collapsed"
            continue
        for _ in range(2):  # a refusal is remembered
            with pytest.raises(ValueError, match=type(part).__name__):
                score(net, ids, data, engine="collapsed")

"""score: all engines, chunks and batch sizes give the numbers of the naive loop."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fastbcd
from fastbcd import Engine, ImageData, score
from fastbcd.data.for_net import data_for
from fastbcd.runtime import warn_once
from fastbcd.scoring import answers
from fastbcd.scoring.answers import prepared
from fastbcd.scoring.engine import Request
from fastbcd.scoring.plan import make_plan
from fastbcd.scoring.program import make_program
from fastbcd.scoring.stacked import Stacked, first_change, peak_bytes, portions
from helpers.nets import TRACEABLE, Block, images, make, randomize, thinned


def naive(net, removals, x, labels):
    """One hypothesis at a time, one image at a time: what the numbers mean."""
    masks = fastbcd.masks(net)
    before = fastbcd.MaskSet(masks.sites, masks.bits)
    rows = []
    with torch.no_grad():
        for ids in [torch.empty(0, dtype=torch.int64), *removals]:
            fastbcd.set_masks(net, before.without(ids))
            logits = torch.cat([net(image) for image in x.split(1)])
            margin = logits.topk(2, 1).values.diff(dim=1).abs().squeeze(1)
            loss = F.cross_entropy(logits.double(), labels).item()
            rows.append((int((logits.argmax(1) == labels).sum()), loss, int((margin < 1e-4).sum())))
    fastbcd.set_masks(net, before)
    return rows


def assert_same(found, rows) -> None:
    """Equal counts, except for images whose two best logits tie within rounding; loss to 1e-5."""
    base, *rest = rows
    assert abs(found.base_correct - base[0]) <= base[2]
    assert found.base_loss == pytest.approx(base[1], abs=1e-5)
    assert found.correct.dtype == torch.int64
    assert found.loss.dtype == torch.float64
    for correct, loss, (truth, true_loss, ties) in zip(
        found.correct.tolist(), found.loss.tolist(), rest, strict=True
    ):
        assert abs(correct - truth) <= ties
        assert loss == pytest.approx(true_loss, abs=1e-5)


def hypotheses(net, count: int, size: int, step: int = 0) -> list[torch.Tensor]:
    masks = fastbcd.masks(net)
    return [masks.sample(size, seed=1, step=step, trial=t) for t in range(count)]


@pytest.mark.parametrize("engine", ["sequential", "stacked", "auto"])
@pytest.mark.parametrize("name", TRACEABLE)
def test_engines_equal_the_naive_loop(name, engine) -> None:
    net, (x, labels) = thinned(make(name)), images(23)
    removals = hypotheses(net, 6, 9)
    rows = naive(net, removals, x, labels)
    assert len({r[1] for r in rows}) == 7, "the hypotheses differ, so a mix-up would show"
    for batch_size in (None, 5, 64):
        found = score(net, removals, (x, labels), Engine(engine, batch_size=batch_size))
        assert_same(found, rows)
        assert found.samples == 23
        assert found.engine == ("sequential" if engine == "sequential" else "stacked")


@given(
    name=st.sampled_from(TRACEABLE), sizes=st.lists(st.integers(0, 30), max_size=7),
    n=st.integers(1, 9), batch=st.integers(1, 10), lanes=st.integers(1, 5), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_any_removals_and_any_cut(name, sizes, n, batch, lanes, seed) -> None:
    """Mixed lengths, empty removals, K = 0, single sites, any chunk of images and lanes."""
    net, (x, labels) = thinned(make(name)), images(n, seed)
    masks = fastbcd.masks(net)
    removals = [masks.sample(k, seed=seed, step=0, trial=t) for t, k in enumerate(sizes)]
    # Some hypotheses stay inside one late site, so that they share a prefix.
    last = masks.sites[-1]
    kept = masks.bits[last.start :].nonzero().flatten() + last.start
    removals = [r if i % 3 else kept[: len(r) % 4] for i, r in enumerate(removals)]
    rows = naive(net, removals, x, labels)
    engine_memory = lanes * batch * 60_000
    engine = Engine("stacked", batch_size=batch, memory=engine_memory)
    found = score(net, removals, (x, labels), engine)
    assert_same(found, rows)


def test_prefix_is_shared_until_the_first_change() -> None:
    """Hypotheses that change the last site alone run nothing before it."""
    net, x = make("resnet"), images(4)[0]
    masks = fastbcd.masks(net)
    calls: list[int] = []
    with torch.inference_mode():
        engine = Stacked(make_program(net, x[:1]), masks.copy())
    late = {k: torch.tensor([masks.sites[-1].start + k]) for k in range(3)}
    early = {k: torch.tensor([k]) for k in range(3)}
    conv = F.conv2d
    for removals, extra in ((late, 0), (early, 5)):  # every convolution but the first
        calls.clear()
        work = engine.prepare(removals, 3)
        with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
            patch.setattr(F, "conv2d", lambda i, *a: calls.append(len(i)) or conv(i, *a))
            list(engine.logits(x, work, base=True))
        assert sum(n == 12 for n in calls) == extra
    assert [first_change(masks, r) for r in (late[0], early[0], torch.empty(0))] == [4, 0, 5]


def test_batch_norm_and_residual_are_fused() -> None:
    net = make("resnet")
    with torch.inference_mode():
        engine = Stacked(make_program(net, images(1)[0]), fastbcd.masks(net).copy())
    names = [str(s.node.target) for s in engine.program.steps]
    assert not any("bn" in n for n in names if not n.endswith("bn2")), names
    fused = [s for s in engine.program.steps if hasattr(s, "site")]
    assert [s.scale is not None for s in fused] == [True] * 5
    assert [s.residual is not None for s in fused] == [False, False, True, False, True]


def test_base_masks_and_mode_are_restored() -> None:
    for engine in ("sequential", "stacked"):
        net, (x, labels) = thinned(make("resnet")), images(6)
        net.train()
        net.get_submodule("3").eval()
        modes = [m.training for m in net.modules()]
        bits = fastbcd.masks(net).bits
        statistics = [b.clone() for b in net.buffers()]
        score(net, hypotheses(net, 2, 5), (x, labels), engine=engine)
        assert [m.training for m in net.modules()] == modes
        assert torch.equal(fastbcd.masks(net).bits, bits)
        assert all(torch.equal(a, b) for a, b in zip(statistics, net.buffers(), strict=True))


def test_edges() -> None:
    net, (x, labels) = make("resnet"), images(1)
    for engine in ("sequential", "stacked"):
        none = score(net, torch.empty(0, 5, dtype=torch.int64), (x, labels), engine=engine)
        assert none.correct.shape == none.loss.shape == none.drop.shape == (0,)
        empty = score(net, torch.empty(3, 0, dtype=torch.int64), (x, labels), engine=engine)
        assert empty.correct.tolist() == [empty.base_correct] * 3
        assert empty.loss.tolist() == [empty.base_loss] * 3
        assert empty.drop.tolist() == [0.0] * 3


def test_kinds_of_data_give_the_same_scores() -> None:
    net = thinned(make("resnet"))
    pixels = torch.randint(256, (11, 3, 8, 8), dtype=torch.uint8)
    labels = torch.arange(11) % 5
    data = ImageData.from_arrays(pixels, labels, mean=(0.5,) * 3, std=(0.2,) * 3)
    removals = hypotheses(net, 3, 4)
    truth = score(net, removals, data)
    floats = (pixels.float() / 255 - 0.5) / 0.2
    pair = TensorDataset(floats, labels)
    for other in ((floats, labels), pair, DataLoader(pair, batch_size=4, shuffle=True)):
        found = score(net, removals, other)
        assert torch.equal(found.correct, truth.correct)
        torch.testing.assert_close(found.loss, truth.loss, rtol=0, atol=1e-5)


@pytest.mark.parametrize("engine", ["sequential", "stacked", "collapsed"])
@pytest.mark.parametrize("sizes", [(), (16,), (4, 4, 4)])
def test_inputs_of_any_rank(sizes, engine) -> None:
    """Feature vectors, signals and volumes, as well as images."""
    torch.manual_seed(0)
    kinds: dict = {1: (nn.Conv1d, nn.BatchNorm1d), 3: (nn.Conv3d, nn.BatchNorm3d)}
    conv, norm = kinds.get(len(sizes), (lambda a, b, *_: nn.Linear(a, b), nn.BatchNorm1d))
    model = nn.Sequential(conv(3, 4, 3, 1, 1), norm(4), nn.ReLU(), conv(4, 4, 3, 1, 1), nn.ReLU(),
                          nn.Flatten(), nn.LazyLinear(5))  # fmt: skip
    x, labels = torch.randn(9, 3, *sizes), torch.arange(9) % 5
    model(x)
    net = thinned(fastbcd.convert(model.eval(), x[:1]))
    removals = hypotheses(net, 3, 2)
    assert_same(score(net, removals, (x, labels), engine), naive(net, removals, x, labels))


def test_untraceable_nets_score_sequentially_and_say_so_once(monkeypatch) -> None:
    monkeypatch.setattr(warn_once, "_issued", set())
    net, (x, labels) = make("untraceable"), images(7)
    removals = hypotheses(net, 3, 4)
    rows = naive(net, removals, x, labels)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [score(net, removals, (x, labels)) for _ in range(2)]
    assert [f.engine for f in found] == ["sequential"] * 2
    assert_same(found[0], rows)
    said = [str(w.message) for w in caught if "one hypothesis at a time" in str(w.message)]
    assert len(said) == 1
    assert "cannot trace" in said[0]
    with pytest.raises(ValueError, match="engine='stacked' cannot score Untraceable"):
        score(net, removals, (x, labels), engine="stacked")


class MixesTheBatch(nn.Module):
    """Subtracts the batch's mean: an image's logits depend on its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(192, 9), fastbcd.MaskedReLU(9))

    def forward(self, x):
        y = self.net(x)
        return y - y.mean(0)


def test_a_net_that_mixes_the_batch_is_not_stacked() -> None:
    net, (x, labels) = MixesTheBatch(), images(6)
    with pytest.raises(ValueError, match="depend on the rest of the batch"):
        score(net, hypotheses(net, 2, 2), (x, labels), engine="stacked")


class WritesIntoAView(nn.Module):
    """Changes its features through a view of them, which torch.fx does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(3, 2, 3), fastbcd.MaskedReLU((2, 6, 6))

    def forward(self, x):
        y = self.conv(x)
        y.diagonal(0, 2, 3).add_(1.0)
        return self.act(y).flatten(1)


def test_a_net_that_writes_into_a_view_is_not_stacked() -> None:
    net, (x, labels) = WritesIntoAView(), images(6)
    with pytest.raises(ValueError, match="gives other logits than as a module"):
        score(net, hypotheses(net, 2, 2), (x, labels), engine="stacked")


def test_explain_prints_the_plan(capsys) -> None:
    net, (x, labels) = make("resnet"), images(9)
    late = torch.tensor([[fastbcd.masks(net).sites[-1].start]])
    score(net, late, (x, labels), explain=True)
    out = capsys.readouterr().out
    for word in ("stacked", "multiply-adds", "saved by shared prefixes", "images x", "MiB"):
        assert word in out
    share = float(out.split("prefix")[1].split("%")[0])
    assert 40 < share < 50, "half of (base + one hypothesis), less the head"


def test_portions_follow_cache_and_memory() -> None:
    net = make("mlp")

    def cut(per_image, largest, hypotheses, batch_size, memory, work=1e9):
        masks, x = fastbcd.masks(net), images(2)[0]
        request = Request(net, masks, [], hypotheses, 1000, x, batch_size, memory)
        return portions(request, per_image, largest, work)

    batch, lanes = cut(2**20, 2**18, 50, None, 2**40)
    assert batch * lanes >= 1
    small = cut(2**20, 2**18, 50, None, 2**22)
    assert small[0] * small[1] <= 4
    assert cut(2**20, 2**18, 50, 16, 2**22) == (16, 1)
    assert cut(10, 10, 3, 4, 2**40) == (4, 3)
    assert cut(10, 2**40, 3, None, 2**40) == (32, 1)
    assert cut(10, 2**40, 3, None, 2**40, work=1e4) == (128, 2)  # steps that are mostly calls
    assert cut(10, 2**40, 3, None, 500, work=1e4) == (50, 1)


def program_of(net: nn.Module):
    with torch.inference_mode():
        return make_program(net, images(1)[0])


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        # The image and its flattened view; a copy of 30 neurons.
        ("mlp", 2 * 192 + 30),
        # Three values of 4×8×8 in the first block; a copy of one.
        ("resnet", 3 * 256 + 256),
    ],
)
def test_peak_bytes_are_exact(name, numbers) -> None:
    """Counted by hand: what is alive at the worst step, and the largest activation once more."""
    assert peak_bytes(program_of(make(name))) == 4 * numbers


def test_a_plan_of_stacked_takes_the_memory_that_is_allowed(capsys) -> None:
    """Twice the lanes from twice the memory; the plan states the bytes of lanes and base."""
    net = make("resnet")
    each, masks = peak_bytes(program_of(net)), fastbcd.masks(net).copy()
    for lanes in (1, 3, 6):
        memory = 5 * each * (lanes + 1) - 1
        request = Request(net, masks, hypotheses(net, 8, 3), 8, 1000, images(2)[0], 5, memory)
        with torch.inference_mode():
            plan = make_plan(request, "stacked")
        assert (plan.batch, plan.lanes) == (5, lanes)
        assert plan.bytes == 5 * each * (1 + lanes)


def plan_of(net, removals, data, engine: Engine):
    with prepared(net, dict(enumerate(removals)), data_for(net, data), engine) as asked:
        return asked.plan


def test_a_kept_form_leaves_the_rest_of_the_memory_to_its_values() -> None:
    """From the exact bytes of the form on; a quarter of the rest is for rows of kinks."""
    net, data = thinned(make("resnet")), images(40)
    removals = hypotheses(net, 8, 9)
    form = plan_of(net, removals, data, Engine("collapsed")).engine.form
    tensors = [*form.responses, form.image]
    held = sum(t.nbytes for t in tensors if t is not None)
    rows = 4 * form.kinks * 4
    cuts = (
        (0, None, (1, 1)), (20 * rows - 1, None, (19, 1)), (20 * rows, None, (20, 1)),
        (20 * rows, 5, (5, 4)), (100 * rows, 5, (5, 8)), (100 * rows, None, (40, 2)),
    )  # fmt: skip
    for extra, batch_size, cut in cuts:
        engine = Engine("collapsed", memory=held + extra, batch_size=batch_size)
        plan = plan_of(net, removals, data, engine)
        assert (plan.batch, plan.lanes) == cut
        assert plan.bytes == (cut[1] + 2) * cut[0] * form.kinks * 4
    with pytest.raises(ValueError, match="while it is built"):
        plan_of(net, removals, data, Engine("collapsed", memory=held - 1))


@pytest.mark.parametrize("engine", ["stacked", "collapsed"])
def test_ranks_plan_by_the_memory_of_the_first(monkeypatch, engine) -> None:
    net, data = thinned(make("resnet")), images(40)
    removals = hypotheses(net, 8, 9)
    little = plan_of(net, removals, data, Engine(engine, memory=10**8))
    monkeypatch.setattr(answers, "from_first", lambda mine: torch.full_like(mine, 10**8))
    for memory in (None, 10**9, 2**70):  # of another rank
        plan = plan_of(net, removals, data, Engine(engine, memory=memory))
        assert plan.request.memory == 10**8
        assert (plan.batch, plan.lanes) == (little.batch, little.lanes)


def test_in_place_modules_do_not_disturb_later_lanes() -> None:
    """A skipped in-place ReLU overwrites a value that lanes read later."""
    torch.manual_seed(0)
    model = randomize(nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), Block(4, 8, 2), Block(8, 8, 1),
                                    nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                                    nn.Linear(8, 5))).eval()  # fmt: skip
    x, labels = images(5)
    net = fastbcd.convert(model, x, skip=["3"])
    removals = hypotheses(net, 4, 6)
    assert_same(
        score(net, removals, (x, labels), engine="stacked"), naive(net, removals, x, labels)
    )


# ------------------------------------------------------------------------------ bad input


def bad_call(**changes):
    net, (x, labels) = make("resnet"), images(4)
    arguments = {"net": net, "removals": torch.tensor([[0, 1]]), "data": (x, labels), **changes}
    return score(**arguments)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"engine": "fast"}, ValueError, r"engine='fast'; choose from auto, sequential, stacked"),
        ({"removals": torch.tensor([0, 1])}, ValueError, r"expected \[K, D\]"),
        ({"removals": [torch.tensor(3)]}, ValueError, r"hypothesis 0 has shape \(\); expected"),
        ({"removals": torch.tensor([[1, 9999]])}, IndexError, r"hypothesis 0: id 9999 is out"),
        ({"removals": torch.tensor([[1, 2], [3, 3]])}, ValueError, r"hypothesis 1 .* twice"),
        ({"data": (torch.randn(2, 3, 8, 8), torch.tensor([0, 7]))}, ValueError,
         "label 7 of image 1"),
        ({"data": (torch.randn(2, 3, 6, 6), torch.tensor([0, 1]))}, ValueError,
         r"(do not fit the masks|mask has shape).*\(4, 8, 8\)"),
        ({"data": (torch.randn(0, 3, 8, 8), torch.empty(0).long())}, ValueError, "no images"),
    ],
)  # fmt: skip
def test_bad_input(changes, error, words) -> None:
    with pytest.raises(error, match=words):
        bad_call(**changes)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"name": "fast"}, ValueError, r"engine='fast'; choose from auto, sequential, stacked"),
        ({"batch_size": 0}, ValueError, "batch_size=0"),
        ({"batch_size": 2.5}, TypeError, "batch_size=2.5"),
        ({"memory": -1}, ValueError, "memory=-1"),
        ({"wave": 0}, ValueError, "wave=0"),
        ({"wave": None}, TypeError, "wave=None"),
        ({"precision": "fp8"}, ValueError, "precision='fp8'; choose from float32, mixed"),
    ],
)
def test_bad_engines(options, error, words) -> None:
    with pytest.raises(error, match=words):
        Engine(**options)


def test_any_amount_of_memory_may_be_allowed() -> None:
    net, data = make("mlp"), images(4)
    assert score(net, torch.tensor([[0]]), data, Engine(memory=10**30)).samples == 4


def test_ids_that_are_gone_are_refused() -> None:
    net, (x, labels) = make("resnet"), images(4)
    fastbcd.set_masks(net, fastbcd.masks(net).without([5]))
    with pytest.raises(ValueError, match=r"hypothesis 1: id 5 .* is not kept"):
        score(net, torch.tensor([[1], [5]]), (x, labels))


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_nan_logits_name_the_hypothesis_and_the_image(engine) -> None:
    """NaN that only one hypothesis lets through, and only for one image."""
    net, (x, labels) = make("mlp"), images(10)
    with torch.no_grad():
        weight = net.get_parameter("1.weight")
        weight[3].zero_()
        net.get_parameter("1.bias")[3] = -1
        weight[3, 0] = -1e38
    x = x.clone().clamp(-3, 3)
    x[:, 0, 0, 0] = 0
    x[7, 0, 0, 0] = 1000.0  # -1e41: -inf at neuron 3, which its ReLU hides
    net.train()
    bits = fastbcd.masks(net).bits
    with pytest.raises(FloatingPointError, match=r"hypothesis 1 gives NaN logits for image 7"):
        score(net, torch.tensor([[1], [3]]), (x, labels), Engine(engine, batch_size=3))
    assert net.training
    assert torch.equal(fastbcd.masks(net).bits, bits)


def test_a_net_without_weights_is_refused() -> None:
    net = make("mlp").to("meta")
    with pytest.raises(ValueError, match="is on the meta device, so it has no weights"):
        score(net, torch.empty(0, 1, dtype=torch.int64), images(3))


def test_a_net_that_returns_no_logits_is_refused() -> None:
    net = nn.Sequential(nn.Conv2d(3, 2, 3), fastbcd.MaskedReLU((2, 6, 6)))
    with pytest.raises(ValueError, match=r"must return logits \[B, classes\]"):
        score(net, torch.empty(0, 1, dtype=torch.int64), images(3))

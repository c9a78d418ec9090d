"""What the starting points share: exact budgets, records, resuming in any phase, bad input."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastbcd
from fastbcd import Finetune, MaskedReLU
from fastbcd.cli import main as cli
from fastbcd.descent.budget import limits_of
from fastbcd.descent.goals import to_return
from fastbcd.training.finetuner import Finetuner
from fastbcd.training.loop import Session
from helpers.nets import make, thinned
from helpers.start_cases import (
    KIND,
    METHODS,
    NONE,
    Other,
    data,
    same,
    start,
    state,
    stopped_at,
    write_images,
)

pytestmark = pytest.mark.filterwarnings("ignore:after . epochs .*more than the budget")
each_method = pytest.mark.parametrize("method", METHODS)

# ---------------------------------------------------------------------------------- results


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        *((method, kind) for method in METHODS for kind in ("resnet", "mlp")),
        *((method, "sizes") for method in METHODS if method != "senet"),
    ],
)
def test_exact_budgets_of_relus_that_were_kept(method, kind) -> None:
    """The forward of `sizes` has views, which refuse weights in channels_last memory."""
    net = thinned(make(kind))
    before = fastbcd.masks(net).copy()
    for budget in {0, before.count() // 3, before.count()}:
        found = start(method, copy.deepcopy(net), budget, test=data(8), finetune=NONE)
        assert found.masks.count() == fastbcd.masks(found.model).count() == budget
        assert not (found.masks.bits & ~before.bits).any()


@each_method
def test_records(method) -> None:
    net = make(KIND[method])
    before = fastbcd.masks(net).count()
    found = start(method, net, 120, test=data(8), seed=2**63 - 1)
    assert found.model is net
    assert not net.training
    assert all(p.is_contiguous() for p in net.parameters())
    assert set(found.accuracy) == {"trained", "thresholded", "final"}
    assert "120 ReLUs after" in repr(found)
    assert "on the test set" in repr(found)
    counts = [before, *(record.count for record in found.history)]
    for number, record in enumerate(found.history):
        assert (record.number, record.epoch, record.phase) == (number + 1, number, "masks")
        assert record.notes["decrease"] == counts[number] - counts[number + 1]
        assert ("iou" in record.notes) == (number > 0)
        assert 0 <= record.notes.get("iou", 0) <= 1
        assert 0 <= record.test_accuracy <= 100
    assert [record.phase for record in found.finetune] == ["finetune"]


@each_method
def test_a_cost_is_a_budget(method) -> None:
    """Also one with rounds for one of the two sites only; squares have rounds too."""
    net = thinned(make("mlp"))
    before = fastbcd.masks(net).copy()
    for most in ({"bytes": 464 * 12 + 1}, {"rounds": 9})[: 1 + (method != "autorep")]:
        target = fastbcd.private.Target(**most, protocol="crypten", activations_only=True)
        found = start(method, copy.deepcopy(net), target, finetune=NONE)
        assert target.met(found.model)
        assert found.masks.count() >= 10
        more = to_return(found.model, data(8), limits_of(target, found.model), among=before.bits)
        assert len(more) == 0, "nothing more fits"
        assert not (found.masks.bits & ~before.bits).any()
    with pytest.raises(ValueError, match=r"the net as it is costs .* is met"):
        start(method, net, fastbcd.private.Target(bytes=10**9, protocol="crypten"))


@each_method
def test_the_same_call_gives_the_same_bits(method) -> None:
    runs = [start(method, make("mlp"), 20, seed=seed) for seed in (0, 0, 1)]
    assert same(state(runs[0].model), state(runs[1].model))
    assert not same(state(runs[0].model), state(runs[2].model))


@pytest.mark.parametrize(
    ("method", "kind"), [*((method, "resnet") for method in METHODS), ("senet", "poly")]
)
def test_bcd_and_linearize_continue_from_it(method, kind) -> None:
    found = start(method, make(kind), 120, finetune=NONE)
    dense, kept = make("resnet"), found.masks.bits.clone()
    settings = {"epochs": 1, "rt": 2, "padding": 1, "progress": False, "start": found}
    if method == "autorep" or kind == "poly":
        settings["replacement"] = "poly"
    polished = fastbcd.linearize(dense, data(32), 120, **settings)
    run = fastbcd.bcd(found.model, data(32), 100, drc=10, rt=2, finetune=None)
    assert torch.equal(polished.masks.bits, kept)
    assert run.masks.count() == 100
    assert not (run.masks.bits & ~kept).any()


# --------------------------------------------------------------------------------- resuming


@each_method
@pytest.mark.filterwarnings("ignore:.*more than the budget:RuntimeWarning")
def test_an_interrupted_run_resumes_to_the_same_result(tmp_path, monkeypatch, method) -> None:
    """In every third epoch of masks, in the fine-tune, and whatever weights the net has then.

    Its own weights at the start of the run are the default teacher's.
    """
    settings = {"finetune": Finetune(epochs=2, lr=0.01, padding=1, optimizer="adam")}
    straight = start(method, make(KIND[method]), 120, test=data(8), **settings)
    stops = [(epoch, 0) for epoch in range(1, len(straight.history), 3)] + [(0, 1), (1, 1)]
    settings |= {"run_dir": tmp_path, "test": data(8)}
    for epoch, step in stops:
        net = make(KIND[method])
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(1 if epoch == 1 and not step else 2)
        before = state(net)
        with monkeypatch.context() as patch:
            patch.setattr(Session, "epoch", stopped_at(epoch, step=step))
            with pytest.raises(KeyboardInterrupt):
                start(method, net, 120, **settings)
        assert same(state(net), before)
    resumed = start(method, make(KIND[method]), 120, **settings)
    again = start(method, make(KIND[method]), 120, **settings)
    for found in (resumed, again):
        assert same(state(found.model), state(straight.model))
        assert found.accuracy == straight.accuracy
        for now, then in zip(
            found.history + found.finetune, straight.history + straight.finetune, strict=True
        ):
            now.seconds, then.seconds = {}, {}
            assert now == then
    saved = fastbcd.load_run(tmp_path, make(KIND[method]))
    assert (saved.kind, saved.done, saved.masks) == (method, True, straight.masks)
    with pytest.raises(ValueError, match=r"another run: .*budget is 120 there and 30 now"):
        start(method, make(KIND[method]), 30, **settings)


@each_method
def test_a_run_of_a_net_in_half_precision_resumes(tmp_path, monkeypatch, method) -> None:
    settings = {"finetune": Finetune(epochs=2, lr=0.01, padding=1)}
    nets = [make(KIND[method]).bfloat16() for _ in range(3)]
    straight = start(method, nets[0], 120, **settings)
    for epoch, step, net in ((1, 0, nets[1]), (1, 1, nets[2])):
        with monkeypatch.context() as patch:
            patch.setattr(Session, "epoch", stopped_at(epoch, step=step))
            with pytest.raises(KeyboardInterrupt):
                start(method, net, 120, run_dir=tmp_path, **settings)
    resumed = start(method, nets[1], 120, run_dir=tmp_path, **settings)
    assert same(state(resumed.model), state(straight.model))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_fine_tune_is_finetuners(optimizer) -> None:
    """One epoch per call gives the same as Finetuner.run; masks at the budget are not trained."""
    settings = Finetune(epochs=3, lr=0.01, padding=1, optimizer=optimizer, batch_size=32)
    net, train = thinned(make("resnet")), data()
    teacher, other = copy.deepcopy(net), copy.deepcopy(net)
    count = fastbcd.masks(net).count()
    found = fastbcd.snl(net, train, count, finetune=settings, teacher=teacher)
    Finetuner(other, train, settings, teacher).run(1)
    assert found.history == []
    assert [r.epoch for r in found.finetune] == [0, 1, 2]
    noise = ("0.bias", "running_mean") if optimizer == "adam" else ()
    for key, value in state(other).items():
        if not key.endswith(noise):
            torch.testing.assert_close(state(net)[key], value, rtol=1e-4, atol=1e-5)


# -------------------------------------------------------------------------------- bad input


class Functional(nn.Module):
    """Its weights are no layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.act = nn.Parameter(torch.randn(5, 192)), MaskedReLU(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(F.linear(x.flatten(1), self.matrix))


POLY = r"site '2' is a MaskedPoly.*fastbcd\.autorep"
BAD = [
    ("snl", {"budget": 51}, "budget=51; the net keeps 50 ReLUs"),
    ("autorep", {"budget": 51}, "budget=51; the net keeps 50 ReLUs"),
    ("snl", {"budget": -1}, "budget=-1"),
    ("senet", {"budget": 2.5}, "budget=2.5; it must be a whole number"),
    ("snl", {"teacher": Other()}, "the teacher returns .*, 7.* and the net .*, 5"),
    ("snl", {"teacher": make}, "teacher=.*it must be Module"),
    ("snl", {"net": "net"}, "net is 'net'; give a torch"),
    ("snl", {"net": nn.Linear}, "net is <class .*Linear'>; give a torch"),
    ("autorep", {"net": data(8), "data": make("mlp")}, "net is ImageData"),
    ("senet", {"net": nn.Linear(2, 2)}, "Linear has no masked activations"),
    ("autorep", {"net": nn.Linear(2, 2)}, "Linear has no masked activations"),
    ("snl", {"batch_size": 0}, "batch_size=0"),
    ("snl", {"resume": "maybe"}, "resume='maybe'"),
    ("snl", {"run_dir": 3}, "run_dir=3; it must be"),
    ("snl", {"finetune": lambda net, step: None}, "finetune=.*it must be Finetune"),
    ("snl", {"finetune": Finetune(epochs=0.5)}, "finetune.epochs=0.5; it must be a whole"),
    ("snl", {"test": (torch.zeros(2, 3, 8, 8), torch.tensor([0, 9]))}, "label 9"),
    ("snl", {"lr": 0.0}, "lr=0.0; it must be finite and above 0"),
    ("snl", {"kappa": 0.9}, "kappa=0.9; it must be finite and at least 1"),
    ("snl", {"lambda0": float("nan")}, "lambda0=nan"),
    ("snl", {"lambda0": "1"}, "lambda0='1'; it must be a number"),
    ("snl", {"max_epochs": -1}, "max_epochs=-1"),
    ("snl", {"max_epoch": 1}, "snl has no argument 'max_epoch'; did you mean 'max_epochs'"),
    ("snl", {"net": make("poly")}, POLY),
    ("autorep", {"penalty": float("inf")}, "penalty=inf"),
    ("autorep", {"threshold": "x"}, "threshold='x'"),
    ("deepreduce", {"discount": -1}, "discount=-1"),
    ("deepreduce", {"trial_epochs": 0}, "trial_epochs=0"),
    ("deepreduce", {"epochs": 6}, "epochs=6; up to 6 trials of 1 epochs each, for 2 stages"),
    ("deepreduce", {"net": make("poly")}, POLY),
    ("senet", {"teacher": make("resnet")}, "the teacher belongs to another network: site 0"),
    ("senet", {"density": 1.5}, "density=1.5; it must be finite and above 0 and at most 1"),
    ("senet", {"every": 0}, "every=0"),
    ("senet", {"tolerance": -1.0}, "tolerance=-1.0"),
    ("senet", {"net": Functional(), "budget": 2}, "Functional has no layer with a weight"),
    ("relupruner", {"interval": 0}, "interval=0"),
    ("relupruner", {"finetune": Finetune(compile=True)}, r"finetune\.compile=True"),
    ("relupruner", {"net": make("poly")}, POLY),
]


SEEDED = {
    **{method: lambda seed, m=method: start(m, make("mlp"), 10, seed=seed) for method in METHODS},
    "bcd": lambda seed: fastbcd.bcd(make("mlp"), data(8), 40, seed=seed),
    "linearize": lambda seed: fastbcd.linearize(make("mlp"), data(8), 40, epochs=1, seed=seed),
    "train": lambda seed: fastbcd.train(make("mlp"), data(8), epochs=0, seed=seed),
    "Finetuner": lambda seed: Finetuner(make("mlp"), data(8), NONE, seed=seed),
    "choose": lambda seed: fastbcd.choose(
        make("mlp"), [torch.tensor([0])], data(8), adt=1.0, confidence=0.9, seed=seed
    ),
    "sample": lambda seed: fastbcd.masks(make("mlp")).sample(1, seed=seed, step=0, trial=0),
    "order": lambda seed: data(8).order(seed=seed, step=0, epoch=0),
}


@pytest.mark.parametrize("call", SEEDED.values(), ids=SEEDED)
def test_seeds_are_whole_numbers_below_2_to_the_63(call) -> None:
    for seed in (-1, 2**63, 2**64, 1.5, "0"):
        with pytest.raises((ValueError, TypeError), match=f"seed={seed!r}; it must be a whole"):
            call(seed)
    with pytest.raises(ValueError, match="9,223,372,036,854,775,807 at most"):
        call(2**63)


RATES = {
    "snl": ({"max_epochs": 2}, [0.03, 0.03]),
    "autorep": ({"lr": 0.1, "lr_end": 0.02, "epochs": 4}, [0.1, 0.088284, 0.06, 0.031716]),
    "senet": ({"epochs": 3, "tolerance": 0.0}, [0.02] * 3),
    "relupruner": ({"epochs": 2}, [0.01, 0.01]),
}


@pytest.mark.parametrize("method", RATES)
def test_learning_rates_of_the_mask_training(method, monkeypatch) -> None:
    """Those of CosineAnnealingLR(T_max=epochs, eta_min=lr_end), and constant ones."""
    rates, whole = [], Session.epoch
    noted = lambda self, epoch, lr, **more: rates.append(lr) or whole(self, epoch, lr, **more)  # noqa: E731
    monkeypatch.setattr(Session, "epoch", noted)
    settings, expected = RATES[method]
    start(method, make(KIND[method]), 120, finetune=NONE, **settings)
    assert rates == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("method", "change", "words"), BAD)
def test_bad_input_is_refused_before_any_work(tmp_path, method, change, words) -> None:
    arguments = {"net": make("mlp"), "budget": 10, "run_dir": tmp_path / "run", **change}
    before = state(arguments["net"]) if isinstance(arguments["net"], nn.Module) else {}
    with pytest.raises((ValueError, TypeError), match=words):
        start(method, **arguments)
    if before:
        assert same(state(arguments["net"]), before)
    assert not (tmp_path / "run").exists()


@each_method
def test_a_loss_that_is_not_finite_stops_and_restores(method) -> None:
    net = make("poly" if method == "autorep" else "mlp")
    before = state(net)
    with pytest.raises(FloatingPointError, match="not finite in epoch"):
        start(method, net, 10, lr=1e30)
    assert same(state(net), before)


# ------------------------------------------------------------------------------ the command


@each_method
def test_the_command_and_bcd_on_its_run_directory(tmp_path, capsys, method) -> None:
    data_file, run = write_images(tmp_path / "data.npz"), str(tmp_path / "run")
    common = ["--data", data_file, "--batch-size", "32", "--run-dir"]
    line = [method, "--model", "helpers.start_cases:small_net", *common, run]
    for name, value in METHODS[method].items():
        if name not in ("batch_size", "finetune"):
            line += [f"--{name.replace('_', '-')}", str(value)]
    line += ["--finetune-epochs", "1", "--budget"]
    assert cli.main([*line, "30"]) == 0
    assert "30 ReLUs kept, test " in capsys.readouterr().out
    assert cli.main([*line, "99"]) == 2
    assert "the net keeps 50 ReLUs" in capsys.readouterr().err
    net = "poly_net" if method == "autorep" else "small_net"
    line = ["bcd", "--model", f"helpers.start_cases:{net}", "--weights", run, "--budget", "20"]
    line += [*common, str(tmp_path / "b"), "--drc", "5", "--rt", "2", "--epochs", "1", "--quiet"]
    assert cli.main(line) == 0
    assert "20 ReLUs kept" in capsys.readouterr().out

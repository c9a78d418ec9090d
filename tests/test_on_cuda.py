"""The library on tensors of a (fake) CUDA device: what it computes on the CPU, and where."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

import fastbcd
from fastbcd import Finetune, private
from fastbcd.cli import main as cli
from fastbcd.data.sources import as_data
from fastbcd.descent.problem import FEW
from helpers.nets import images, make, thinned
from helpers.start_cases import write_images

ENGINES = ("sequential", "stacked", "collapsed")
SHORT = Finetune(epochs=1, lr=0.01, padding=1, batch_size=32, amp=False)
# CUDA has no kernel for float64, in which collapsed is checked.
pytestmark = pytest.mark.filterwarnings("ignore:fastbcd runs its slow reference on cuda tensors")


def removals(net, k: int = 4, d: int = 20) -> torch.Tensor:
    masks = fastbcd.masks(net)
    return torch.stack([masks.sample(d, seed=0, step=0, trial=t) for t in range(k)])


def check_device(net, index: int = 0) -> None:
    """Nothing was left behind on another device."""
    devices = {t.device for t in (*net.parameters(), *net.buffers())}
    assert devices == {torch.device("cuda", index)}


# ----------------------------------------------------------------------------------- scoring


@pytest.mark.parametrize("engine", ENGINES)
def test_scores_on_the_second_gpu(gpu, engine) -> None:
    net = thinned(make("resnet"), 0.1)
    given, data = removals(net), as_data(images(40))
    expected = fastbcd.score(net, given, data, engine=engine)
    found = fastbcd.score(net.to("cuda:1"), given, data.to("cuda:1"), engine=engine)
    assert found.correct.tolist() == expected.correct.tolist()
    torch.testing.assert_close(found.loss, expected.loss)
    assert not gpu.peak[0]
    check_device(net, 1)


def test_data_goes_to_the_net(gpu) -> None:
    """Also from a tuple and a DataLoader, which have no `.to`."""
    net = make("mlp").cuda()
    x, labels = images(30)
    expected = fastbcd.score(net, removals(net, d=5), as_data((x, labels)).to("cuda"))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, labels), batch_size=8)
    for data in ((x, labels), loader, as_data((x, labels))):
        assert torch.equal(fastbcd.score(net, removals(net, d=5), data).loss, expected.loss)


def test_a_net_in_float64_is_scored(gpu) -> None:
    net = make("resnet")
    expected = fastbcd.score(net, removals(net), images(40))
    found = fastbcd.score(net.cuda().double(), removals(net), images(40))
    torch.testing.assert_close(found.loss, expected.loss)


def test_an_example_goes_to_the_net(gpu) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
    net = fastbcd.convert(model.to("cuda:1"), torch.zeros(2, 4))
    check_device(net, 1)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fast", [True, False])
def test_cudnn_is_deterministic_while_scoring(gpu, monkeypatch, engine, fast) -> None:
    """Whatever the user has set; that is restored afterwards."""
    cudnn, seen, plain = torch.backends.cudnn, set(), torch.nn.functional.conv2d

    def conv2d(x, *args, **kwargs):
        if len(x) > 2:  # fewer are run to check shapes, before
            seen.add((cudnn.enabled, cudnn.deterministic, cudnn.benchmark))
        return plain(x, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "conv2d", conv2d)
    monkeypatch.setattr(cudnn, "benchmark", fast)
    before = cudnn.enabled, cudnn.deterministic, cudnn.benchmark
    net = thinned(make("resnet"), 0.1).cuda()
    fastbcd.score(net, removals(net), images(8), engine=engine)
    fastbcd.choose(net, removals(net), images(8), adt=0.3, engine=engine)
    fastbcd.saliency(net, images(8))
    assert seen == {(True, True, False)}
    assert (cudnn.enabled, cudnn.deterministic, cudnn.benchmark) == before


@pytest.mark.parametrize("engine", ["stacked", "collapsed"])
def test_mixed_precision_is_the_default(gpu, tmp_path, monkeypatch, engine) -> None:
    """Hypotheses in few bits, some images again in float32; the share is recorded."""
    seen, plain = set(), torch.nn.functional.conv2d

    def conv2d(x, weight, *rest):
        y = plain(x, weight, *rest)
        if len(x) > FEW:  # fewer are run to check the engine and that outputs are finite
            seen.add((y.dtype, torch.backends.cudnn.conv.fp32_precision))
        return y

    monkeypatch.setattr(torch.nn.functional, "conv2d", conv2d)
    options = {"drc": 10, "rt": 2, "finetune": None}
    budget = fastbcd.masks(make("resnet")).count() - 20
    for name, precision in (("mixed", None), ("full", "float32")):
        asked = fastbcd.Engine(engine, precision=precision)
        run = fastbcd.bcd(
            make("resnet").cuda(), images(600), budget, run_dir=tmp_path / name, engine=asked,
            **options,
        )  # fmt: skip
        assert run.masks.count() == budget
        full = (torch.float32, "ieee")
        if engine == "stacked" and name == "mixed":
            assert seen == {full, (torch.bfloat16, "tf32")}
        else:
            assert seen == {full}
        seen.clear()
        for step in fastbcd.load_run(tmp_path / name).history:
            if name == "full":
                assert step.rescored is None
            else:
                assert 0 < step.rescored < 1


def test_masks_are_read_and_written_in_one_copy(gpu) -> None:
    net = make("resnet").cuda()
    gpu.reset()
    masks = fastbcd.masks(net).copy()
    assert gpu.counts["d2h"] == gpu.counts["sync"] == 1
    gpu.reset()
    fastbcd.set_masks(net, masks.without([1, 700]))
    assert (gpu.counts["h2d"], gpu.counts["sync"]) == (1, 0)
    net.get_submodule("7").to("cuda:1")
    net.get_submodule("4").to("cuda:1")  # a net on two devices
    assert not fastbcd.masks(net).bits[[1, 700]].any()
    assert fastbcd.masks(net).count() == masks.count() - 2


# ---------------------------------------------------------------------------------- training


def two_steps(net, **options):
    count = fastbcd.masks(net).count()
    return fastbcd.bcd(net, images(64), count - 20, drc=10, rt=2, **options)


@pytest.mark.parametrize("proposal", ["uniform", "saliency"])
def test_bcd_goes_as_on_the_cpu(gpu, proposal) -> None:
    options = {"proposal": proposal, "finetune": SHORT, "test": images(20)}
    expected = two_steps(make("resnet"), teacher=make("resnet"), **options)
    found = two_steps(make("resnet").cuda(), teacher=make("resnet").cuda(), **options)
    assert found.masks == expected.masks
    for a, b in zip(found.history, expected.history, strict=True):
        assert a.train_loss == pytest.approx(b.train_loss, rel=1e-3)
    check_device(found.model)


@pytest.mark.parametrize("engine", ENGINES)
def test_scoring_leaves_its_memory_to_the_training(gpu, engine) -> None:
    net, seen = thinned(make("resnet"), 0.1).cuda(), []
    data = as_data(images(64)).to("cuda")
    before, count = gpu.allocated[0], fastbcd.masks(net).count()
    noted = lambda net, step: seen.append(gpu.allocated[0] - before)  # noqa: E731
    run = fastbcd.bcd(net, data, count - 20, drc=10, rt=2, engine=engine, finetune=noted)
    assert [step.engine for step in run.history] == [engine] * 2
    assert seen == [0, 0]


@pytest.mark.parametrize(
    ("optimizer", "amp", "dtype"),
    [("sgd", None, torch.bfloat16), ("adam", None, torch.bfloat16), ("sgd", "fp16", torch.float16)],
)
def test_bcd_in_mixed_precision(gpu, optimizer, amp, dtype) -> None:
    """The default on CUDA is bfloat16; weights stay in float32."""
    tune = Finetune(epochs=1, lr=0.01, padding=1, batch_size=32, optimizer=optimizer, amp=amp)
    net = make("resnet").cuda()
    seen = []
    net.get_submodule("0").register_forward_hook(lambda m, a, y: seen.append(y.dtype))
    run = two_steps(net, finetune=tune, teacher=make("resnet").cuda(), engine="sequential")
    assert dtype in seen
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    assert all(p.isfinite().all() for p in run.model.parameters())
    check_device(net)


@pytest.mark.parametrize("method", ["finetune", "mismatch", "snl", "autorep", "senet"])
def test_an_epoch_waits_no_more_often_with_more_batches(gpu, method) -> None:
    counts = []
    for batches in (20, 28):  # more than are run before a graph is captured
        net, teacher = make("mlp").cuda(), make("mlp").cuda()
        data = as_data(images(16 * batches)).to("cuda")
        matched = 0.1 if method in ("mismatch", "senet") else 0.0
        tune = Finetune(epochs=2, padding=1, batch_size=16, mismatch=matched)
        gpu.reset()
        if method in ("finetune", "mismatch"):
            fastbcd.Finetuner(net, data, tune, teacher).run(1)
        elif method == "snl":
            fastbcd.snl(net, data, 50, batch_size=16, finetune=tune, teacher=teacher)
        elif method == "senet":  # masks are relearned in batches of 32 images
            fastbcd.senet(net, data, 20, epochs=2, batch_size=16, finetune=tune, teacher=teacher)
        else:
            fastbcd.autorep(net, data, 50, epochs=2, batch_size=16, teacher=teacher)
        counts.append({kind: gpu.counts[kind] for kind in ("sync", "h2d", "d2h")})
    assert counts[0] == counts[1], gpu.places


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.filterwarnings("ignore:fastbcd scores .* one hypothesis at a time")
def test_nets_of_other_dtypes_are_trained(gpu, dtype) -> None:
    run = two_steps(make("mlp").cuda().to(dtype), finetune=SHORT)
    assert {p.dtype for p in run.model.parameters()} == {dtype}
    check_device(run.model)


def test_a_run_continues_on_another_device(gpu, tmp_path) -> None:
    net = make("mlp").cuda()
    for step in fastbcd.steps(net, images(64), 40, drc=5, rt=2, run_dir=tmp_path):
        if step.number == 2:  # the first is saved
            break
    again = make("mlp")
    steps = fastbcd.steps(again, images(64), 40, drc=5, rt=2, run_dir=tmp_path)
    assert [step.number for step in steps] == [2]
    assert fastbcd.masks(again).count() == 40


def test_snl(gpu) -> None:
    net = make("mlp").cuda()
    options = {"lr": 0.1, "lambda0": 0.1, "batch_size": 32, "finetune": SHORT}
    start = fastbcd.snl(net, images(64), 40, test=images(20), **options)
    assert start.masks.count() == 40
    assert len(start.history) > 1
    expected = fastbcd.snl(make("mlp"), images(64), 40, test=images(20), **options)
    assert start.masks == expected.masks
    check_device(net)


def test_autorep(gpu) -> None:
    options = {"epochs": 3, "lr": 0.1, "penalty": 20.0, "batch_size": 32, "finetune": SHORT}
    start = fastbcd.autorep(make("mlp").cuda(), images(64), 48, **options)
    expected = fastbcd.autorep(make("mlp"), images(64), 48, **options)
    assert start.masks.count() == 48
    assert start.masks == expected.masks
    check_device(start.model)


def test_senet(gpu) -> None:
    tune = dataclasses.replace(SHORT, mismatch=0.1)
    options = {"epochs": 2, "every": 1, "lr": 0.02, "batch_size": 32, "finetune": tune}
    start = fastbcd.senet(make("mlp").cuda(), images(64), 20, **options)
    expected = fastbcd.senet(make("mlp"), images(64), 20, **options)
    assert start.masks.count() == 20
    assert start.masks == expected.masks
    check_device(start.model)


def test_train(gpu, tmp_path) -> None:
    options = {"epochs": 2, "lr": 0.01, "padding": 1, "amp": False, "test": images(20)}
    found = fastbcd.train(make("resnet").cuda(), images(64), run_dir=tmp_path, **options)
    expected = fastbcd.train(make("resnet"), images(64), **options)
    for a, b in zip(found.history, expected.history, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-3)
    check_device(found.model)
    assert fastbcd.load_run(tmp_path).weights["0.weight"].device.type == "cpu"


# ------------------------------------------------------------------------------------ private


def test_private(gpu) -> None:
    net, (x, _) = thinned(make("resnet")).cuda(), images(8)
    whole = private.cost(net)
    assert whole.activations.bytes == private.cost(fastbcd.masks(net)).bytes < whole.bytes
    small = private.gather_form(net)
    check_device(small)
    assert torch.equal(small(x.cuda()), net(x.cuda()))
    there, here = (private.ranges(n, images(16)) for n in (net, thinned(make("resnet"))))
    for a, b in zip(there.sites, here.sites, strict=True):
        assert (a.low, a.high) == pytest.approx((b.low, b.high), rel=1e-4)


# ------------------------------------------------------------------------------- command line


NET = ["--model", "helpers.start_cases:small_net", "--quiet"]
LINES = {
    "train": ["--epochs", "1"],
    "snl": ["--budget", "45", "--max-epochs", "1", "--finetune-epochs", "1"],
    "autorep": ["--budget", "45", "--epochs", "1"],
    "relupruner": [
        "--budget",
        "45",
        "--epochs",
        "2",
        "--warmup",
        "0",
        "--interval",
        "1",
        "--finetune-epochs",
        "1",
    ],
    "deepreduce": ["--budget", "45", "--epochs", "7", "--trial-epochs", "1"],
    "senet": ["--budget", "45", "--epochs", "1", "--finetune-epochs", "1"],
    "bcd": ["--budget", "40", "--drc", "5", "--rt", "2", "--epochs", "1"],
}


@pytest.mark.filterwarnings("ignore:after 1 epochs:RuntimeWarning")
@pytest.mark.parametrize("command", LINES)
def test_commands_run_on_the_gpu(gpu, tmp_path, capsys, command) -> None:
    """By default; with --device cpu nothing does."""
    data = write_images(tmp_path / "data.npz")
    line = [command, *NET, *LINES[command], "--data", data, "--batch-size", "32"]
    histories = []
    for device in ("cuda", "cpu"):
        run, more = tmp_path / device, ["--device", "cpu"] if device == "cpu" else []
        gpu.reset()
        assert cli.main([*line, *more, "--run-dir", str(run)]) == 0
        assert (gpu.counts["launch"] > 50) == (device == "cuda")
        rows = (run / "history.jsonl").read_text().splitlines()
        histories.append([json.loads(row) for row in rows])
    for a, b in zip(*histories, strict=True):
        assert a.get("chosen", a.get("count")) == b.get("chosen", b.get("count"))
    if command == "bcd":
        assert cli.main(["cost", str(tmp_path / "cuda")]) == 0
        assert "40 ReLUs" in capsys.readouterr().out


def test_info(gpu, capsys) -> None:
    assert cli.main(["info"]) == 0
    assert "cuda:1       Fake A100" in capsys.readouterr().out

"""The command line: train, bcd, resuming, Ctrl-C, and one-line errors."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import fastbcd
from fastbcd.cli import demo, inputs
from fastbcd.cli import main as cli
from fastbcd.runs.directory import read_state
from fastbcd.runs.journal import Journal
from helpers import published_nets
from helpers.start_cases import write_images

NET = """
from torch import nn

def small():
    return nn.Sequential(nn.Conv2d(1, 4, 5, 4, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
                         nn.Linear(196, 10))

def number():
    return 3

def missing():
    return nn.no_such_layer()

def broken():
    raise KeyError("stem\\nand more")

def sized(classes):
    return small()

def coloured():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2704, 10))
"""
BCD = "bcd --model my_nets:small --data tiny.npz --budget 30 --drc 60 --rt 2 --epochs 1"
LINEARIZE = "linearize --model my_nets:small --data tiny.npz --budget 30 --epochs 3 --rt 2"
TRAIN = "train --model my_nets:small --data tiny.npz --epochs 3 --run-dir dense"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """A directory with a module and a little data."""
    (tmp_path / "my_nets.py").write_text(NET)
    data = fastbcd.load("fashion-mnist-mini")
    arrays = {}
    for split, part in (("train", data.first(64)), ("test", data.shard(1, 2).first(32))):
        arrays[f"{split}_images"], arrays[f"{split}_labels"] = (
            part.images.numpy(),
            part.labels.numpy(),
        )
    np.savez(tmp_path / "tiny.npz", **arrays)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_nets", raising=False)
    return tmp_path


def fastbcd_(line: str) -> int:
    return cli.main(shlex.split(line))


def weights(run_dir: str) -> dict:
    return read_state(Path(run_dir)).tensors


def records(run_dir: str) -> list[dict]:
    return [json.loads(line) for line in (Path(run_dir) / "history.jsonl").read_text().splitlines()]


def interrupted_at(call: int, real: Callable) -> Callable:
    """`real`, with a Ctrl-C in place of its call of that number."""
    calls = []

    def function(*arguments, **options):
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    return function


# ------------------------------------------------------------------------------- train


def test_train_then_bcd(capsys) -> None:
    assert fastbcd_(f"{TRAIN} --quiet") == 0
    assert "196 ReLUs kept, test " in capsys.readouterr().out
    epochs = records("dense")
    assert [r["lr"] for r in epochs] == [0.1, 0.1, 0.01]
    assert not [name for name in weights("dense") if name.startswith("momentum")]
    line = f"{BCD} --weights dense --teacher dense --run-dir out"
    assert fastbcd_(line) == 0
    out = capsys.readouterr().out
    assert fastbcd.load_run("out").begin.test_accuracy == epochs[-1]["test_accuracy"]
    assert "step 1: 196 → 136 ReLUs" in out
    assert "30 ReLUs kept, test " in out
    assert int(weights("out")["2.mask"].sum()) == 30
    assert fastbcd_(line) == 0
    assert "the run in out is done: 3 steps, 30 ReLUs kept" in capsys.readouterr().out


def test_the_version(capsys) -> None:
    with pytest.raises(SystemExit) as end:
        fastbcd_("--version")
    assert end.value.code == 0
    assert capsys.readouterr().out == f"fastbcd {fastbcd.__version__}\n"


# ------------------------------------------------------------------------------- bcd


def test_ctrl_c_leaves_a_resumable_run_and_says_how_to_go_on(monkeypatch, capsys) -> None:
    monkeypatch.setattr(Journal, "finish", interrupted_at(2, Journal.finish))
    assert fastbcd_(f"{BCD} --quiet") == 130
    run_dir = "runs/bcd-my_nets.small-tiny.npz-30"
    out = capsys.readouterr().out
    assert f"finished steps are saved, and the same command resumes:\n  fastbcd {BCD}" in out
    assert len(read_state(Path(run_dir)).history) == 1
    assert fastbcd_(f"{BCD} --quiet") == 0
    assert fastbcd_(f"{BCD} --quiet --run-dir whole") == 0
    first, second = weights(run_dir), weights("whole")
    assert all(torch.equal(first[name], tensor) for name, tensor in second.items())


def test_ctrl_c_in_a_process(tmp_path) -> None:
    """python -m fastbcd, and a signal in the middle."""
    command = [sys.executable, "-m", "fastbcd", *shlex.split(BCD), "--drc", "1", "--run-dir", "r",
               "--epochs", "20"]  # fmt: skip  # so many that it is not finished before the signal
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        # A background job ignores the signal, and passes that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    history = tmp_path / "r" / "history.jsonl"
    for _ in range(6000):
        if history.exists() or child.poll() is not None:
            break
        time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=600)
    assert child.returncode == 130, out
    assert "fastbcd bcd --model my_nets:small" in out
    assert 1 <= len(read_state(tmp_path / "r").history) < 166


def test_weights_of_many_kinds() -> None:
    images = torch.zeros(2, 1, 28, 28)
    net = inputs.call_model("my_nets:small", images, "identity")
    masks = fastbcd.masks(net)
    fastbcd.set_masks(net, masks.without(masks.sample(150, seed=0, step=0, trial=0)))
    state = net.state_dict()
    save_file(state, "a.safetensors")
    torch.save({"state_dict": {f"module.{k}": v for k, v in state.items()}}, "b.pt")
    torch.save({k: v for k, v in state.items() if "mask" not in k}, "c.pt")
    for path, count in (("a.safetensors", 46), ("b.pt", 46), ("c.pt", 196)):
        line = f"{BCD} --epochs 0 --weights {path} --run-dir {path}.run"
        assert fastbcd_(line) == 0
        assert fastbcd.load_run(f"{path}.run").start.count() == count


def test_an_official_checkpoint_is_a_net_of_ones_own() -> None:
    torch.save({"state_dict": published_nets.snl("wide_resnet22_8").state_dict()}, "snl.pth")
    code = 'import fastbcd\n\ndef net():\n    return fastbcd.load_snl("snl.pth")\n'
    Path("official.py").write_text(code)
    data = write_images(Path("own.npz"))
    count = fastbcd.masks(fastbcd.load_snl("snl.pth")).count()
    line = f"bcd --model official:net --data {data} --budget {count - 5} --drc 5 --rt 1 --epochs 0"
    assert fastbcd_(f"{line} --run-dir r") == 0
    run = fastbcd.load_run("r")
    assert (run.start.count(), run.count) == (count, count - 5)


def test_a_share_of_what_is_left_can_be_the_drc() -> None:
    assert fastbcd_(f"{BCD} --epochs 0 --quiet --drc 50% --run-dir share") == 0
    assert [r["after"] for r in records("share")] == [98, 49, 30]
    settings = json.loads(Path("share/config.json").read_text())["settings"]
    assert settings["drc"] == {"schedule": "Fraction", "share": 0.5, "least": 1}
    assert fastbcd_(f"{BCD} --epochs 0 --quiet --drc 20% --run-dir share") == 2


def test_saliency_and_a_share_run_and_resume(monkeypatch, capsys) -> None:
    line = f"{BCD} --quiet --proposal saliency --drc 40% --run-dir"
    with monkeypatch.context() as broken:
        broken.setattr(Journal, "finish", interrupted_at(2, Journal.finish))
        assert fastbcd_(f"{line} cut") == 130
    assert len(records("cut")) == 1
    assert fastbcd_(f"{line} cut") == 0
    assert fastbcd_(f"{line} whole") == 0
    cut, whole = weights("cut"), weights("whole")
    assert all(torch.equal(cut[name], tensor) for name, tensor in whole.items())
    assert [r["after"] for r in records("cut")] == [118, 71, 43, 30]
    settings = json.loads(Path("cut/config.json").read_text())["settings"]
    assert settings["proposal"] == {"name": "saliency", "temperature": 0.25, "kind": "mean_abs"}
    capsys.readouterr()
    for other, message in (
        ("--proposal uniform", "now; name another run_dir"),
        ("--drc 30%", "drc.share is 0.4 there and 0.3 now"),
        ("--drc adaptive", 'drc.schedule is "Fraction" there and "Adaptive" now'),
        ("--drc 40", "drc is {"),
    ):
        assert fastbcd_(f"{line} cut {other}") == 2
        assert message in capsys.readouterr().err


def test_every_setting_of_the_fine_tuning_is_an_option(capsys) -> None:
    line = f"{BCD} --quiet --epochs 1 --padding 1 --momentum 0.5 --no-flip --amp --run-dir tuned"
    assert fastbcd_(line) == 0
    tuning = json.loads(Path("tuned/config.json").read_text())["settings"]["finetune"]
    assert {k: tuning[k] for k in ("padding", "momentum", "flip", "amp")} == {
        "padding": 1, "momentum": 0.5, "flip": False, "amp": True,
    }  # fmt: skip
    capsys.readouterr()
    with pytest.raises(SystemExit):
        fastbcd_("bcd --help")
    options = set(re.findall(r"^  --([a-z0-9-]+)", capsys.readouterr().out, re.MULTILINE))
    fields = {field.name.replace("_", "-") for field in dataclasses.fields(fastbcd.Finetune)}
    assert fields - options == {"augment"}


def test_settings_of_the_engine_are_options(monkeypatch) -> None:
    given = []

    @functools.wraps(fastbcd.bcd)
    def stopped(*_, **arguments) -> None:
        given.append(arguments["engine"])
        raise KeyboardInterrupt

    monkeypatch.setattr(fastbcd, "bcd", stopped)
    for options in ("", "--engine stacked --precision mixed"):
        assert fastbcd_(f"{BCD} --quiet {options}") == 130
    assert given == [fastbcd.Engine(), fastbcd.Engine("stacked", precision="mixed")]


def test_an_adaptive_drc_follows_adt() -> None:
    line = f"{BCD} --quiet --epochs 0 --drc adaptive"
    assert fastbcd_(f"{line} --adt=-100 --run-dir none-met") == 0
    assert [r["after"] for r in records("none-met")] == [96, 46, 30]  # 100, 50, 25 and the rest
    assert fastbcd_(f"{line} --budget 10 --adt 100 --run-dir all-met") == 0
    assert [r["after"] for r in records("all-met")] == [96, 10]  # 100, 125 and the rest


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{BCD} --budget -3", "budget=-3"),
        (f"{BCD} --weights nowhere", "there is no checkpoint at nowhere"),
        (f"{BCD} --weights .", ". holds no run that has begun"),
        (f"{BCD} --lr -1", "lr=-1.0;"),
        (BCD.replace("my_nets:small", "my_nets"), "write MODULE:FUNCTION"),
        (BCD.replace("my_nets:small", "my_nets:large"), "has no attribute 'large'"),
        (BCD.replace("my_nets:small", "no_nets:small"), "No module named 'no_nets'"),
        (BCD.replace("my_nets:small", "bad_nets:small"), "bad_nets:small: ZeroDivisionError"),
        (BCD.replace("my_nets:small", "my_nets:nn"), "'module' object is not callable"),
        (BCD.replace("my_nets:small", "my_nets:broken"), "my_nets:broken: KeyError: 'stem"),
        (BCD.replace("my_nets:small", "my_nets:missing"), "my_nets:missing: AttributeError: "),
        (BCD.replace("my_nets:small", "my_nets:sized"), "TypeError: sized() missing 1 required"),
        (BCD.replace("my_nets:small", "my_nets:coloured"), "to have 3 channels"),
        (f"{BCD} --weights bad.safetensors", "bad.safetensors is no checkpoint"),
        (
            f"{BCD} --weights other.safetensors",
            "other.safetensors does not fit Sequential: 8 missing: ",
        ),
        (f"{BCD} --seed {10**20}", f"seed={10**20}"),
        (f"{BCD} --device cuda", "(FASTBCD_TRACEBACK=1 shows where)"),
        (f"{BCD} --device abacus", "abacus"),
        (f"{BCD} --arch resnet18", "--arch resnet18 and --model my_nets:small: give one of them"),
        (BCD.replace("tiny.npz", "none.npz"), "there is no file none.npz"),
        ("bcd --budget 3 --root none", "none"),
        (BCD.replace("my_nets:small", "my_nets:number"), "returned a int, no nn.Module"),
        (BCD.replace("tiny.npz", "cifar7"), "no data is called 'cifar7'"),
        (f"{BCD} --resume must --run-dir new", "there is no run in new"),
        (f"{BCD} --resume --run-dir new", "there is no run in new"),
        ("bcd --arch resnet17 --budget 3 --data tiny.npz", "no network 'resnet17'"),
        ("bcd --arch resnet20", "give --budget, --seconds, --bytes or --rounds"),
        ("bcd --budget 3 --rtt 40ms", "--rtt goes with --seconds, --bytes or --rounds; leave"),
        ("bcd --seconds 1 --rounds 9", "seconds and rounds was given"),
        ("bcd --seconds 1 --rtt 40", "rtt='40'; give it with its unit, such as '40ms'"),
        ("bcd --seconds 1 --bandwidth 100", "bandwidth='100'; give it with its unit"),
        ("bcd --seconds fast", "'fast'; give seconds, 0 or more"),
        (f"{BCD} --drc 0", "drc=0; it must be a whole number, 1 or more"),
        (f"{BCD} --proposal random", "'random'; choose from uniform, saliency, blocks"),
        (f"{BCD} --engine magic", "magic"),
    ],
)
def test_errors_are_one_line(line, message, capsys) -> None:
    if "cuda" in line and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    Path("bad_nets.py").write_text("1 / 0")
    Path("bad.safetensors").write_text("no tensors")
    save_file({"2.mask": torch.ones(3)}, "other.safetensors")
    assert fastbcd_(line) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("fastbcd bcd: ")
    assert message in error


def test_a_net_without_weights_is_named(capsys) -> None:
    line = "bcd --arch resnet20 --data tiny.npz --budget 144255 --drc 1 --rt 1 --epochs 0 --quiet"
    assert fastbcd_(f"{line} --run-dir untrained") == 0
    assert "no --weights: the net is untrained" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{BCD} --drc 0%", "--drc: 0% is neither a number of ReLUs nor a share"),
        (f"{BCD} --drc 101%", "--drc: 101% is neither"),
        (f"{BCD} --drc nan%", "--drc: nan% is neither"),
        (f"{BCD} --drc %", "--drc: % is neither"),
        (f"{BCD} --drc 2.5", "--drc: 2.5 is neither"),
        (f"{BCD} --drc adapt", "--drc: adapt is neither"),
        (f"{BCD} --rt 2.5", "--rt: invalid int value"),
        ("descend", "invalid choice: 'descend'"),
    ],
)
def test_errors_of_the_line_itself(line, message, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        fastbcd_(line)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_dry_run_prints_the_plan_and_writes_nothing(capsys) -> None:
    for line in (BCD, LINEARIZE):
        assert fastbcd_(f"{line} --dry-run --quiet") == 0
        assert "plan: " in capsys.readouterr().out
    assert not Path("runs").exists()


def test_linearize_to_several_budgets(capsys) -> None:
    """Each has a folder, and the report has all of them."""
    line = LINEARIZE.replace("--budget 30", "--budget 60,30 --run-dir way --quiet")
    assert fastbcd_(line) == 0
    out = capsys.readouterr().out
    assert out.index("60 ReLUs kept, test ") < out.index("30 ReLUs kept, test ")
    assert sorted(path.name for path in Path("way").iterdir()) == ["30", "60"]
    assert fastbcd_(line.replace("60,30", "30,60")) == 2
    assert "give the largest first" in capsys.readouterr().err
    assert fastbcd_("report way") == 0
    page = Path("way/report/report.html").read_text()
    assert page.index("1. 60") < page.index("2. 30")


def test_linearize(capsys) -> None:
    assert fastbcd_(f"{TRAIN} --quiet") == 0
    line = f"{LINEARIZE} --weights dense --padding 1 --no-flip"
    assert fastbcd_(f"{line} --run-dir made") == 0
    out = capsys.readouterr().out
    assert out.index("3 epochs of training") < out.index(": 30 ReLUs, only training")
    assert "30 ReLUs kept, test " in out
    settings = json.loads(Path("made/config.json").read_text())["settings"]
    assert (settings["epochs"], settings["rt"]) == (3, 2)
    assert (settings["finetune"]["padding"], settings["finetune"]["flip"]) == (1, False)
    assert settings["finetune"]["clip"] == 0
    for more, clip in (("", 5.0), (" --clip 2", 2.0)):
        assert fastbcd_(f"{line} --replacement poly{more} --run-dir poly{clip:.0f} --quiet") == 0
        config = json.loads(Path(f"poly{clip:.0f}/config.json").read_text())
        assert config["settings"]["finetune"]["clip"] == clip
    assert fastbcd_(f"{line} --run-dir made --quiet") == 0
    steps = records("made")
    assert sum(r["epochs"] for r in steps) == 3
    assert f"the run in made is done: {len(steps)} steps" in capsys.readouterr().out
    assert fastbcd_(f"{line} --start made --budget 10 --run-dir more --quiet") == 0
    left = [r["after"] for r in records("more")]
    assert left == sorted(left, reverse=True)
    assert (left[0] < 30, left[-1]) == (True, 10)
    before, after = (weights(name)["2.mask"] for name in ("made", "more"))
    assert not (after & ~before).any()
    assert fastbcd_("linearize --model my_nets:small --data tiny.npz --budget 999") == 2
    assert "budget=999; the net keeps 196 ReLUs" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["identity", "line", "poly"])
def test_weights_decide_what_removed_relus_are(kind) -> None:
    """A descent from a run of any kind needs no --replacement; lines are fitted, once."""
    given = "" if kind == "line" else f"--replacement {kind}"
    assert fastbcd_(f"{LINEARIZE} {given} --run-dir first --quiet") == 0
    first = fastbcd.load_run("first").weights
    rows = {"identity": None, "line": 2, "poly": 3}[kind]
    assert all(len(t) == rows for name, t in first.items() if name.endswith("coef"))
    assert any(name.endswith("coef") for name in first) == (kind != "identity")
    line = (
        "bcd --model my_nets:small --data tiny.npz --budget 20 --drc 10 --rt 1 --epochs 0 --quiet"
    )
    assert fastbcd_(f"{line} --weights first --run-dir second") == 0
    second = fastbcd.load_run("second").weights
    assert second.keys() == first.keys()
    assert all(torch.equal(t, second[name]) for name, t in first.items() if "mask" not in name)


TARGETED = {
    "bcd": "--drc 50% --rt 1 --epochs 0 --max-sites 1", "linearize": "--epochs 3 --max-sites 1",
    "snl": "--max-epochs 1 --finetune-epochs 0", "autorep": "--epochs 1",
    "deepreduce": "--epochs 4 --trial-epochs 1", "senet": "--epochs 1 --finetune-epochs 0",
    "relupruner": "--epochs 1 --warmup 0 --finetune-epochs 0",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:after .* epochs:RuntimeWarning")
@pytest.mark.parametrize("command", TARGETED)
def test_a_cost_is_a_budget(command) -> None:
    """30 ReLUs are 30 · 464 bytes under CrypTen, and the squares of AutoReP 16 bytes each."""
    line = f"{command} --model my_nets:small --data tiny.npz --quiet {TARGETED[command]}"
    assert (
        fastbcd_(
            f"{line} --bytes 20kB --protocol crypten --activations-only --rtt 40ms --budget 40"
        )
        == 0
    )
    run = fastbcd.load_run(f"runs/{command}-my_nets.small-tiny.npz-40-20kB")
    budget = run.settings["budget"]
    assert (budget["bytes"], budget["relus"], budget["rtt"]) == (20_000, 40, 0.04)
    poly = ["2"] if command == "autorep" else []
    assert run.count == (20_000 - 196 * 16) // 448 if poly else 40
    assert fastbcd.private.cost(run.masks, poly=poly).bytes <= 20_000


def test_every_command_has_help(capsys) -> None:
    for name in cli.COMMANDS:
        with pytest.raises(SystemExit) as caught:
            fastbcd_(f"{name} --help")
        assert caught.value.code == 0
        assert f"fastbcd {name}" in capsys.readouterr().out


def test_the_net_of_the_demo_is_worth_linearising() -> None:
    test = fastbcd.load("fashion-mnist-mini", "test")
    assert fastbcd.accuracy(demo.trained_resnet(), test) >= 88


def test_the_demo_shows_its_result_and_a_page_and_is_then_done(monkeypatch, capsys) -> None:
    """On few images."""
    line = "demo --run-dir demo --images 64 --tests 40 --epochs 4"
    assert fastbcd_(line) == 0
    first = capsys.readouterr().out
    assert "step 4: 1,000 ReLUs, only training" in first
    assert "ReLUs: 28,224 → 1,000" in first
    pytest.importorskip("matplotlib")
    assert "a page with figures: demo/report/report.html" in first
    assert Path("demo/report/accuracy.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert fastbcd_(line) == 0
    again = capsys.readouterr().out
    assert " steps, 1,000 ReLUs kept" in again
    results = [
        re.findall("^(?:test|ReLUs|private).*→.*", text, re.MULTILINE) for text in (first, again)
    ]
    assert results[0] == results[1]
    assert "pip install 'fastbcd[plot]'" in again, "it does without matplotlib"

"""fastbcd cost and fastbcd export."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fastbcd
from fastbcd import private
from fastbcd.cli import inputs
from fastbcd.cli import main as cli
from fastbcd.runs import directory
from fastbcd.training.loop import Session
from helpers import start_cases

NET = """
from torch import nn

def small():
    return nn.Sequential(nn.Conv2d(1, 4, 5, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(196, 20),
                         nn.ReLU(), nn.Linear(20, 10))

def other():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10), nn.ReLU())
"""

SMALL = {"name": "resnet20", "num_classes": 10, "image_size": 28}


@pytest.fixture
def run(tmp_path, monkeypatch) -> nn.Module:
    """A finished run in `out`, its masks in `masks.safetensors`; the net."""
    (tmp_path / "my_nets.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_nets", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    torch.manual_seed(0)
    module = importlib.import_module("my_nets")
    data = fastbcd.load("fashion-mnist-mini").first(16)
    net = fastbcd.convert(module.small(), next(data.batches(2))[0], replacement="poly")
    fastbcd.bcd(net, data, budget=100, drc=58, rt=2, finetune=None, run_dir="out")
    fastbcd.masks(net).save("masks.safetensors")
    return net.eval()


def fastbcd_(line: str) -> int:
    return cli.main(shlex.split(line))


def test_cost_command(run, capsys) -> None:
    assert fastbcd_("cost out --json --bandwidth 100Mbit --rtt 40ms") == 0
    found = json.loads(capsys.readouterr().out)
    expected = private.cost(run, "crypten", bandwidth="100Mbit", rtt="40ms", activations_only=True)
    assert found == json.loads(json.dumps(expected.as_dict()))
    assert [s["name"] for s in found["sites"]] == [s.name for s in fastbcd.masks(run).sites]
    assert found["total"]["squares"] == 116
    assert fastbcd_("cost masks.safetensors --protocol delphi-gc") == 0
    assert capsys.readouterr().out.strip() == str(private.cost(fastbcd.masks(run), "delphi-gc"))
    assert fastbcd_("cost out") == 0
    assert capsys.readouterr().out.strip() == str(private.cost(run, activations_only=True))


def test_cost_of_an_unfinished_start(tmp_path, monkeypatch, capsys) -> None:
    """Between epochs the state of SNL holds real-valued masks."""
    with monkeypatch.context() as patch:
        patch.setattr(Session, "epoch", start_cases.stopped_at(1))
        with pytest.raises(KeyboardInterrupt):
            fastbcd.snl(
                start_cases.small_net(), start_cases.data(), 9, run_dir=tmp_path / "snl",
                **start_cases.QUICK,
            )  # fmt: skip
    assert fastbcd_(f"cost {tmp_path / 'snl'}") == 2
    assert "has no final masks yet: finish SNL first" in capsys.readouterr().err


def test_output_that_nobody_reads(run) -> None:
    """`fastbcd cost RUN | head -1` is not an error."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "fastbcd", "cost", "out"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=600)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def check_recorded(net: nn.Module, name: str, model: str, capsys) -> None:
    """export, cost and report of the run in `recorded`."""
    capsys.readouterr()
    assert fastbcd_(f"export recorded --out net.pt2 {model}") == 0
    assert "any batch of 1×28×28 normalised images" in capsys.readouterr().out
    x = torch.randn(3, 1, 28, 28)
    exported = torch.export.load("net.pt2").module()
    torch.testing.assert_close(exported(x), net.eval()(x), rtol=1e-5, atol=1e-6)
    assert fastbcd_("cost recorded") == 0
    alone = bool(model)  # the run has masks only
    expected = str(private.cost(net, images=x, activations_only=alone))
    assert capsys.readouterr().out.startswith(expected)
    assert fastbcd_("report recorded") == 0
    page = Path("recorded/report/report.html").read_text(encoding="utf-8")
    assert name in page
    assert "fashion-mnist-mini, 16 images" in page


@pytest.mark.parametrize("replacement", ["identity", "line", "poly"])
def test_a_run_of_a_known_net_needs_no_options(replacement, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    data = fastbcd.load("fashion-mnist-mini").first(16)
    net = fastbcd.models.resnet20(10, 28, in_channels=1, width=2, blocks=1, replacement=replacement)
    fastbcd.bcd(net, data, budget=7000, drc=100, rt=1, finetune=None, run_dir="recorded")
    check_recorded(net, "name resnet20", "", capsys)


@pytest.mark.parametrize("command", ["bcd --drc 58 --epochs 0", "linearize --epochs 1"])
@pytest.mark.parametrize("replacement", ["identity", "line", "poly"])
def test_a_run_of_an_own_net_names_it(run, command, replacement, monkeypatch, capsys) -> None:
    """Its function is called only if it is named again."""
    data = fastbcd.load("fashion-mnist-mini").first(16)
    monkeypatch.setattr(inputs.Inputs, "split", lambda inputs, split: data)
    line = f"{command} --model my_nets:small --budget 100 --rt 2 --batch-size 8 --quiet"
    assert fastbcd_(f"{line} --replacement {replacement} --run-dir recorded") == 0
    example = next(data.batches(2))[0]
    module = importlib.import_module("my_nets")
    net = fastbcd.convert(module.small(), example, replacement=replacement)
    net = fastbcd.load_run("recorded", model=net).model
    check_recorded(net, "model my_nets:small", "--model my_nets:small", capsys)
    monkeypatch.delattr(module, "small")
    assert fastbcd_("export recorded --out net.pt2") == 2
    error = capsys.readouterr().err
    assert "is a run of my_nets:small, which cannot be built from the run alone" in error
    assert "on the command line --model MODULE:FUNCTION" in error


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ({}, "is a run of a net of its own"),
        ({"model": "no_nets:x", "replacement": []}, "is a run of no_nets:x"),
        ({**SMALL, "width": 10**9}, "width=1000000000 is out of bounds"),
        ({**SMALL, "blocks": 10**7}, "blocks=10000000 is out of bounds"),
        ({**SMALL, "image_size": -1}, "image_size=-1 is out of bounds"),
        ({**SMALL, "num_classes": float("nan")}, "num_classes=nan is out of bounds"),
        ({**SMALL, "wide": 3}, "does not fit"),
    ],
)
def test_a_recorded_net_that_is_none(run, arch, message, capsys) -> None:
    path = Path("out/config.json")
    config = json.loads(path.read_text())
    config["net"]["arch"] = arch
    start = directory.read_start(Path("out"))
    path.write_text(json.dumps(config))
    for file in Path("out").glob("*.safetensors"):  # bound to the other config.json
        file.unlink()
    Path("out/history.jsonl").unlink()
    content = directory._encoded(start, Path("out/start.safetensors"))
    Path("out/start.safetensors").write_bytes(content)
    assert fastbcd_("export out --out net.pt2") == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("cost nothing", "there is nothing at nothing"),
        ("export nothing --out a.pt2", "there is nothing at nothing"),
        ("cost .", "holds no run that has begun"),
        ("cost my_nets.py", "is not a readable safetensors file"),
        ("export out --model my_nets:small --out a.txt", "must end in"),
        ("export out --model my_nets:other", "does not fit"),
        ("export out", "is a run of a net of its own, which cannot be built from the run alone"),
        ("cost out --bandwidth fast", "bandwidth='fast'; give it with its unit"),
        ("cost out --bandwidth 0", "bandwidth='0'"),
        ("cost out --rtt soon", "rtt='soon'"),
        ("cost out --rtt 40", "rtt='40'; give it with its unit, such as '40ms'"),
        ("cost out --protocol cripten", "there is no protocol 'cripten'"),
    ],
)
def test_errors_are_one_line(run, line, message, capsys) -> None:
    assert fastbcd_(line) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1

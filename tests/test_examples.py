"""The scripts and the notebook of examples/ run, on tiny data."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

import fastbcd

FOLDER = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(FOLDER.glob("*.py"))
LEFT_OUT = "`make test-all` installs it"


def example(name: str):
    """The module of a script."""
    spec = spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def clean_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


def tiny_images(count: int, size: int) -> fastbcd.ImageData:
    pixels = torch.randint(256, (count, 3, size, size), dtype=torch.uint8)
    return fastbcd.ImageData.from_arrays(
        pixels, torch.arange(count) % 10, mean=(0.5,) * 3, std=(0.25,) * 3
    )


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_short_listed_and_tested(path) -> None:
    assert len(path.read_text().splitlines()) <= 60
    assert f"[{path.name}]({path.name})" in (FOLDER / "README.md").read_text()
    tests = [Path(__file__), Path(__file__).with_name("test_jobs.py")]
    assert any(path.stem in test.read_text() for test in tests)


def test_cifar10(torchvision) -> None:
    script = example("cifar10_resnet18")
    torch.save(script.cifar_resnet18().state_dict(), "weights.pth")
    data = tiny_images(20, size=8)
    run = script.main("weights.pth", data, data, budget=5_000, epochs=1)
    assert run.masks.count() == 5_000
    assert Path("runs/cifar10/report/report.html").exists()


def test_own_loop(capsys) -> None:
    net = example("own_loop").main(images=40, budget=5_000)
    assert fastbcd.masks(net).count() == 5_000
    assert "step 3: " in capsys.readouterr().out


@pytest.mark.skipif(find_spec("lightning") is None, reason=f"no lightning: {LEFT_OUT}")
@pytest.mark.filterwarnings("ignore")  # of Lightning
def test_lightning() -> None:
    net = example("lightning_loop").main(images=40, budget=14_112)
    assert fastbcd.masks(net).count() == 14_112


@pytest.mark.skipif(find_spec("transformers") is None, reason=f"no transformers: {LEFT_OUT}")
def test_hugging_face(capsys) -> None:
    run = example("hugging_face").main(images=20, budget=500, epochs=1)
    assert run.masks.count() == 500
    assert "torch.Size([1, 10])\nloss " in capsys.readouterr().out


def test_mobilenet(torchvision, capsys) -> None:
    run = example("mobilenet").main(images=20, budget=5_000, epochs=1)
    assert run.masks.count() == 5_000
    assert "35 calls were exchanged" in capsys.readouterr().out


def test_segmentation(capsys) -> None:
    run = example("segmentation").main(images=60, budget=2_000, epochs=1)
    assert run.masks.count() == 2_000
    assert re.search(r"\d\d\.\d %", capsys.readouterr().out)


def test_several_budgets() -> None:
    runs = example("several_budgets").main(images=20, budgets=(20_000, 9_000), epochs=2)
    assert [run.masks.count() for run in runs] == [20_000, 9_000]
    assert Path("runs/budgets/report/report.html").exists()


def test_imagenet_folder(torchvision) -> None:
    image = importlib.import_module("PIL.Image")
    for kind in ("cat", "dog"):
        Path("train", kind).mkdir(parents=True)
        for number in range(4):
            pixels = torch.randint(256, (40, 48, 3), dtype=torch.uint8)
            image.fromarray(pixels.numpy()).save(f"train/{kind}/{number}.png")
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(784, 2)
    )
    script = example("imagenet_folder")
    run = script.main("train", "train", model, budget=300, epochs=1, size=16)
    assert run.masks.count() == 300
    assert Path("train-packed-16").is_dir()


@pytest.mark.long
def test_two_machines() -> None:
    """Two ranks on this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(FOLDER / "two_machines.py"), "40", "5000", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "5,000 of 28,224 ReLUs" in done.stdout


def test_notebook(monkeypatch) -> None:
    """Every cell runs, and two of them draw; in the notebook's own first cell are the sizes."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(FOLDER / "demo.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)
    sizes = notebook.cells[1]
    assert sizes.source.startswith("IMAGES = 8_000\n")
    sizes.source = "IMAGES = 40\nEPOCHS = 1\nBUDGET = 9_000"
    monkeypatch.setenv("IPYTHONDIR", os.getcwd())
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    drawn = [output for output in shown if "image/png" in output.get("data", {})]
    assert len(drawn) == 2
    assert "9,000 of 28,224 ReLUs" in str(shown)

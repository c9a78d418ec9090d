"""Run directories of version 1, written before config.json had fields: read and resumed.

tests/runs/old_run holds runs that version 0.1 was stopped in: BCD after two of three steps, dense
training after two of three epochs, SNL after two epochs of masks. Beside each, in `uninterrupted`,
is the end of the same run without the interruption, also by version 0.1.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastbcd
from fastbcd.runs.files import read_state
from helpers.run_cases import records

OLD = Path(__file__).parent / "old_run"
KINDS = ("bcd", "dense", "snl")


def old_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 1, 7, 7), nn.BatchNorm2d(1), fastbcd.MaskedReLU((1, 4, 4)), nn.Flatten(),
        nn.Dropout(0.1), nn.Linear(16, 10),
    )  # fmt: skip


def resume(kind: str, run_dir: Path, **options: Any) -> None:
    """The call that version 0.1 was stopped in."""
    data = fastbcd.load("fashion-mnist-mini").first(48)
    common = {"test": data.first(20), "run_dir": run_dir, "resume": "must", **options}
    if kind == "bcd":
        fastbcd.bcd(
            old_net(), data, 3, drc=fastbcd.Adaptive(3, grow=1.5), rt=3, adt=1.0,
            proposal="saliency", finetune=fastbcd.Finetune(epochs=1, batch_size=16, lr=0.05),
            **common,
        )  # fmt: skip
    elif kind == "dense":
        fastbcd.train(old_net(), data, epochs=3, batch_size=16, **common)
    else:
        fastbcd.snl(
            old_net(), data, 10, max_epochs=3, lambda0=0.1, lr=0.05, batch_size=16,
            finetune=fastbcd.Finetune(epochs=1), **common,
        )  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As when the old runs were made: Adam magnifies the rounding of a bias before a batch norm."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=KINDS)
def old_run(request, tmp_path) -> Path:
    shutil.copytree(OLD / request.param, tmp_path / request.param)
    return tmp_path / request.param


@pytest.mark.filterwarnings("ignore:after 3 epochs:RuntimeWarning")
def test_an_old_run_resumes_to_the_result_of_the_old_code(old_run) -> None:
    config, begun = (old_run / "config.json").read_bytes(), len(records(old_run))
    resume(old_run.name, old_run)
    assert (old_run / "config.json").read_bytes() == config, "it stays a run of version 1"
    assert "digest" not in (old_run / "history.jsonl").read_text()
    expected = OLD / old_run.name / "uninterrupted"
    found, wanted = records(old_run), records(expected)
    assert len(found) == len(wanted) > begun
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.keys() >= theirs.keys() - {"alphas"}
        assert mine.get("overlaps") == theirs.get("overlaps")
        for key in theirs.keys() - {"seconds", "alphas", "engine", "overlaps"}:
            assert mine[key] == pytest.approx(theirs[key], abs=1e-4), key
    mine, theirs = (read_state(p / "state.safetensors").tensors for p in (old_run, expected))
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert mine[name].dtype == tensor.dtype
        assert torch.allclose(mine[name].double(), tensor.double(), atol=1e-4), name
    resume(old_run.name, old_run)
    assert len(records(old_run)) == len(wanted), "it is finished"


def test_an_old_run_of_another_device_resumes(tmp_path) -> None:
    run_dir = tmp_path / "bcd"
    shutil.copytree(OLD / "bcd", run_dir)
    path = run_dir / "config.json"
    path.write_text(path.read_text().replace(", cpu)", ", cuda:0)"))
    resume("bcd", run_dir)
    assert len(records(run_dir)) == 3


def test_an_old_run_is_read(old_run) -> None:
    run = fastbcd.load_run(old_run)
    assert run.config["data"] == {
        "name": None, "images": 48, "channels": 1, "height": 28, "width": 28, "classes": 10,
        "dtype": "uint8", "digest": "f15ab97be166a450",
    }  # fmt: skip
    assert run.config["net"]["arch"] is None
    assert (len(run.history), run.done, run.start.count()) == (2, False, 16)
    if run.kind == "snl":
        with pytest.raises(ValueError, match="no final net yet: SNL is still training masks"):
            fastbcd.load_run(old_run, model=old_net())
        return
    with pytest.raises(ValueError, match=r"pass it, load_run\(path, model=net\)"):
        run.model  # noqa: B018
    net = fastbcd.load_run(old_run, model=old_net()).model
    assert fastbcd.masks(net) == run.masks
    tensors = read_state(old_run / "state.safetensors").tensors
    assert torch.equal(net[5].weight, tensors["5.weight"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"test": None}, "test is .* there and null now"),
        ({"seed": 1}, r"settings\.seed is 0 there and 1 now"),
    ],
)
def test_another_call_does_not_resume_an_old_run(old_run, options, message) -> None:
    before = {p.name: p.read_bytes() for p in old_run.iterdir() if p.is_file()}
    with pytest.raises(ValueError, match=f"holds another run: {message}"):
        resume(old_run.name, old_run, **options)
    after = {p.name: p.read_bytes() for p in old_run.iterdir() if p.is_file()}
    assert {k: v for k, v in after.items() if k != ".lock"} == before


def test_an_old_state_of_another_run_is_refused(tmp_path) -> None:
    """Version 1 has no digests, but a state's record must be in the history."""
    run_dir = tmp_path / "bcd"
    shutil.copytree(OLD / "bcd", run_dir)
    path = run_dir / "history.jsonl"
    path.write_text(path.read_text().replace('"chosen": 2', '"chosen": 1'))
    with pytest.raises(ValueError, match=r"record: chosen is 2 and 1 in line 2 of history"):
        resume("bcd", run_dir)


def change_config(edit) -> Any:
    def change(run_dir: Path) -> None:
        config = json.loads((run_dir / "config.json").read_text())
        edit(config)
        (run_dir / "config.json").write_text(json.dumps(config))

    return change


def change_line(old: str, new: str) -> Any:
    def change(run_dir: Path) -> None:
        path = run_dir / "history.jsonl"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new, 1))

    return change


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_config(lambda c: c.pop("settings")), r"config\.json: settings is missing"),
        (change_config(lambda c: c.pop("data")), r"config\.json: data is missing"),
        (change_config(lambda c: c.update(data="mine")), r'data is "mine"; expected ImageData'),
        (change_config(lambda c: c.update(net=3)), r"config\.json: net is 3; expected dict"),
        (change_config(lambda c: c["net"].pop("sites")), r"net\.sites is missing"),
        (change_config(lambda c: c["net"]["sites"].update({"2": "x"})), r'net\.sites\.2 is "x"'),
        (change_config(lambda c: c["settings"].update(budget="3")), 'budget is "3"; expected int'),
        (change_config(lambda c: c["settings"].update(rt=True)), "rt is true; expected int"),
        (change_config(lambda c: c.update(format="theirs 2")), "format is 'theirs 2'; expected"),
        (change_config(lambda c: c.update(format=["x"])), r'format is \["x"\]; expected str'),
        (change_config(lambda c: c.update(format="fastbcd.run 9")), "version 1 or 2"),
        (lambda d: (d / "config.json").write_text("[]"), r"it is \[\]; expected dict"),
        (lambda d: (d / "config.json").write_text(DEEP), "config.json is not readable as JSON"),
        (lambda d: (d / "config.json").write_bytes(b"\xff"), "config.json is not readable as"),
        (change_line('"after": 13', '"after": "13"'), r'line 1: after is "13"; expected int'),
        (change_line('"after": 13, ', ""), r"history\.jsonl, line 1: after is missing"),
        (change_line('"after": 13', '"after": 13, "$x": 1'), r"line 1: '\$x' is not a field"),
        (change_line('"accepted": true', '"accepted": 1'), "accepted is 1; expected bool"),
        (change_line('"drops": {"0"', '"drops": {"zero"'), "drops has a key"),
        (change_line('"drops": {"0": 0.0}', '"drops": {"0": null}'), r"drops\.0 is null"),
        (change_line('"seconds": {', '"seconds": {"x": [], '), r"seconds\.x is \[\]"),
        (change_line('"number": 2', '"number": 7'), "line 2: number is 7, expected 2"),
        (change_line('{"number": 2', "{number: 2"), "line 2 is not readable as JSON"),
        (change_line('{"number": 1', DEEP), "line 1 is not readable as JSON"),
    ],
)  # fmt: skip
def test_fields_that_are_missing_or_of_another_type(change, message, tmp_path) -> None:
    """One error that names the file, the line and the field, on reading and on resuming."""
    run_dir = tmp_path / "bcd"
    shutil.copytree(OLD / "bcd", run_dir)
    change(run_dir)
    with pytest.raises(ValueError, match=message):
        fastbcd.load_run(run_dir)
    with pytest.raises(ValueError, match=message):
        resume("bcd", run_dir)

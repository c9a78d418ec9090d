"""Run directories: resuming, refusals, damaged files, full disks. Kills are in tests/hostile."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import fastbcd
from fastbcd.runs import fingerprint as snapshots
from fastbcd.runs.config import Config
from fastbcd.runs.directory import RunDirectory, State, read_start, read_state
from helpers.run_cases import contents, records, small_net, small_run

FAST = {"finetune": None, "drc": 30, "rt": 1, "test": None}


def config_of(**settings) -> Config:
    """What a run of these settings would be recorded as."""
    data = fastbcd.load("fashion-mnist-mini").first(4)
    return Config.of("bcd", {"budget": 3, "drc": 2, **settings}, small_net(), data=data, test=None)


# ------------------------------------------------------------------------------- resume


def test_the_same_call_again_returns_at_once(tmp_path, capsys) -> None:
    first = small_run(tmp_path, **FAST)
    before = contents(tmp_path)
    again = small_run(tmp_path, **FAST)
    assert f"the run in {tmp_path} is done: 3 steps, 8 ReLUs kept" in capsys.readouterr().out
    assert again.masks == first.masks
    assert [s.number for s in again.history] == [1, 2, 3]
    assert again.history == first.history
    assert contents(tmp_path) == before
    assert read_start(tmp_path).tensors["2.mask"].all()


def test_an_interrupted_run_resumes_from_the_disk(tmp_path, capsys) -> None:
    whole = small_run(None)
    # The weights that the second call is given do not matter: the run has its own.
    for number, step in enumerate(steps_of(tmp_path), 1):
        assert step.number == number
        if number == 3:
            break
    other = small_net()
    torch.nn.init.zeros_(next(other.parameters()))
    for step in steps_of(tmp_path, other):
        assert step.number >= 3
    assert f"resuming the run in {tmp_path} after step 2" in capsys.readouterr().out
    assert fastbcd.masks(other).count() == whole.masks.count()
    uninterrupted = small_net()
    for _ in steps_of(None, uninterrupted):
        pass
    for name, tensor in snapshots.take(uninterrupted).items():
        assert torch.equal(snapshots.take(other)[name], tensor)


def steps_of(run_dir, net=None):
    data = fastbcd.load("fashion-mnist-mini").first(48)
    return fastbcd.steps(net or small_net(), data, budget=8, drc=20, rt=2, run_dir=run_dir)


@pytest.mark.parametrize("resume", ["auto", True, "must"])
def test_resume_continues(resume, tmp_path) -> None:
    small_run(tmp_path, **FAST)
    assert len(small_run(tmp_path, **FAST, resume=resume).history) == 3


@pytest.mark.parametrize("resume", [False, "never"])
def test_never_refuses_what_is_there(resume, tmp_path) -> None:
    small_run(tmp_path / "new", **FAST, resume=resume)
    before = contents(tmp_path / "new")
    with pytest.raises(FileExistsError, match="is not empty"):
        small_run(tmp_path / "new", **FAST, resume=resume)
    assert contents(tmp_path / "new") == before


def test_must_wants_a_run(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no run in"):
        small_run(tmp_path / "none", **FAST, resume=True)
    assert not (tmp_path / "none").exists()


def test_what_cannot_change_the_outcome_may_change(tmp_path) -> None:
    small_run(tmp_path, **FAST)
    engine = fastbcd.Engine("sequential", wave=1, batch_size=7, memory=10**6)
    assert len(small_run(tmp_path, **FAST, engine=engine).history) == 3


def test_settings_may_be_numbers_of_numpy(tmp_path) -> None:
    small_run(tmp_path, **FAST)
    options = {"drc": np.int64(30), "rt": np.int32(1), "adt": np.float64(1.0), "seed": np.uint8(0)}
    assert len(small_run(tmp_path, **{**FAST, **options}).history) == 3
    small_run(tmp_path / "new", **{**FAST, **options})
    assert contents(tmp_path / "new") == contents(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 9}, r"budget is 8 there and 9 now"),
        ({"drc": lambda n: 5}, r"drc is 30 there and .function .*test_directory.*lambda"),
        ({"adt": 0.5}, r"adt is 1\.0 there and 0\.5 now"),
        ({"seed": 1}, r"seed is 0 there and 1 now"),
        ({"finetune": fastbcd.Finetune()}, r"finetune is null there and"),
        ({"test": fastbcd.load("fashion-mnist-mini", "test")}, "test is null there and"),
    ],
)
def test_other_settings_are_refused(options, message, tmp_path) -> None:
    small_run(tmp_path, **FAST)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=f"holds another run: {message}.*name another run_dir"):
        small_run(tmp_path, **{**FAST, **options})
    assert contents(tmp_path) == before


def test_another_net_is_refused(tmp_path) -> None:
    small_run(tmp_path, **FAST)
    data = fastbcd.load("fashion-mnist-mini").first(48)
    net = small_net()
    net[0] = torch.nn.Conv2d(1, 2, 5, 4, 2, bias=False)
    with pytest.raises(ValueError, match=r"net\.tensors\.0\.bias is .* and \(missing\) now"):
        fastbcd.bcd(net, data, 8, **{**FAST, "adt": 1.0}, run_dir=tmp_path)


def test_other_data_is_refused(tmp_path) -> None:
    small_run(tmp_path, **FAST)
    data = fastbcd.load("fashion-mnist-mini").first(49)
    with pytest.raises(ValueError, match=r"data\.images is 48 there and 49 now"):
        fastbcd.bcd(small_net(), data, 8, **{**FAST, "adt": 1.0}, run_dir=tmp_path)


# ------------------------------------------------------------------------------- damage


@pytest.fixture
def stopped(tmp_path) -> Path:
    """A run that was interrupted after two of its steps."""
    for step in steps_of(tmp_path):
        if step.number == 3:
            break
    return tmp_path


def resume_steps(run_dir: Path) -> list[int]:
    return [step.number for step in steps_of(run_dir)]


def test_the_fixture_resumes(stopped) -> None:
    assert resume_steps(stopped) == [3, 4, 5]


@pytest.mark.parametrize("where", [10, -1, 0])
def test_a_truncated_state_is_reported_and_the_one_before_it_is_kept(stopped, where) -> None:
    state = stopped / "state.safetensors"
    content = state.read_bytes()
    state.write_bytes(content[:where])
    previous = (stopped / "state.previous.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"damaged.*Move it away.*state\.previous"):
        resume_steps(stopped)
    assert (stopped / "state.previous.safetensors").read_bytes() == previous
    state.unlink()
    assert resume_steps(stopped) == [2, 3, 4, 5]


def test_an_edited_state_is_refused(stopped) -> None:
    state = stopped / "state.safetensors"
    content = bytearray(state.read_bytes())
    for position in (len(content) - 3, content.index(b'\\"before\\": 78') + 12):
        changed = bytearray(content)
        changed[position] ^= 1
        state.write_bytes(changed)
        with pytest.raises(ValueError, match="do not match their SHA-256"):
            resume_steps(stopped)
    state.unlink()
    (stopped / "state.previous.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"previous.* is damaged .* Put a copy"):
        resume_steps(stopped)


@pytest.mark.parametrize("name", ["config.json", "start.safetensors", "state.safetensors"])
def test_a_file_of_another_run_is_refused(name, stopped, tmp_path_factory) -> None:
    """Of a run with the same settings, whose weights differ."""
    other = tmp_path_factory.mktemp("other")
    net = small_net()
    torch.nn.init.zeros_(net[0].bias)
    for step in steps_of(other, net):
        if step.number == 3:
            break
    content = (other / name).read_bytes()
    (stopped / name).write_bytes(content.replace(b'"fastbcd"', b' "fastbcd"'))
    with pytest.raises(ValueError, match=r"was not written beside this|are not of one run"):
        resume_steps(stopped)


@pytest.mark.parametrize("edit", [lambda text: text + '{"number": 3, "bef', lambda text: text[:30]])
def test_the_history_file_follows_the_state(stopped, edit) -> None:
    path = stopped / "history.jsonl"
    text = path.read_text()
    path.write_text(edit(text))
    generator = steps_of(stopped)
    assert next(generator).number == 3
    generator.close()
    assert path.read_text() == text
    path.unlink()
    assert resume_steps(stopped) == [3, 4, 5]
    assert [record["number"] for record in records(stopped)] == [1, 2, 3, 4, 5]


def test_a_state_without_its_config(stopped) -> None:
    (stopped / "config.json").unlink()
    with pytest.raises(ValueError, match=r"holds history\.jsonl but no config\.json"):
        resume_steps(stopped)


@pytest.mark.parametrize("content", ["{", "[]", '{"format": "fastbcd.bcd 3"}', '"\\xff"', ""])
def test_a_config_that_is_none(content, stopped) -> None:
    (stopped / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json is damaged or not of a run"):
        resume_steps(stopped)


def test_a_file_is_no_directory(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="is a file; name a directory"):
        small_run(tmp_path / "file", **FAST)


@pytest.mark.parametrize("at", [1, 2])
def test_a_full_disk(tmp_path, monkeypatch, at) -> None:
    """The n-th call that makes a file durable fails, from step 2 on."""
    calls, real = 0, os.fsync

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    net = small_net()
    states = []
    data = fastbcd.load("fashion-mnist-mini").first(48)

    def train(net, step):
        if step.number == 2:
            monkeypatch.setattr(os, "fsync", full)
        torch.nn.init.constant_(net[5].bias, step.number)
        states.append(snapshots.take(net))

    options = {"drc": 20, "rt": 1, "finetune": train, "run_dir": tmp_path}
    with pytest.raises(OSError, match=r"step 2 could not be .*: No space left.* intact") as caught:
        fastbcd.bcd(net, data, 8, **options)
    assert caught.value.errno == errno.ENOSPC
    assert all(torch.equal(states[0][k], v) for k, v in snapshots.take(net).items())
    assert not list(tmp_path.glob(".*.tmp"))
    monkeypatch.setattr(os, "fsync", real)
    resumed = fastbcd.bcd(small_net(), data, 8, **options)
    whole = fastbcd.bcd(small_net(), data, 8, **{**options, "run_dir": None})
    assert resumed.masks == whole.masks
    for one, other in zip(resumed.history, whole.history, strict=True):
        assert dataclasses.replace(one, seconds={}) == dataclasses.replace(other, seconds={})


def test_two_at_once_are_refused(tmp_path) -> None:
    first = RunDirectory(tmp_path, config_of(), "auto")
    with pytest.raises(RuntimeError, match="another process is working in the run directory"):
        RunDirectory(tmp_path, config_of(), "auto")
    first.close()
    RunDirectory(tmp_path, config_of(), "auto").close()


@pytest.mark.parametrize("change", ["removed", "taken", "elsewhere", "here"])
def test_a_directory_that_another_process_may_have_is_not_written(tmp_path, change) -> None:
    """Its lock was removed, or it became a link to another directory; a link to itself is fine."""
    place = tmp_path / "run"
    directory = RunDirectory(place, config_of(), "auto")
    state = State({"a": torch.zeros(2)}, {}, [], False)
    if change in ("removed", "taken"):
        (place / ".lock").unlink()
    else:
        place.rename(tmp_path / "moved")
        (tmp_path / "other").mkdir()
        place.symlink_to(tmp_path / ("moved" if change == "here" else "other"))
    if change == "taken":
        RunDirectory(place, config_of(), "auto").close()
    if change == "here":
        directory.write(state)
        assert read_start(tmp_path / "moved") is not None
    else:
        with pytest.raises(RuntimeError, match=r"\.lock was removed or replaced while this run"):
            directory.write(state)
        assert read_start(place) is None
    directory.close()


def test_an_error_lets_go_of_the_lock(tmp_path) -> None:
    RunDirectory(tmp_path, config_of(), "auto").close()
    with pytest.raises(ValueError, match=r"drc is 2 there and 5 now"):
        RunDirectory(tmp_path, config_of(drc=5), "auto")
    RunDirectory(tmp_path, config_of(), "auto").close()


def test_only_what_a_killed_run_left_is_removed(tmp_path) -> None:
    """Temporary files of the user stay, and a directory that is refused is not changed at all."""
    own = [".notes.tmp", ".state.safetensors.mine.tmp", ".model.pt.123.tmp", "x.tmp"]
    left = [".state.safetensors.123.tmp", ".history.jsonl.7.tmp"]
    for name in (*own, *left):
        (tmp_path / name).write_bytes(b"half")
    with pytest.raises(FileExistsError, match="is not empty"):
        RunDirectory(tmp_path, config_of(), "never")
    assert {p.name for p in tmp_path.iterdir()} == {".lock", *own, *left}
    RunDirectory(tmp_path, config_of(), "auto").close()
    assert {p.name for p in tmp_path.iterdir()} == {".lock", "config.json", *own}
    for name in left:
        (tmp_path / name).write_bytes(b"half")
    with pytest.raises(ValueError, match="holds another run"):
        RunDirectory(tmp_path, config_of(drc=5), "auto")
    assert {p.name for p in tmp_path.iterdir()} == {".lock", "config.json", *own, *left}


def test_states_keep_every_dtype(tmp_path) -> None:
    tensors = {
        "a": torch.randn(3, 2), "b": torch.tensor(7), "c": torch.tensor([True, False]),
        "d": torch.randn(2).bfloat16(), "e": torch.empty(0, 3),
    }  # fmt: skip
    directory = RunDirectory(tmp_path, config_of(), "auto")
    start = State(tensors, {"value": 1.0}, [], False)
    directory.write(start)
    end = State(tensors, start.start, [{"number": 1}], True)
    directory.write(end)
    for back, wrote in ((read_start(tmp_path), start), (read_state(tmp_path), end)):
        assert back[1:] == wrote[1:]
        for name, tensor in tensors.items():
            assert back.tensors[name].dtype == tensor.dtype
            assert torch.equal(back.tensors[name], tensor)
    directory.close()

"""The digests that bind the files of a run: anything edited, moved or exchanged is refused."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

import fastbcd
from fastbcd.runs.files import history_line, line_digest
from helpers.run_cases import contents, small_net, small_run

ADAPTIVE = {"drc": fastbcd.Adaptive(8, grow=1.5), "rt": 2, "finetune": None, "budget": 20}
FILES = ("config.json", "history.jsonl", "start.safetensors", "state.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A finished run under Adaptive, whose next step depends on its history."""
    place = tmp_path_factory.mktemp("files") / "run"
    small_run(place, **ADAPTIVE)
    return place


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def refused(run_dir: Path, words: str) -> None:
    """The same error on reading and on resuming, and nothing is changed."""
    before = {p.name: p.read_bytes() for p in run_dir.iterdir()}
    with pytest.raises((ValueError, OSError), match=words):
        fastbcd.load_run(run_dir)
    with pytest.raises((ValueError, OSError), match=words):
        small_run(run_dir, **ADAPTIVE)
    assert {p.name: p.read_bytes() for p in run_dir.iterdir()} == before


def test_the_copy_is_accepted(whole, copy) -> None:
    small_run(copy, **ADAPTIVE)
    assert contents(copy) == contents(whole)


@pytest.mark.parametrize(
    ("old", "new"),
    [('"accepted": true', '"accepted": false'), ('"chosen": 0', '"chosen": 1'),
     ('"save": ', '"save": 1'), ('"stacked"', '"stackee"'), (", ", ",  "),
     ('"digest": "', '"digest": "0')],
)  # fmt: skip
def test_an_edited_word_in_the_history(copy, old, new) -> None:
    path = copy / "history.jsonl"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    refused(copy, r"history\.jsonl, line 1: digest does not match the line")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda lines: lines[1:], "line 1: number is 2, expected 1"),
        (lambda lines: [lines[0], *lines[2:]], "line 2: number is 3, expected 2"),
        (lambda lines: [lines[1], lines[0], *lines[2:]], "line 1: number is 2, expected 1"),
        (lambda lines: [lines[0], *lines], "line 2: number is 1, expected 2"),
        (lambda lines: [*lines, lines[-1]], "number is"),
        (lambda lines: lines[:-2], "records that the state has behind it"),
        (lambda lines: [*lines, b"{}\n"], "number is missing"),
        (lambda lines: [*lines, b"\n"], "is not readable as JSON"),
        (lambda lines: [lines[0], b"\0" * 40 + b"\n", *lines[1:]], "line 2 is not readable"),
    ],
    ids=["first missing", "one missing", "reordered", "duplicated", "last twice", "truncated",
         "an empty record", "an empty line", "zeros"],
)  # fmt: skip
def test_lines_that_are_missing_or_in_another_place(copy, edit, words) -> None:
    path = copy / "history.jsonl"
    path.write_bytes(b"".join(edit(path.read_bytes().splitlines(keepends=True))))
    refused(copy, words)


def test_a_line_that_was_added_with_a_digest_of_its_own(copy) -> None:
    """Lines after the state are left out, as after a state that was moved away."""
    path = copy / "history.jsonl"
    last = json.loads(path.read_text().splitlines()[-1])
    digest = last.pop("digest")
    record = {**last, "number": last["number"] + 1}
    with path.open("ab") as file:
        file.write(history_line(record, line_digest("0" * 64, record)))
    refused(copy, "digest does not match the line")
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    with path.open("ab") as file:
        file.write(history_line(record, line_digest(digest, record)))
    assert len(fastbcd.load_run(copy).history) == last["number"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("options", [{"seed": 1}, {"adt": 2.0}], ids=["seed", "adt"])
def test_files_of_another_run(copy, tmp_path, name, options) -> None:
    small_run(tmp_path / "other", **{**ADAPTIVE, **options})
    shutil.copy(tmp_path / "other" / name, copy / name)
    words = {
        "config.json": "holds another run|start.safetensors: previous is not the digest of config",
        "history.jsonl": r"history\.jsonl, line 1: digest does not match",
        "start.safetensors": r"start\.safetensors: previous is not the digest of config\.json",
        "state.safetensors": r"state\.safetensors: previous is not|records that the state",
    }
    refused(copy, words[name])


def test_a_start_of_the_same_settings_and_other_weights(copy, tmp_path) -> None:
    """config.json is the same, so only the digest of the start tells them apart."""
    data = fastbcd.load("fashion-mnist-mini").first(48)
    options = {**ADAPTIVE, "adt": 1.0, "test": data.first(20), "run_dir": tmp_path / "other"}
    fastbcd.bcd(small_net_of_another_seed(), data, **options)
    shutil.copy(tmp_path / "other" / "config.json", copy / "config.json")
    shutil.copy(tmp_path / "other" / "start.safetensors", copy / "start.safetensors")
    refused(copy, r"history\.jsonl, line 1: digest does not match")


def small_net_of_another_seed() -> torch.nn.Module:
    net = small_net()
    with torch.no_grad():
        next(net.parameters()).add_(1.0)
    return net


def test_a_missing_start(copy) -> None:
    (copy / "start.safetensors").unlink()
    refused(copy, r"start\.safetensors is missing: put it back")


@pytest.mark.parametrize("name", FILES)
def test_flipped_bits(copy, name) -> None:
    """One bit at a time, and every bit of the fields that are plain text: none is accepted."""
    content = (copy / name).read_bytes()
    before = contents(copy)
    rng = random.Random(7)
    places = [(rng.randrange(len(content)), rng.randrange(8)) for _ in range(60)]
    if name == "state.safetensors":
        places += [(p, bit) for p in range(8, 60) for bit in range(8)]
    for position, bit in places:
        changed = bytearray(content)
        changed[position] ^= 1 << bit
        (copy / name).write_bytes(changed)
        if (name, position) == ("history.jsonl", len(content) - 1):
            # Without the last newline the record is taken from the state.
            history = fastbcd.load_run(copy).history
            assert [r["after"] for r in history] == [r["after"] for r in before[1]]
            continue
        with pytest.raises(ValueError, match=rf"{name}|config\.json"):
            fastbcd.load_run(copy)


def test_the_config_has_fields_and_no_device(whole) -> None:
    config = json.loads((whole / "config.json").read_text())
    assert config["format"] == "fastbcd.run 2"
    data = config["data"]
    assert (data["name"], data["images"], data["classes"]) == ("fashion-mnist-mini", 48, 10)
    assert (data["channels"], data["height"], data["width"]) == (1, 28, 28)
    assert config["test"]["images"] == 20
    assert config["net"]["arch"] is None
    assert "cpu" not in (whole / "config.json").read_text()

"""Reading run directories: what they hold, also while a run is working or was interrupted."""

from __future__ import annotations

import dataclasses
import shutil
import warnings
from typing import Any

import pytest
import torch

import fastbcd
from fastbcd.runs.read import load_run
from fastbcd.runs.step import encode
from helpers.run_cases import records, small_net, small_run


def test_a_finished_run(finished) -> None:
    run = load_run(finished)
    assert (run.kind, run.title, run.done, run.count) == ("bcd", "BCD", True, 8)
    assert run.start.count() == 98
    assert [encode(step) for step in run.history] == records(finished)
    assert run.accuracy == run.history[-1].test_accuracy
    assert run.begin.test_accuracy is not None


def test_an_unfinished_run(cut_short) -> None:
    run = load_run(cut_short)
    assert (run.done, run.count, len(run.history)) == (False, 58, 2)


def test_reading_changes_nothing_and_follows_the_state(finished, tmp_path) -> None:
    """A run that is at work: its history file may be behind the state, or cut short."""
    place = tmp_path / "copy"
    shutil.copytree(finished, place)
    for history in (b"", (finished / "history.jsonl").read_bytes()[:-20]):
        (place / "history.jsonl").write_bytes(history)
        before = {p.name: p.read_bytes() for p in place.iterdir()}
        assert load_run(place).history == load_run(finished).history
        assert {p.name: p.read_bytes() for p in place.iterdir()} == before
    (place / "state.previous.safetensors").replace(place / "state.safetensors")
    assert len(load_run(place).history) == 4


def test_a_run_that_has_only_begun(tmp_path) -> None:
    def interrupted(net: torch.nn.Module, step: fastbcd.Step) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        small_run(tmp_path / "new", finetune=interrupted)
    run = load_run(tmp_path / "new")
    assert (run.count, run.history, run.done) == (98, [], False)


def test_masks_of_another_run_are_refused(finished, tmp_path) -> None:
    """The state of step 5, with 8 ReLUs, in the place of the start."""
    place = tmp_path / "run"
    shutil.copytree(finished, place)
    (place / "state.safetensors").replace(place / "start.safetensors")
    (place / "state.previous.safetensors").replace(place / "state.safetensors")
    with pytest.raises(ValueError, match=r"was not written beside this config\.json and start"):
        load_run(place)


@pytest.mark.parametrize("place", ["nothing", "file", "empty"])
def test_what_is_no_run_is_refused(place, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises((ValueError, OSError), match=r"there is nothing|is a file|holds no run"):
        load_run(tmp_path / place)


# ------------------------------------------------------------------------------------ load_run


def test_the_net_of_a_run_is_built_again(tmp_path) -> None:
    net = fastbcd.models.resnet20(10, image_size=28, in_channels=1, width=2, blocks=1)
    data = fastbcd.load("fashion-mnist-mini").first(30)
    count = fastbcd.masks(net).count()
    options = {"drc": 50, "rt": 1, "finetune": None}
    fastbcd.bcd(net, data, count - 100, run_dir=tmp_path / "bcd", **options)
    fastbcd.train(net, data, epochs=1, run_dir=tmp_path / "dense", batch_size=16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        fastbcd.snl(
            net, data, count - 300, max_epochs=1, batch_size=16, run_dir=tmp_path / "snl",
            finetune=fastbcd.Finetune(epochs=1),
        )  # fmt: skip
        poly = fastbcd.to_poly(net)
        fastbcd.autorep(
            poly, data, count - 400, epochs=1, batch_size=16, run_dir=tmp_path / "autorep",
            finetune=fastbcd.Finetune(epochs=1),
        )  # fmt: skip
    for kind, of in (("snl", net), ("autorep", poly)):
        run = fastbcd.load_run(tmp_path / kind)
        assert run.config.net.arch["name"] == "resnet20"
        assert run.masks == fastbcd.masks(of)
        assert bool(run.poly) == (kind == "autorep")
        x = next(data.batches(4))[0]
        with torch.no_grad():
            assert torch.equal(run.model(x), of.eval()(x))
    assert fastbcd.load_run(tmp_path / "bcd").masks.count() == count - 100
    assert fastbcd.load_run(tmp_path / "dense").model is not None


def test_a_given_net_is_filled(finished) -> None:
    run = fastbcd.load_run(finished)
    with pytest.raises(ValueError, match="a net of its own, which cannot be built from the run"):
        run.model  # noqa: B018
    net = small_net()
    run = fastbcd.load_run(finished, model=net)
    assert run.model is net
    assert fastbcd.masks(net) == run.masks
    assert run.masks.count() == 8
    other = small_net()
    other[0] = torch.nn.Conv2d(1, 2, 3, 4, 1)
    with pytest.raises(ValueError, match=r"does not fit Sequential.*0\.weight has shape"):
        fastbcd.load_run(finished, model=other)
    with pytest.raises(ValueError, match=r"does not fit Linear: Linear does not run on"):
        fastbcd.load_run(finished, model=torch.nn.Linear(2, 2))


@pytest.mark.parametrize("replacement", ["identity", "line", "poly"])
def test_a_model_without_masks_is_converted_as_the_run_was(replacement, tmp_path) -> None:
    def model() -> torch.nn.Module:
        conv = torch.nn.Conv2d(1, 2, 3, 4, 1)
        relu = torch.nn.ReLU(inplace=True)
        return torch.nn.Sequential(conv, relu, torch.nn.Flatten(), torch.nn.Linear(98, 10))

    mine = model().double()
    data = fastbcd.load("fashion-mnist-mini").first(20)
    done = fastbcd.linearize(
        mine, data, 30, epochs=1, replacement=replacement, progress=False, run_dir=tmp_path
    )
    other = model().double()
    before = {name: t.clone() for name, t in other.state_dict().items()}
    run = fastbcd.load_run(tmp_path, model=other)
    assert fastbcd.masks(run.model) == done.masks
    x = next(data.batches(4, dtype=torch.float64))[0]
    assert torch.equal(run.model(x), done.model.eval()(x))
    assert all(torch.equal(t, before[name]) for name, t in other.state_dict().items())


def test_a_recorded_net_that_does_not_fit_is_refused(tmp_path) -> None:
    """Also one that would take more memory than there is."""
    net = fastbcd.models.resnet20(10, image_size=28, in_channels=1, width=2, blocks=1)
    data = fastbcd.load("fashion-mnist-mini").first(30)
    count = fastbcd.masks(net).count()
    fastbcd.bcd(net, data, count - 50, drc=50, rt=1, finetune=None, run_dir=tmp_path)
    run = fastbcd.load_run(tmp_path)
    reasons: list[tuple[dict[str, Any], str]] = [
        ({"width": 10**6}, "width=1000000 is out of bounds"),
        ({"blocks": 10**7}, "blocks=10000000 is out of bounds"),  # before any is built
        ({"image_size": -1}, "image_size=-1 is out of bounds"),
        ({"blocks": 2}, "layer1.1.conv1.weight"),
        ({"evil": 1}, "evil"),
        ({"name": "resnet99"}, "resnet99"),
    ]
    for wrong, reason in reasons:
        arch = {**net.arch, **wrong}
        net_facts = dataclasses.replace(run.config.net, arch=arch)
        config = dataclasses.replace(run.config, net=net_facts)
        with pytest.raises(ValueError, match=rf"the recorded net .* does not fit: .*{reason}"):
            dataclasses.replace(run, config=config).model  # noqa: B018


def test_a_net_of_another_dtype_is_built_again(tmp_path) -> None:
    net = fastbcd.models.resnet20(10, image_size=28, in_channels=1, width=2, blocks=1).double()
    data = fastbcd.load("fashion-mnist-mini").first(30)
    count = fastbcd.masks(net).count()
    fastbcd.bcd(net, data, count - 50, drc=50, rt=1, finetune=None, run_dir=tmp_path)
    x = next(data.batches(4, dtype=torch.float64))[0]
    assert torch.equal(fastbcd.load_run(tmp_path).model(x), net.eval()(x))


@pytest.mark.parametrize("arch", ["tiny", {"name": "mine"}, {"name": ["x"]}, {"model": print}, 3])
def test_an_attribute_arch_of_a_users_net_is_not_taken_for_ours(arch, tmp_path) -> None:
    net, data = small_net(), fastbcd.load("fashion-mnist-mini").first(20)
    net.arch = arch
    fastbcd.bcd(net, data, 90, drc=10, rt=1, finetune=None, run_dir=tmp_path)
    assert fastbcd.load_run(tmp_path).config.net.arch is None

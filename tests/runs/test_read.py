"""Reading run directories: what they hold, also while a run is working or was interrupted."""

from __future__ import annotations

import dataclasses
import shutil
import warnings
from pathlib import Path

import pytest
import torch

import fastbcd
from fastbcd.runs.stages import read
from helpers.run_cases import records, small_net, small_run


def test_a_finished_run(finished) -> None:
    found = read(finished)
    stage = found.bcd
    assert stage is not None
    assert (found.name, stage.done, stage.count, stage.steps_to_go()) == ("whole", True, 8, 0)
    assert stage.start.count() == 98
    assert stage.history == records(finished)
    steps = [(r["after"], r["test_accuracy"]) for r in records(finished)]
    assert [point[:2] for point in found.curve()] == [(98, stage.start_accuracy), *steps]
    assert [point.sites for point in found.curve()] == [[98], [78], [58], [38], [18], [8]]


def test_an_unfinished_run(cut_short) -> None:
    found = read(cut_short)
    stage = found.bcd
    assert stage is not None
    assert (stage.done, stage.count, len(stage.history), stage.steps_to_go()) == (False, 58, 2, 3)


def test_reading_changes_nothing_and_follows_the_state(finished, tmp_path) -> None:
    """A run that is at work: its history may be ahead of the state, behind it, or cut short."""
    place = tmp_path / "copy"
    shutil.copytree(finished, place)
    lines = (finished / "history.jsonl").read_bytes().splitlines(keepends=True)
    for history in (b"".join(lines[:-1]), b"".join(lines[:-1]) + lines[-1][:20]):
        (place / "history.jsonl").write_bytes(history)
        before = {p.name: p.read_bytes() for p in place.iterdir()}
        stage = read(place).bcd
        assert stage is not None
        found = [{**r, "seconds": None} for r in stage.history]
        assert found == [{**r, "seconds": None} for r in records(finished)]
        assert {p.name: p.read_bytes() for p in place.iterdir()} == before
    (place / "history.jsonl").write_bytes(b"".join(lines))
    (place / "state.previous.safetensors").replace(place / "state.safetensors")
    stage = read(place).bcd
    assert stage is not None
    assert len(stage.history) == 4


def test_a_run_that_has_only_begun(tmp_path) -> None:
    def interrupted(net: torch.nn.Module, step: fastbcd.Step) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        small_run(tmp_path / "new", finetune=interrupted)
    found = read(tmp_path / "new")
    assert (found.last.count, found.last.history, found.curve()) == (98, [], [])


@pytest.mark.parametrize(("budget", "steps"), [(501, 1), (500, 1), (499, 2), (250, 2), (0, 10)])
def test_steps_to_go_by_the_last_share(finished, budget, steps) -> None:
    """Of 2,000 ReLUs the last step left 1,000; 1000/2^10 is the first below 1."""
    settings = {"budget": budget, "drc": {"schedule": "Fraction", "share": 0.5}}
    history = [{"before": 2000, "drc": 1000, "count": 1000}]
    stage = dataclasses.replace(
        read(finished).last, masks=None, history=history, config={"settings": settings}
    )
    assert stage.steps_to_go() == steps


@pytest.mark.parametrize("sites", ["[3, 2]", '["3"]', "[1.5]"])
def test_sites_of_a_step_that_are_none(sites, tmp_path) -> None:
    """Records of version 1 have no digest."""
    shutil.copytree(Path(__file__).parent / "old_run" / "bcd", tmp_path / "bcd")
    path = tmp_path / "bcd" / "history.jsonl"
    path.write_text(path.read_text().replace('"after": 13', f'"sites": {sites}, "after": 13'))
    with pytest.raises(ValueError, match=r"history\.jsonl, line 1: sites is .* expected 1 whole"):
        read(tmp_path / "bcd")


def test_stages_of_a_chain(stages) -> None:
    found = read(stages)
    assert [stage.kind for stage in found.stages] == ["dense", "snl", "bcd"]
    assert all(stage.done for stage in found.stages)
    assert found.dense is not None
    final = records(stages / "2-snl")[-1]["accuracy"]["final"]
    assert found.curve()[0] == (60, final, [60])
    assert found.dense.accuracy == records(stages / "1-dense")[-1]["test_accuracy"]


def test_masks_of_another_run_are_refused(finished, tmp_path) -> None:
    """The state of step 5, with 8 ReLUs, in the place of the start."""
    place = tmp_path / "run"
    shutil.copytree(finished, place)
    (place / "state.safetensors").replace(place / "start.safetensors")
    (place / "state.previous.safetensors").replace(place / "state.safetensors")
    with pytest.raises(
        ValueError, match=r"start\.safetensors: previous is not the digest of config\.json"
    ):
        read(place)


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
        assert run.config["net"]["arch"]["name"] == "resnet20"
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
    with pytest.raises(ValueError, match=r"does not fit Linear"):
        fastbcd.load_run(finished, model=torch.nn.Linear(2, 2))


def test_the_last_stage_of_a_recipe_is_loaded(stages) -> None:
    run = fastbcd.load_run(stages, model=small_net())
    assert (run.kind, run.path.name, run.masks.count()) == ("bcd", "3-bcd", 20)


def test_a_recorded_net_that_does_not_fit_is_refused(tmp_path) -> None:
    """Also one that would take more memory than there is."""
    net = fastbcd.models.resnet20(10, image_size=28, in_channels=1, width=2, blocks=1)
    data = fastbcd.load("fashion-mnist-mini").first(30)
    count = fastbcd.masks(net).count()
    fastbcd.bcd(net, data, count - 50, drc=50, rt=1, finetune=None, run_dir=tmp_path)
    run = fastbcd.load_run(tmp_path)
    for wrong in ({"width": 10**6}, {"blocks": 2}, {"evil": 1}, {"name": "resnet99"}):
        arch = {**net.arch, **wrong}
        config = {**run.config, "net": {**run.config["net"], "arch": arch}}
        with pytest.raises(ValueError, match=r"the recorded net .* does not fit"):
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
    assert fastbcd.load_run(tmp_path).config["net"]["arch"] is None

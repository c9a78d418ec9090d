"""run_recipe on a small recipe: all stages, an interruption, another recipe's directory."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from safetensors.torch import save_file

import fastbcd
from fastbcd import recipes
from fastbcd.cli import inputs
from fastbcd.cli.main import main
from fastbcd.recipes import run as recipe_run
from fastbcd.runs import fingerprint as snapshots

# One batch per stage: the tests are about how the stages follow each other.
STAND_IN = recipes.Recipe(
    "stand-in", "resnet20", "fashion-mnist-mini", "snl", b_ref=144_000, budget=143_900, drc=60,
    adt=0.3, rt=2, epochs=1, optimizer="sgd", lr=1e-3,
)  # fmt: skip
QUICK = {
    "snl": {"max_epochs": 1, "finetune": fastbcd.Finetune(epochs=1, lr=1e-3)},
    "autorep": {"epochs": 1},
}
# SNL warns that it does not reach the budget in its one epoch.
pytestmark = pytest.mark.filterwarnings("ignore:after 1 epochs:RuntimeWarning")


@pytest.fixture(scope="module")
def data():
    return fastbcd.load("fashion-mnist-mini").first(10)


@pytest.fixture(scope="module")
def dense():
    return recipe_run.build(STAND_IN, seed=5).eval()


def run(path, data, dense, start="snl", **options):
    recipe = dataclasses.replace(STAND_IN, start=start)
    return recipe_run.run_recipe(
        recipe, path, data, dense=dense, start_options=QUICK[start], **options
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data, dense):
    """A finished recipe from SNL, and its directory."""
    before = snapshots.take(dense)
    place = tmp_path_factory.mktemp("whole")
    done = run(place, data, dense)
    after = snapshots.take(dense)
    assert all(torch.equal(before[k], after[k]) for k in before), "the teacher was changed"
    return done, place


def test_stages(whole) -> None:
    done, place = whole
    assert fastbcd.masks(done.model).count() == 143_900
    assert [step.before for step in done.history] == [144_000, 143_940]
    assert sorted(p.name for p in place.iterdir()) == ["2-snl", "3-bcd", "config.json"]


def test_from_autorep(tmp_path, data, dense) -> None:
    done = run(tmp_path, data, dense, "autorep")
    assert done.masks.count() == 143_900
    assert isinstance(done.model.alpha, fastbcd.MaskedPoly)


def test_an_interrupted_recipe_ends_as_an_uninterrupted_one(
    tmp_path, whole, data, dense, monkeypatch
) -> None:
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(recipe_run, "bcd", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, data, dense)
    state = tmp_path / "2-snl" / "state.safetensors"
    written = state.stat().st_mtime_ns
    cut = run(tmp_path, data, dense)
    assert state.stat().st_mtime_ns == written, "a finished stage was run again"
    one, other = snapshots.take(whole[0].model), snapshots.take(cut.model)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[k], other[k]) for k in one)


def test_bad_input(tmp_path, whole, data, dense) -> None:
    images = data.images.expand(-1, 3, -1, -1)
    coloured = fastbcd.ImageData.from_arrays(images, data.labels, classes=10)
    with pytest.raises(ValueError, match="stand-in needs fashion-mnist-mini: images 1×28×28"):
        run(tmp_path, coloured, dense)
    other = fastbcd.models.resnet20(10, 28, 1, width=8)
    with pytest.raises(ValueError, match=r"not the resnet20 of stand-in: alpha\.mask is"):
        run(tmp_path, data, other)
    thin = copy.deepcopy(dense)
    fastbcd.set_masks(thin, fastbcd.masks(thin).without([0]))
    with pytest.raises(ValueError, match="keeps 144,255 of 144,256"):
        run(tmp_path, data, thin)
    with pytest.raises(ValueError, match=r'recipe.start is "snl" there and "autorep" now'):
        run(whole[1], data, dense, "autorep")
    with pytest.raises(ValueError, match="seed is 0 there and 1 now"):
        run(whole[1], data, dense, seed=1)


def test_the_dense_stage(tmp_path, data, capsys) -> None:
    """The first stage trains the teacher of the others; a second call reads it."""
    options = {"dense_options": {"epochs": 1, "lr": 0.01}, "progress": True}
    first = run(tmp_path, data, None, **options)
    assert (tmp_path / "1-dense" / "state.safetensors").exists()
    assert [line[:6] for line in capsys.readouterr().out.splitlines() if " of 3: " in line] == [
        "1 of 3", "2 of 3", "3 of 3",
    ]  # fmt: skip
    again = run(tmp_path, data, None, **options)
    one, other = snapshots.take(first.model), snapshots.take(again.model)
    assert all(torch.equal(one[k], other[k]) for k in one)
    assert not any(m.training for m in again.model.modules())


def test_initial_weights_depend_on_the_seed_alone() -> None:
    one, same, other = (recipe_run.build(STAND_IN, seed).conv1.weight for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_the_command(tmp_path, whole, data, dense, monkeypatch, capsys) -> None:
    """--recipe with the weights of the dense net; options that the recipe fixes are refused."""
    monkeypatch.setitem(recipes.RECIPES, "stand-in", STAND_IN)
    monkeypatch.setattr(inputs, "load_data", lambda options: (data, data))
    given = {}
    monkeypatch.setattr(recipe_run, "run_recipe", lambda *a, **k: given.update(k) or whole[0])
    save_file(dense.state_dict(), tmp_path / "dense.safetensors")
    options = ["bcd", "--recipe", "stand-in", "--run-dir", str(tmp_path / "run")]
    assert main([*options, "--weights", str(tmp_path / "dense.safetensors")]) == 0
    assert "143,900 ReLUs kept" in capsys.readouterr().out
    assert torch.equal(given["dense"].conv1.weight, dense.conv1.weight)
    assert main(options) == 0
    assert given["dense"] is None
    with pytest.raises(SystemExit):
        main([*options, "--drc", "200"])
    assert "--drc 200 does not go with --recipe" in capsys.readouterr().err
    assert main([*options, "--dry-run"]) == 0
    assert "2 steps of 60" in capsys.readouterr().out

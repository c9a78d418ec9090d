"""Importers: the same logits as the published structure, and every way a file can be wrong."""

from __future__ import annotations

import argparse
import functools
import logging
import zipfile

import pytest
import torch

import fastbcd
from fastbcd import models
from fastbcd.starts.checkpoints.files import CheckpointError, check_state
from helpers import published_nets as published

ARCHS = ["resnet18", "wide_resnet22_8"]
AUTOREP = functools.partial(fastbcd.load_autorep, scale_x2=0.1)
IMAGES = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def save_snl(path, net, prefix="", edit=lambda state: None, **more):
    state = {prefix + name: value.detach().clone() for name, value in net.state_dict().items()}
    edit(state)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3, 0.9).state_dict()
    torch.save({"arch": "resnet18_in", "state_dict": state, "optimizer": optimizer, **more}, path)
    return path


def save_autorep(path, net, edit=lambda state: None):
    state = dict(net.state_dict())
    edit(state)
    torch.save({"epoch": 7, "state_dict": state, "best_prec1": 71.6, "is_best": True}, path)
    return path


# ----------------------------------------------------------------------------------- logits


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("prefix", ["", "module."])
def test_snl_logits(tmp_path, arch, prefix) -> None:
    theirs = published.snl(arch)
    net = fastbcd.load_snl(save_snl(tmp_path / "c.pth", theirs, prefix))
    with torch.no_grad():
        torch.testing.assert_close(net(IMAGES), theirs(IMAGES), atol=1e-5, rtol=1e-5)
    kept = sum(int(v.sum()) for k, v in theirs.state_dict().items() if k.endswith("alphas"))
    assert fastbcd.masks(net).count() == kept == net.import_report.kept
    assert net.import_report.ignored == ["arch", "optimizer"]
    assert not net.import_report.notes
    assert not net.training


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("s", "clip"), [(0.1, None), (2.0, 0.5)])
def test_autorep_logits(tmp_path, arch, s, clip) -> None:
    theirs = published.autorep(arch, 2, s, clip or 9.0)
    path = save_autorep(tmp_path / "c.pth", theirs)
    before = kept_by(torch.load(path)["state_dict"])
    net = fastbcd.load_autorep(path, clip2=clip, scale_x2=s)
    with torch.no_grad():
        expected = theirs(IMAGES)
        assert expected.isfinite().all()
        scale = float(expected.abs().max())
        torch.testing.assert_close(net(IMAGES) / scale, expected / scale, atol=1e-5, rtol=1e-5)
    after = kept_by(theirs.state_dict())
    assert fastbcd.masks(net).count() == after
    assert before != after, "the hysteresis must matter in this test"
    assert {"bn_0.running_mean", "itr_cnt"} <= set(net.import_report.ignored)


def kept_by(state) -> int:
    """ReLUs that the masks of one alias keep."""
    alias = next(k for k in state if k.endswith("alpha_mask_0_0")).removesuffix("alpha_mask_0_0")
    return sum(int(v.sum()) for k, v in state.items() if k.startswith(alias + "alpha_mask"))


def test_relupruner_logits(tmp_path) -> None:
    theirs = published.snl("resnet18")
    state = {
        k.replace("shortcut.0", "conv_sc").replace("shortcut.1", "bn_sc"): v
        for k, v in theirs.state_dict().items()
        if not k.endswith("alphas")
    }
    masks = [v[0] for k, v in theirs.state_dict().items() if k.endswith("alphas")]
    content = {"format_version": 1, "epoch": 3, "model": state, "config": {"a": 1}, "metrics": {}}
    torch.save({**content, "masks": masks, "relu_count": 5}, tmp_path / "c.pth")
    net = fastbcd.load_relupruner(tmp_path / "c.pth", arch="resnet18")
    with torch.no_grad():
        torch.testing.assert_close(net(IMAGES), theirs(IMAGES), atol=1e-5, rtol=1e-5)
    assert "relu_count" in net.import_report.ignored
    torch.save({**content, "masks": [0.5 * m for m in masks]}, tmp_path / "soft.pth")
    with pytest.raises(
        CheckpointError, match=r"soft\.pth: masks\[0\] holds values other than 0 and 1"
    ):
        fastbcd.load_relupruner(tmp_path / "soft.pth")
    torch.save(content, tmp_path / "dense.pth")
    with pytest.raises(
        CheckpointError, match=r"has no masks of ReLUPruner: it holds conv1\.weight"
    ):
        fastbcd.load_relupruner(tmp_path / "dense.pth")


def test_one_more_mask_is_the_stems_or_the_final_relu(tmp_path) -> None:
    net = models.wide_resnet22_8(5, 8, factor=1, final_relu=True)
    state = {k: v for k, v in net.state_dict().items() if not k.endswith(".mask")}
    masks = [b.float() for b in fastbcd.masks(net).split()]
    torch.save({"model": state, "masks": masks}, tmp_path / "c.pth")
    imported = fastbcd.load_relupruner(tmp_path / "c.pth")
    assert fastbcd.masks(imported).sites[-1].name == "alpha"
    assert "final_relu" in str(imported.import_report)
    torch.save({"model": state, "masks": masks[2:]}, tmp_path / "c.pth")
    with pytest.raises(
        CheckpointError, match=r"wide_resnet22_8 .* 1 missing: block3\.layer\.2\.alpha2\.mask"
    ):
        fastbcd.load_relupruner(tmp_path / "c.pth")


def test_an_imported_net_is_ready_for_bcd(tmp_path) -> None:
    """A removed unit stays removed, also where AutoReP's aux would bring it back."""
    net = fastbcd.load_autorep(
        save_autorep(tmp_path / "c", published.autorep("resnet18")), scale_x2=1
    )
    data = IMAGES, torch.arange(6) % 5
    removal = fastbcd.masks(net).sample(40, seed=0, step=0, trial=0)
    choice = fastbcd.choose(net, [removal], data, adt=100.0)
    fastbcd.set_masks(net, fastbcd.masks(net).without(choice.removal))
    net.train()(IMAGES).sum().backward()
    net.eval()(IMAGES)
    assert not fastbcd.masks(net).bits[removal].any()
    assert not any("aux" in name for name in net.state_dict())


def test_the_report_is_readable_and_logged(tmp_path, caplog) -> None:
    def soften(state) -> None:
        state["layer1.0.alpha1.alphas"] *= 0.5

    path = save_snl(tmp_path / "c.pth", published.snl("resnet18"), edit=soften)
    with caplog.at_level(logging.INFO, "fastbcd"):
        net = fastbcd.load_snl(path)
    text = str(net.import_report)
    assert "SNL checkpoint of resnet18 (width 4, 5 classes)" in text
    assert "neither 0 nor 1" in text
    assert "ignored: arch, optimizer" in text
    assert text in caplog.text
    # the threshold decides
    assert fastbcd.masks(fastbcd.load_snl(path, threshold=0.6)).counts()["layer1.0.alpha1"] == 0
    assert fastbcd.masks(net).counts()["layer1.0.alpha1"] > 0


# ---------------------------------------------------------------------------------- bad files


def drop(key):
    return lambda state: state.pop(key)


def put(key, value):
    return lambda state: state.update({key: value})


@pytest.mark.parametrize(
    ("edit", "options", "words"),
    [
        (None, {"arch": "wide_resnet22_8"}, "has arch='resnet18', expected 'wide_resnet22_8'"),
        (None, {"num_classes": 100}, "has num_classes=5, expected 100"),
        (None, {"image_size": 32}, "has image_size=8, expected 32"),
        (drop("layer2.0.alpha1.alphas"), {}, r"resnet18 .*1 missing: layer2\.0\.alpha1\.mask"),
        (put("layer2.2.alpha1.alphas", torch.ones(1, 8, 4, 4)), {},
         r"not expected: layer2\.2\.alpha1\.mask"),
        (put("layer1.0.alpha1.beta", torch.ones(4)), {}, r"1 not expected: layer1\.0\.alpha1"),
        (drop("bn1.weight"), {}, "1 missing: bn1.weight"),
        (put("bn9.weight", torch.ones(4)), {}, "1 not expected: bn9.weight"),
        (put("bn1.weight", torch.ones(5)), {}, r"bn1.weight has shape \(5,\), expected \(4,\)"),
        (put("bn1.weight", torch.full((4,), torch.nan)), {}, "bn1.weight holds .* not finite"),
        (put("layer1.0.alpha1.alphas", torch.ones(1, 4, 8, 4)), {},
         r"layer1.0.alpha1.mask has shape \(4, 8, 4\)"),
        (put("layer1.0.alpha1.alphas", torch.ones(2, 4, 8, 8)), {},
         r"shape \(2, 4, 8, 8\).*channels, height"),
        (put("layer1.2.conv1.weight", torch.ones(4, 4, 3, 3)), {},
         r"not expected: layer1\.2\.conv1\.weight.*build that network"),
        (drop("conv1.weight"), {}, "conv1.weight is missing: it holds bn1.weight"),
    ],
)  # fmt: skip
def test_bad_snl_files(tmp_path, edit, options, words) -> None:
    path = save_snl(tmp_path / "c.pth", published.snl("resnet18"), edit=edit or (lambda s: None))
    with pytest.raises(ValueError, match=words):
        fastbcd.load_snl(path, **options)


@pytest.mark.parametrize(
    ("edit", "options", "words"),
    [
        (None, {"scale_x2": None}, "pass scale_x2=0.1"),
        (
            put("model.layer2.0.relu.poly_para_0_0", torch.ones(1, 4, 1, 1)),
            {},
            "of 'poly_para_0_0' differ",
        ),
        (put("model.linear.weight", torch.ones(5, 9)), {}, "linear.weight has shape"),
        (None, {"image_size": 64}, "has image_size=8, expected 64"),
    ],
)
def test_bad_autorep_files(tmp_path, edit, options, words) -> None:
    path = save_autorep(tmp_path / "c", published.autorep("resnet18"), edit or (lambda s: None))
    with pytest.raises(ValueError, match=words):
        fastbcd.load_autorep(path, **{"scale_x2": 0.1, **options})


@pytest.mark.parametrize(
    ("leaf", "value", "words"),
    [
        ("alpha_mask_15_0", None, r"2 missing: layer4\.1\.alpha2\.coef"),
        ("alpha_mask_3_0", None, r"2 missing: layer1\.1\.alpha2\.coef"),
        ("alpha_aux_3_0", None, "alpha_aux_3_0 is missing"),
        ("alpha_aux_3_0", torch.ones(2, 2), r"alpha_aux_3_0 has shape \(2, 2\)"),
        ("poly_para_5_2", None, "poly_para_5_2 is missing"),
        ("poly_para_5_2", torch.full((1, 8, 1, 1), torch.inf), "poly_para_5_2 holds values"),
        ("poly_para_0_1", None, "poly_para_0_1 is missing"),
    ],
)
def test_bad_autorep_activations(tmp_path, leaf, value, words) -> None:
    """The same edit under every alias."""

    def edit(state) -> None:
        for key in [k for k in state if k.endswith("." + leaf)]:
            state.pop(key) if value is None else state.update({key: value})

    path = save_autorep(tmp_path / "c.pth", published.autorep("resnet18"), edit)
    with pytest.raises(CheckpointError, match=words):
        fastbcd.load_autorep(path, scale_x2=0.1)


def test_the_wrong_loader_names_the_right_one(tmp_path) -> None:
    snl = save_snl(tmp_path / "snl.pth", published.snl("resnet18"))
    autorep = save_autorep(tmp_path / "autorep.pth", published.autorep("resnet18"))
    with pytest.raises(CheckpointError, match="use load_autorep"):
        fastbcd.load_snl(autorep)
    with pytest.raises(CheckpointError, match="use load_snl"):
        AUTOREP(snl)
    torch.save(models.resnet18(5, 8, width=4).state_dict(), tmp_path / "dense.pth")
    for loader in (fastbcd.load_snl, AUTOREP):
        with pytest.raises(CheckpointError, match="has no masks of"):
            loader(tmp_path / "dense.pth")


@pytest.mark.parametrize("loader", [fastbcd.load_snl, AUTOREP, fastbcd.load_relupruner])
def test_files_that_are_no_checkpoints(tmp_path, loader) -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        loader(tmp_path / "nothing.pth")
    with pytest.raises(CheckpointError, match="is not a file"):
        loader(tmp_path)
    for content in (b"", b"hello, this is text", b"PK\x03\x04 half a zip"):
        (tmp_path / "text").write_bytes(content)
        with pytest.raises(CheckpointError, match="is no checkpoint, or it is damaged"):
            loader(tmp_path / "text")
    torch.save([1, 2], tmp_path / "list")
    with pytest.raises(CheckpointError, match="holds a list"):
        loader(tmp_path / "list")
    torch.save({"epoch": 3, "loss": torch.zeros(())}, tmp_path / "other")
    with pytest.raises(CheckpointError, match="no state_dict: it holds epoch, loss"):
        loader(tmp_path / "other")
    torch.save({"state_dict": {}, "args": argparse.Namespace(lr=0.1)}, tmp_path / "objects")
    with pytest.raises(CheckpointError, match=r"argparse\.Namespace.*if you trust it, save"):
        loader(tmp_path / "objects")


def test_weights_without_batch_norms_counters_load(tmp_path) -> None:
    """As in checkpoints that were written for other libraries."""
    net = fastbcd.models.resnet20(10, 8, width=4, blocks=1)
    weights = {k: v for k, v in net.state_dict().items() if not k.endswith((".mask", "_tracked"))}
    other = fastbcd.models.resnet20(10, 8, width=4, blocks=1)
    needed = {k: v for k, v in other.state_dict().items() if not k.endswith(".mask")}
    check_state(needed, weights, "a file", "the net")
    other.load_state_dict(weights, strict=False)
    assert all(torch.equal(v, other.state_dict()[k]) for k, v in weights.items())
    del weights["bn1.running_mean"]
    with pytest.raises(CheckpointError, match=r"1 missing: bn1\.running_mean"):
        check_state(needed, weights, "a file", "the net")


ODD = {
    "missing": None,
    "0-d": torch.tensor(1.0),
    "empty": torch.zeros(10**9, 0, 3, 3),
    "sparse": torch.ones(2, 2).to_sparse(),
    "meta": torch.ones(4, device="meta"),
    "complex": torch.ones(4, dtype=torch.complex64),
    "float8": torch.ones(4).to(torch.float8_e4m3fn),
    "stride 0": torch.zeros(1).expand(10**9, 10**3),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
@pytest.mark.parametrize(
    "leaf", ["conv1.weight", "layer1.0.conv1.weight", "linear.weight", "bn1.weight", "mask"]
)
def test_odd_tensors_are_refused_before_a_net_is_built(tmp_path, monkeypatch, leaf, odd) -> None:
    """In each of the three formats."""
    build = models.build

    def on_meta(*args, **options):
        assert torch.get_default_device().type == "meta", "a net is built from a bad file"
        return build(*args, **options)

    def edit(state) -> None:
        for key in [k for k in state if k.removeprefix("model.") == leaf or k in names]:
            state.pop(key) if odd is None else state.update({key: odd})

    monkeypatch.setattr(models, "build", on_meta)
    snl, autorep = published.snl("resnet18"), published.autorep("resnet18")
    masks = [k for k in snl.state_dict() if k.endswith("alphas")]
    names = [masks[0]] if leaf == "mask" else []
    with pytest.raises(CheckpointError):
        fastbcd.load_snl(save_snl(tmp_path / "snl.pth", snl, edit=edit))
    names = [k for k in autorep.state_dict() if k.endswith("alpha_mask_0_0")]
    names = names if leaf == "mask" else []
    with pytest.raises(CheckpointError):
        fastbcd.load_autorep(save_autorep(tmp_path / "autorep.pth", autorep, edit), scale_x2=0.1)
    state = dict(snl.state_dict())
    bits = [state.pop(name)[0] for name in masks]
    if leaf == "mask":
        bits[0] = odd
    names = []
    edit(state)
    torch.save({"model": state, "masks": bits}, tmp_path / "pruned.pth")
    with pytest.raises(CheckpointError):
        fastbcd.load_relupruner(tmp_path / "pruned.pth")


@pytest.mark.filterwarnings("ignore")  # torch deprecates quantised, warns of nested ones
def test_quantised_and_nested_tensors_are_refused(tmp_path) -> None:
    quantised = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for value in (quantised, nested):
        path = save_snl(
            tmp_path / "c.pth", published.snl("resnet18"), edit=put("bn1.weight", value)
        )
        with pytest.raises(CheckpointError, match=r"bn1.weight is not a dense tensor"):
            fastbcd.load_snl(path)


def test_a_checkpoint_that_unpacks_to_more_than_the_file_is_refused(tmp_path) -> None:
    torch.save({"state_dict": {"conv1.weight": torch.zeros(10**6)}}, tmp_path / "c.pth")
    with (
        zipfile.ZipFile(tmp_path / "c.pth") as whole,
        zipfile.ZipFile(tmp_path / "bomb.pth", "w", zipfile.ZIP_DEFLATED) as bomb,
    ):
        for name in whole.namelist():
            bomb.writestr(name, whole.read(name))
    assert (tmp_path / "bomb.pth").stat().st_size < 10_000
    with pytest.raises(CheckpointError, match=r"bomb.pth .*it unpacks to 4,000,\d+ bytes"):
        fastbcd.load_snl(tmp_path / "bomb.pth")

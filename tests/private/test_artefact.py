"""The artefact: a net as operations that plain numpy computes."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fastbcd
from fastbcd import private
from fastbcd.private.artefact import artefact_of
from fastbcd.private.two_party.artefact import KEY, Artefact
from helpers.engines import small_net

ROOM = Path(private.__file__).parent / "two_party"


def kinds(artefact: Artefact) -> Counter:
    return Counter(operation["kind"] for operation in artefact.operations)


@pytest.mark.parametrize("replacement", ["identity", "line", "poly"])
def test_an_artefact_computes_the_logits(replacement, tmp_path) -> None:
    net, images = small_net(replacement), torch.randn(6, 3, 8, 8)
    path = tmp_path / "net.pi"
    assert private.export(net, images, path) < 1e-5
    artefact = Artefact.open(path)
    with torch.no_grad():
        expected = net(images).numpy()
    np.testing.assert_allclose(artefact.logits(images.numpy()), expected, rtol=1e-4, atol=1e-5)
    assert artefact.about["checked"]["images"] == 6
    assert artefact.about["checked"]["same_class"] == 1.0


def test_only_kept_relus_are_evaluated_and_quadratics_are_squares() -> None:
    net = small_net("poly", relus=40)
    artefact = artefact_of(net, torch.randn(2, 3, 8, 8))
    sizes = Counter()
    for operation in artefact.operations:
        sizes[operation["kind"]] += int(np.prod(operation["shape"]))
    masks = fastbcd.masks(net)
    assert sizes["relu"] == 40
    assert sizes["square"] == masks.total - 40
    assert kinds(artefact)["convolution"] == 7  # batch norms are parts of them
    assert kinds(artefact)["relu"] == sum(count > 0 for count in masks.counts().values())


def test_a_site_without_relus_leaves_nothing() -> None:
    artefact = artefact_of(small_net("identity", relus=0), torch.randn(2, 3, 8, 8))
    layers = {operation["layer"] for operation in artefact.operations}
    assert "relu" not in kinds(artefact)
    assert not [layer for layer in layers if "alpha" in layer]


class Pools(nn.Module):
    """Pools, a slice, a concatenation, a batch norm that no layer takes in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.conv = nn.Conv2d(3, 6, 3, stride=2, padding=1, groups=3)
        self.most = nn.MaxPool2d(3, 2, 1)
        self.mean = nn.AvgPool2d(2, 1)
        self.last = nn.Linear(24, 5)
        nn.init.uniform_(self.norm.running_var, 0.5, 1.5)
        nn.init.uniform_(self.norm.bias, -0.5, 0.5)

    def forward(self, x):
        x = self.most(self.conv(self.norm(x).relu()))
        x = torch.cat([x[:, ::2], x[:, 1::2].square()], 1)
        x = self.mean(x) - 2 * x[:, :, 1:, 1:] / 3 + 1
        return self.last(x.flatten(1))


def test_pools_slices_and_norms() -> None:
    torch.manual_seed(0)
    images = torch.randn(3, 3, 9, 9)
    artefact = artefact_of(fastbcd.convert(Pools().eval(), images), images)
    comparisons = sum(
        int(np.prod(operation["shape"]))
        for operation in artefact.operations
        if operation["kind"] == "relu" and operation["layer"] == "most"
    )
    assert comparisons == 6 * 3 * 3 * (9 - 1)
    scale = next(o for o in artefact.operations if o["layer"] == "norm")["of"][1]
    assert scale in artefact.about["secret"]


def test_a_wrong_artefact_is_not_written(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(Artefact, "logits", lambda self, images: np.zeros((len(images), 5)))
    with pytest.raises(RuntimeError, match="other logits"):
        private.export(small_net("line"), torch.randn(2, 3, 8, 8), tmp_path / "net.pi")
    assert not (tmp_path / "net.pi").exists()


def test_the_client_sees_no_weights() -> None:
    artefact = artefact_of(small_net("line"), torch.randn(2, 3, 8, 8))
    public = Artefact.read(artefact.without_secrets().written(), "sent")
    secret = set(artefact.about["secret"])
    assert len(secret) == 2 * 8  # weights and biases of 7 convolutions and a linear layer
    assert secret.isdisjoint(public.tensors)
    assert public.about == artefact.about
    assert public.fingerprint() == artefact.fingerprint()


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "no artefact"), (b"\x02\0\0\0\0\0\0\0{}", "no artefact"), (None, "version 0")],
)
def test_other_files_are_refused(data, message, tmp_path) -> None:
    if data is None:
        about = artefact_of(nn.Linear(3, 2), torch.randn(2, 3)).about
        data = Artefact({**about, "version": 0}, {}).written()
    (tmp_path / "net.pi").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        Artefact.open(tmp_path / "net.pi")


def test_images_of_another_shape_are_refused() -> None:
    artefact = artefact_of(nn.Linear(3, 2), torch.randn(2, 3))
    artefact.check_images(np.zeros((1, 3), np.float32))
    for images in (np.zeros((1, 4)), np.zeros(3), np.zeros((0, 3)), np.full((1, 3), np.nan)):
        with pytest.raises(ValueError, match=r"images|image or more"):
            artefact.check_images(images)


def test_what_is_not_an_operation_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match="tanh at '0' is not among"):
        artefact_of(nn.Sequential(nn.Tanh()), torch.randn(2, 3))
    with pytest.raises(ValueError, match="float32"):
        private.export(nn.Linear(3, 2).double(), torch.randn(2, 3).double(), "net.pi")


def test_the_reader_needs_numpy_and_safetensors_only() -> None:
    allowed = {"__future__", "hashlib", "json", "numpy", "pathlib", "safetensors", "typing"}
    tree = ast.parse((ROOM / "artefact.py").read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    assert names <= allowed
    for path in ROOM.glob("*.py"):
        assert not re.search(r"(from|import) fastbcd", path.read_text()), path


def test_the_file_is_described_by_json(tmp_path) -> None:
    private.export(nn.Linear(3, 2), torch.randn(2, 3), tmp_path / "net.pi")
    data = (tmp_path / "net.pi").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    about = json.loads(header["__metadata__"][KEY])
    assert about["fixed_point"] == [64, 16]
    assert [operation["kind"] for operation in about["operations"]] == ["product"]

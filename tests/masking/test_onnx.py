"""torch.onnx.export takes nets with masks as they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fastbcd


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch deprecates parts of itself
def test_a_plain_onnx_export(tmp_path) -> None:
    pytest.importorskip("onnxscript")
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    x = torch.randn(2, 3, 8, 8)
    net = nn.Sequential(fastbcd.convert(model.eval(), x), fastbcd.MaskedPoly(5)).eval()
    fastbcd.set_masks(net, fastbcd.masks(net).without(range(0, 149, 2)))
    path, shapes = str(tmp_path / "net.onnx"), ({0: torch.export.Dim("batch")},)
    torch.onnx.export(net, (x,), path, dynamo=True, dynamic_shapes=shapes, verbose=False)
    session = pytest.importorskip("onnxruntime").InferenceSession(path)
    for batch in (1, 2, 7):
        x = torch.randn(batch, 3, 8, 8)
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), net(x))


def test_symbolic_shapes_are_those_of_the_operator() -> None:
    """With a decomposition, torch takes symbolic shapes from that unless told otherwise."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = torch.randn(2, 4, 5, 5).to(memory_format=torch.channels_last)
    mask = torch.ones(4, 5, 5, dtype=torch.bool)
    real = fastbcd.ops.masked_relu(x, mask)
    fake = fastbcd.ops.masked_relu(mode.from_tensor(x), mode.from_tensor(mask))
    assert [int(n) for n in fake.stride()] == list(real.stride())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_old_exporter_is_refused_with_the_way_out(tmp_path) -> None:
    net = nn.Sequential(nn.Linear(3, 4), fastbcd.MaskedReLU(4))
    with pytest.raises(RuntimeError, match=r"use dynamo=True, or fastbcd.private.export"):
        torch.onnx.export(net, (torch.randn(2, 3),), str(tmp_path / "net.onnx"), dynamo=False)

"""The rows of private_inference.py on its small net, by two parties of each engine."""

from __future__ import annotations

import private_inference
import pytest
import torch

from fastbcd import private
from fastbcd.private.running import ENGINES
from helpers.engines import need

pytestmark = pytest.mark.long

# The largest error of predicted bytes. A merged net of this size fills no ciphertext of Cheetah.
BYTES_WITHIN = {"crypten": 0.01, "spu-semi2k": 0.02, "spu-cheetah": 0.04}
MERGED_CHEETAH_WITHIN = 0.4


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", private_inference.KINDS)
def test_a_row_agrees_with_plaintext_and_with_cost(engine, kind) -> None:
    need(engine)
    net, image = private_inference.net_of("small", kind, engine)
    result = private.run(net, image, engine)
    assert result.agreement["same_class"] == 1.0
    assert result.agreement["difference"] < 0.02
    assert "OTHER CLASS" not in private_inference.row(kind, result, 0.0)
    predicted = result.predicted
    if (engine, kind) == ("spu-cheetah", "poly"):
        assert predicted.bytes is None  # what a quadratic sends there is not known
        return
    within = BYTES_WITHIN[engine]
    if (engine, kind) == ("spu-cheetah", "merged"):
        within = MERGED_CHEETAH_WITHIN
    assert abs(predicted.bytes / result.total.bytes - 1) < within
    assert abs(predicted.total.messages - result.total.messages) <= 1


@pytest.mark.parametrize("engine", ENGINES)
def test_images_of_a_run_share_messages_as_predicted(engine) -> None:
    need(engine)
    net, _ = private_inference.net_of("small", "line", engine)
    torch.manual_seed(1)
    images = torch.randn(4, 3, 16, 16)
    one = private.run(net, images[:1], engine)
    four = private.run(net, images, engine)
    assert four.total.messages == one.total.messages
    assert one.total.bytes < four.total.bytes < 4 * one.total.bytes
    assert four.predicted.images == 4
    assert abs(four.predicted.total.messages - four.total.messages) <= 1
    assert abs(four.predicted.bytes / four.total.bytes - 1) < BYTES_WITHIN[engine]

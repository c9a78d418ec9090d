"""Records: written and read by their annotations."""

from __future__ import annotations

import json
import math

import pytest

from fastbcd.runs.step import Epoch, Start, Step, decode, encode

STEP = Step(
    number=2, before=40, after=31, drc=10, tried=3, chosen=2, accepted=False,
    drops={0: 1.5, 2: math.inf}, base_accuracy=80.0, base_loss=1.0, chosen_accuracy=79.0,
    chosen_loss=1.1, engine="stacked", sites=[20, 11], returned=1, cost=0.25, images={-1: 90, 0: 9},
    interval=(0.5, 2.5), test_accuracy=78.25, train_loss=0.5, seconds={"score": 2.0, "test": 0.01},
)  # fmt: skip
EPOCH = Epoch(number=1, epoch=0, phase="masks", count=31, notes={"lambda": 1e-5}, loss=1.25)


@pytest.mark.parametrize("record", [STEP, EPOCH, Start(value=3.5, sites=2, memory={"cpu": 7})])
def test_a_record_survives_json(record) -> None:
    assert decode(type(record), json.loads(json.dumps(encode(record))), "here") == record


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("number", "2", r"here: Expected `int`, got `str` - at `\$.number`"),
        ("drops", {"first": 1.0}, "Expected `int`, got `str` - at `key` in"),
        ("sites", [1.5], "Expected `int`"),
        ("engine", None, "Expected `str`, got `null`"),
    ],
)
def test_a_field_of_another_type_is_refused(field, value, message) -> None:
    with pytest.raises(ValueError, match=message):
        decode(Step, {**encode(STEP), field: value}, "here")
    fields = encode(STEP)
    del fields["engine"]
    with pytest.raises(ValueError, match="missing required field `engine`"):
        decode(Step, fields, "here")


def test_a_step_is_one_line() -> None:
    assert str(STEP) == (
        "step 2: 40 → 31 ReLUs, cost 0.25, exhausted after 3, train 80.00 → 79.00 %, loss 0.5000, "
        "test 78.25 %, 2.0 s"
    )
    assert str(EPOCH) == "epoch 1: 31 ReLUs, lambda 1e-05, loss 1.2500, 0.0 s"

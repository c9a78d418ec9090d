"""Pickles: arrays are read, whatever asks for more is refused and not run."""

from __future__ import annotations

import contextlib
import pickle

import numpy as np
import pytest

from fastbcd.data import cifar as unpickling
from helpers.archive_files import DTYPE, python2_array, python2_batch, text


def test_arrays_in_column_order_and_other_byte_orders():
    images = np.arange(2 * 3072, dtype=np.uint32).astype(np.uint8).reshape(2, 3, 32, 32)
    batch = unpickling.unpickle_arrays(python2_batch(images, [1, 2], fortran=True), "memory")
    assert np.array_equal(batch["data"].reshape(images.shape), images)
    for dtype in (">i4", "<i8", ">u2", "|i1"):
        array = np.array([[1, 100], [3, 4]], dtype=dtype)
        read = unpickling.unpickle_arrays(pickle.dumps({"x": array}, protocol=4), "memory")
        assert np.array_equal(read["x"], array)


class Attack:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_hostile_pickles_are_refused_and_not_run(protocol, tmp_path):
    mark = tmp_path / "run"
    code = f"open({str(mark)!r}, 'w').close()"
    for attack in (Attack(exec, code), Attack(eval, code), Attack(mark.touch)):
        for value in (attack, {"data": attack}, {"labels": [1, [attack]]}, {attack: 1}):
            raw = pickle.dumps(value, protocol=protocol)
            with pytest.raises(ValueError, match=r"m cannot be read \(it asks for .* is refused"):
                unpickling.unpickle_arrays(raw, "m")
    assert not mark.exists()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", "os.system"),
        (b"(S'true'\nios\nsystem\n.", "os.system"),  # the INST opcode
        (b"(cos\nsystem\nS'true'\no.", "os.system"),  # the OBJ opcode
        (b"cnumpy\nload\n(S'x'\ntR.", "numpy.load"),
        (b"cnumpy.core.multiarray\nfromfile\n.", "numpy.core.multiarray.fromfile"),
        (b"\x80\x04\x8c\x05numpy\x8c\x10ndarray.__init__\x93.", "numpy.ndarray.__init__"),
        (b"c__builtin__\ngetattr\n.", "getattr"),
        (b"Pid\n.", "persistent"),
        (b"\x80\x02\x82\x01.", "extension"),
        (b"", "cannot be read"),
        (b"garbage", "cannot be read"),
        (b"cnumpy\nndarray\n.", "holds a type"),
        (b"\x80\x02}r\xff\xff\xff\x7f.", "a memo of 2,147,483,647 entries"),  # 32 GiB
        (b"(dp2000000000\n.", "a memo of 2,000,000,000 entries"),
    ],
)
def test_pickles_that_ask_for_more_than_arrays(raw, message):
    with pytest.raises(ValueError, match=rf"m cannot be read.*{message}|{message}.*get it again"):
        unpickling.unpickle_arrays(raw, "m")


@pytest.mark.parametrize("name", ["numpy\nndarray", "numpy\ndtype", "numpy.core.multiarray\nscalar",
                                  "numpy.core.multiarray\n_reconstruct"])  # fmt: skip
def test_pickles_cannot_change_what_they_are_given(name):
    """BUILD with (None, {...}) sets attributes on whatever lies on the stack."""
    good = pickle.dumps({"x": np.arange(3)}, protocol=4)
    for state in (b"(N}V__module__\nVhacked\nst", b"}Vhacked\nI1\ns", b"(N}V__doc__\nN\nst"):
        with pytest.raises(ValueError, match="m cannot be read"):
            unpickling.unpickle_arrays(b"c" + name.encode() + b"\n" + state + b"b.", "m")
        assert unpickling.unpickle_arrays(good, "m")["x"].tolist() == [0, 1, 2]
        assert pickle.dumps({"x": np.arange(3)}, protocol=4) == good


class Reduced:
    """Pickles as a call of a function and a state."""

    def __init__(self, *parts):
        self.parts = parts

    def __reduce__(self):
        return self.parts


@pytest.mark.parametrize(
    ("code", "state"),
    [
        ("V8", (3, "|", None, ("a",), {"a": (np.dtype("i8"), 100_000)}, 8, 1, 0)),
        ("O", (3, "|", None, None, None, -1, -1, 63)),
        ("i8", (3, "<", None, None, None, -1, -1, 63)),
        ("i8", (3, "<", (np.dtype("i8"), (1000,)), None, None, 8, 1, 0)),
        ("i8", (3, "<", None, ("a",), {"a": (np.dtype("i8"), 100_000)}, 8, 1, 0)),
    ],
)
def test_dtypes_that_reach_beyond_the_array(code, state):
    """numpy's own dtype takes such states and reads foreign memory."""
    dtype = Reduced(np.dtype, (code, False, True), state)
    array = Reduced(
        np._core.multiarray._reconstruct,
        (np.ndarray, (0,), b"b"),
        (1, (2,), dtype, False, bytes(16)),
    )
    raw = pickle.dumps({"data": array}, protocol=4)
    if code == "i8":  # nothing but the byte order is taken from the state
        read = unpickling.unpickle_arrays(raw, "m")["data"]
        assert (read.dtype, read.tolist()) == (np.dtype("<i8"), [0, 0])
    else:
        with pytest.raises(ValueError, match=f"an array of dtype '{code}', not whole numbers"):
            unpickling.unpickle_arrays(raw, "m")


@pytest.mark.parametrize("state", [b"N", b"(K\x01t", b"(K\x01(K\x02t" + DTYPE + b"\x89U\x01xt"])
def test_arrays_with_a_wrong_state(state):
    array = python2_array(np.zeros(1, np.uint8)).split(b"tR")[0] + b"tR" + state + b"b"
    with pytest.raises(ValueError, match="m cannot be read"):
        unpickling.unpickle_arrays(b"\x80\x02}(" + text(b"data") + array + b"u.", "m")


def test_pickle_cut_short_or_garbled_anywhere():
    raw = python2_batch(np.zeros((1, 3, 32, 32), np.uint8), [3])
    for length in [*range(200), *range(200, len(raw), 97)]:
        with pytest.raises(ValueError, match="m cannot be read"):
            unpickling.unpickle_arrays(raw[:length], "m")
    rng = np.random.default_rng(0)
    short = raw[:230] + raw[-60:]
    for _ in range(300):
        garbled = bytearray(short)
        garbled[rng.integers(len(short))] = rng.integers(256)
        with contextlib.suppress(ValueError):  # a dict or our error, never another
            assert isinstance(unpickling.unpickle_arrays(bytes(garbled), "m"), dict)

""".npz files: damaged ones are refused by name."""

from __future__ import annotations

import zipfile

import numpy as np
import pytest

from fastbcd.data import npz
from fastbcd.data.npz import npz_keys, read_npz


def test_npz_damaged(tmp_path):
    path = tmp_path / "x.npz"
    with pytest.raises(FileNotFoundError, match=r"no file .*x\.npz"):
        npz_keys(path)
    np.savez(path, images=np.arange(1000), labels=np.arange(10))
    whole = path.read_bytes()
    for length in [0, 1, 5, 100, 4000, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"x\.npz is not an \.npz file or is cut short"):
            read_npz(path, "images")
    path.write_bytes(whole[:2000] + b"\xff" + whole[2001:])
    with pytest.raises(ValueError, match=r"x\.npz: the array 'images' cannot be read .*CRC"):
        read_npz(path, "images")
    assert read_npz(path, "labels").tolist() == list(range(10))
    np.savez(path, images=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match=r"'images' cannot be read .*Python objects"):
        read_npz(path, "images")
    np.save(tmp_path / "x.npy", np.arange(3))
    with pytest.raises(ValueError, match="holds one array"):
        npz_keys(tmp_path / "x.npy")


def test_npz_that_unpacks_to_far_more_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "x.npz"
    monkeypatch.setattr(npz, "LARGEST", 1 << 20)
    np.savez_compressed(path, images=np.zeros(5 << 20, np.uint8), labels=np.zeros(9, np.int64))
    assert path.stat().st_size < 10_000
    with pytest.raises(ValueError, match=r"x\.npz: the array 'images' .*to 5,243,\d+ bytes"):
        read_npz(path, "images")
    assert read_npz(path, "labels").shape == (9,)
    np.savez(path, images=np.zeros(5 << 20, np.uint8))
    assert read_npz(path, "images").shape == (5 << 20,)


def bigger(raw, count):
    """The header says another number of elements; padding keeps its length."""
    old, new = b"(10,), }", f"({count},), }}".encode()
    return raw.replace(old.ljust(len(new)), new)


def test_npz_whose_header_claims_more_than_the_file_holds(tmp_path):
    path = tmp_path / "x.npz"
    np.save(tmp_path / "x.npy", np.zeros(10, np.uint8))
    raw = (tmp_path / "x.npy").read_bytes()
    for count in ("1" + "0" * 10, "1" + "0" * 17):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("images.npy", bigger(raw, count))
        with pytest.raises(ValueError, match=r"x\.npz: the array 'images' cannot be read"):
            read_npz(path, "images")

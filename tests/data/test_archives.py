"""CIFAR's archives and .npz files: as published they are read, damaged they are refused."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from fastbcd.data import archives
from fastbcd.data.sources import load
from helpers.archive_files import FORMS, cifar, python3_batch, scalar_batch, write_folder, write_tar

# ----------------------------------------------------------------------------------- CIFAR


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_cifar(form, packed, tmp_path):
    classes, folder, archive, files, expected = cifar(form)
    path = (
        write_tar(tmp_path / archive, folder, files)
        if packed
        else write_folder(tmp_path / folder, files)
    )
    for root in (tmp_path, path):
        assert archives.find_cifar(root, classes) == path
    for split, (images, labels) in expected.items():
        x, y = archives.read_cifar(path, classes, split, len(images))
        assert x.dtype == np.uint8
        assert y.dtype == np.int64
        assert np.array_equal(x, images)
        assert y.tolist() == labels


def test_cifar_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "PUBLISHED", {"train": 10, "test": 2})
    _, folder, _, files, expected = cifar("10 python")
    write_folder(tmp_path / folder, files)
    for root in (tmp_path, tmp_path / folder):
        train, test = load("cifar10", root=root), load("cifar10", "test", root)
        assert np.array_equal(train.images, expected["train"][0])
        assert test.labels.tolist() == expected["test"][1]
        assert (test.classes, test.std) == (10, (0.2023, 0.1994, 0.2010))


@pytest.mark.parametrize("write", [python3_batch, scalar_batch])
def test_cifar_pickles_written_anew(write, tmp_path):
    _, folder, _, files, expected = cifar("10 python")
    images, labels = expected["test"]
    write_folder(tmp_path / folder, {**files, "test_batch": write(images, labels)})
    x, y = archives.read_cifar(tmp_path / folder, 10, "test", 2)
    assert np.array_equal(x, images)
    assert y.tolist() == labels


def test_plain_tar_is_read_too(tmp_path):
    classes, folder, _, files, expected = cifar("10 binary")
    path = write_tar(tmp_path / "cifar.tar", folder, files, compress=False)
    assert np.array_equal(archives.read_cifar(path, classes, "train", 10)[0], expected["train"][0])


@pytest.mark.parametrize("form", FORMS)
def test_cifar_archive_cut_short(form, tmp_path):
    classes, folder, archive, files, _ = cifar(form)
    path = write_tar(tmp_path / archive, folder, files)
    whole = path.read_bytes()
    for length in [*range(0, len(whole), len(whole) // 12), len(whole) - 8, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises((ValueError, FileNotFoundError), match=f"{archive}.*get"):
            archives.read_cifar(path, classes, "train", 10)


def test_cifar_archive_with_a_wrong_byte(tmp_path):
    classes, folder, archive, files, _ = cifar("10 binary")
    path = write_tar(tmp_path / archive, folder, files)
    whole = bytearray(path.read_bytes())
    # Random pixels are stored, not compressed: only the checksum at the end tells.
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=rf"{archive} is damaged .*get it again"):
        archives.read_cifar(path, classes, "train", 10)


@pytest.mark.parametrize("form", FORMS)
def test_cifar_file_cut_short(form, tmp_path):
    classes, folder, _, files, _ = cifar(form)
    name = list(files)[-2]  # the last file of the train set
    whole = files[name]
    record = len(whole) // (2 if classes == 10 else 10)
    for length in [
        0,
        1,
        2,
        100,
        3000,
        record,
        len(whole) // 2,
        len(whole) - record,
        len(whole) - 1,
    ]:
        write_folder(tmp_path / folder, {**files, name: whole[:length]})
        with pytest.raises(ValueError, match=rf"{folder}: {name} .*(get it again|cannot be read)"):
            archives.read_cifar(tmp_path / folder, classes, "train", 10)


def test_cifar_is_checked_against_what_was_published(tmp_path):
    classes, folder, _, files, _ = cifar("10 binary")
    write_folder(tmp_path / folder, files)
    with pytest.raises(ValueError, match=r"data_batch_1\.bin has 2 images instead of 10000"):
        archives.read_cifar(tmp_path / folder, classes, "train")


def test_cifar_file_missing(tmp_path):
    classes, folder, _, files, _ = cifar("10 python")
    del files["data_batch_3"]
    write_folder(tmp_path / folder, files)
    with pytest.raises(
        FileNotFoundError, match="has no data_batch_3, so it is not a whole CIFAR-10"
    ):
        archives.read_cifar(tmp_path / folder, classes, "train", 10)
    with pytest.raises(FileNotFoundError, match=r"no file or folder .*nowhere"):
        archives.read_cifar(tmp_path / "nowhere", classes, "train", 10)
    assert archives.find_cifar(tmp_path / "nowhere", 10) is None


@pytest.mark.parametrize(
    ("form", "bad"), [("10 python", 10), ("10 binary", 11), ("100 binary", 100)]
)
def test_cifar_label_out_of_range(form, bad, tmp_path):
    classes, folder, _, files, expected = cifar(form)
    images, labels = expected["test"]
    name = list(files)[-1]
    files[name] = FORMS[form][-1](images, [*labels[:-1], bad])
    write_folder(tmp_path / folder, files)
    message = rf"{name}: labels\[{len(labels) - 1}\] is {bad}; with {classes} classes"
    with pytest.raises(ValueError, match=message):
        archives.read_cifar(tmp_path / folder, classes, "test", len(labels))


PIXELS = np.zeros((2, 3072), np.uint8)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([1, 2], "holds a list, not a dict"),
        ({}, "has no 'data'; it has nothing"),
        ({"data": PIXELS, "fine": [0, 1]}, "has no 'labels'; it has data, fine"),
        ({"data": PIXELS[:, 1:], "labels": [0, 1]}, r"data is uint8 \(2, 3071\), not uint8"),
        ({"data": PIXELS.astype(np.int32), "labels": [0, 1]}, r"data is int32 \(2, 3072\)"),
        ({"data": PIXELS.astype(float), "labels": [0, 1]}, "dtype 'f8', not of whole numbers"),
        ({"data": "pixels", "labels": [0, 1]}, "data is <class 'str'>"),
        ({"data": PIXELS, "labels": [0]}, r"labels are \(1,\) beside 2 images"),
        ({"data": PIXELS, "labels": [0, "cat"]}, "labels are not a list of whole numbers"),
        ({"data": PIXELS, "labels": [0, 0.5]}, "labels are not a list of whole numbers"),
        ({"data": PIXELS, "labels": None}, "labels are not a list of whole numbers"),
        ({"data": PIXELS, "labels": [0, 2**70]}, "labels are not a list of whole numbers"),
    ],
)
def test_cifar_pickle_with_other_contents(batch, message, tmp_path):
    write_folder(tmp_path, {"test_batch": pickle.dumps(batch, protocol=4)})
    with pytest.raises(ValueError, match=rf"test_batch.*{message}"):
        archives.read_cifar(tmp_path, 10, "test", 2)


# ------------------------------------------------------------------------------------ .npz


def test_npz_damaged(tmp_path):
    path = tmp_path / "x.npz"
    with pytest.raises(FileNotFoundError, match=r"no file .*x\.npz"):
        archives.npz_keys(path)
    np.savez(path, images=np.arange(1000), labels=np.arange(10))
    whole = path.read_bytes()
    for length in [0, 1, 5, 100, 4000, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"x\.npz is not an \.npz file or was cut short"):
            archives.read_npz(path, "images")
    path.write_bytes(whole[:2000] + b"\xff" + whole[2001:])
    with pytest.raises(ValueError, match=r"x\.npz: the array 'images' cannot be read .*CRC"):
        archives.read_npz(path, "images")
    assert archives.read_npz(path, "labels").tolist() == list(range(10))
    np.savez(path, images=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match=r"'images' cannot be read .*Python objects"):
        archives.read_npz(path, "images")
    np.save(tmp_path / "x.npy", np.arange(3))
    with pytest.raises(ValueError, match="holds one array"):
        archives.npz_keys(tmp_path / "x.npy")

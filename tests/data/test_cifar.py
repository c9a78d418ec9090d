"""CIFAR's archives and folders: as published they are read, damaged they are refused."""

from __future__ import annotations

import gzip
import pickle
import tarfile

import numpy as np
import pytest

from fastbcd.data import cifar as cifar_files
from fastbcd.data.sources import load
from helpers.archive_files import FORMS, cifar, python3_batch, scalar_batch, write_folder, write_tar


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
        assert cifar_files.find_cifar(root, classes) == path
    for split, (images, labels) in expected.items():
        x, y = cifar_files.read_cifar(path, classes, split, len(images))
        assert x.dtype == np.uint8
        assert y.dtype == np.int64
        assert np.array_equal(x, images)
        assert y.tolist() == labels


def test_cifar_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar_files, "PUBLISHED", {"train": 10, "test": 2})
    _, folder, _, files, expected = cifar("10 python")
    write_folder(tmp_path / folder, files)
    for root in (tmp_path, tmp_path / folder):
        train, test = load("cifar10", root=root), load("cifar10", "test", root)
        assert np.array_equal(train.images, expected["train"][0])
        assert test.labels.tolist() == expected["test"][1]
        assert (test.classes, test.std) == (10, (0.2023, 0.1994, 0.2010))


@pytest.mark.parametrize("write", [python3_batch, scalar_batch])
def test_cifar_pickles_of_python_3(write, tmp_path):
    _, folder, _, files, expected = cifar("10 python")
    images, labels = expected["test"]
    write_folder(tmp_path / folder, {**files, "test_batch": write(images, labels)})
    x, y = cifar_files.read_cifar(tmp_path / folder, 10, "test", 2)
    assert np.array_equal(x, images)
    assert y.tolist() == labels


def test_cifar_tar_without_compression(tmp_path):
    classes, folder, _, files, expected = cifar("10 binary")
    path = write_tar(tmp_path / "cifar.tar", folder, files, compress=False)
    assert np.array_equal(
        cifar_files.read_cifar(path, classes, "train", 10)[0], expected["train"][0]
    )


@pytest.mark.parametrize("form", FORMS)
def test_cifar_archive_cut_short(form, tmp_path):
    classes, folder, archive, files, _ = cifar(form)
    path = write_tar(tmp_path / archive, folder, files)
    whole = path.read_bytes()
    for length in [*range(0, len(whole), len(whole) // 12), len(whole) - 8, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises((ValueError, FileNotFoundError), match=f"{archive}.*get"):
            cifar_files.read_cifar(path, classes, "train", 10)


def test_cifar_archive_with_a_wrong_byte(tmp_path):
    classes, folder, archive, files, _ = cifar("10 binary")
    path = write_tar(tmp_path / archive, folder, files)
    whole = bytearray(path.read_bytes())
    # Random pixels are stored, not compressed: only the checksum at the end tells.
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=rf"{archive} is damaged .*get it again"):
        cifar_files.read_cifar(path, classes, "train", 10)


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
            cifar_files.read_cifar(tmp_path / folder, classes, "train", 10)


def test_cifar_is_checked_against_what_was_published(tmp_path):
    classes, folder, _, files, _ = cifar("10 binary")
    write_folder(tmp_path / folder, files)
    with pytest.raises(ValueError, match=r"data_batch_1\.bin has 2 images instead of 10000"):
        cifar_files.read_cifar(tmp_path / folder, classes, "train")


def test_cifar_file_missing(tmp_path):
    classes, folder, _, files, _ = cifar("10 python")
    del files["data_batch_3"]
    write_folder(tmp_path / folder, files)
    with pytest.raises(
        FileNotFoundError, match="has no data_batch_3, so it is not a whole CIFAR-10"
    ):
        cifar_files.read_cifar(tmp_path / folder, classes, "train", 10)
    with pytest.raises(FileNotFoundError, match=r"no file or folder .*nowhere"):
        cifar_files.read_cifar(tmp_path / "nowhere", classes, "train", 10)
    assert cifar_files.find_cifar(tmp_path / "nowhere", 10) is None


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
        cifar_files.read_cifar(tmp_path / folder, classes, "test", len(labels))


PIXELS = np.zeros((2, 3072), np.uint8)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([1, 2], "holds a list, not a dict"),
        ({}, "has no 'data'; it has nothing"),
        ({"data": PIXELS, "fine": [0, 1]}, "has no 'labels'; it has data, fine"),
        ({"data": PIXELS[:, 1:], "labels": [0, 1]}, r"data is uint8 \(2, 3071\), not uint8"),
        ({"data": PIXELS.astype(np.int32), "labels": [0, 1]}, r"data is int32 \(2, 3072\)"),
        ({"data": PIXELS.astype(float), "labels": [0, 1]}, "dtype 'f8', not whole numbers"),
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
        cifar_files.read_cifar(tmp_path, 10, "test", 2)


def test_a_small_archive_that_unpacks_to_more_than_cifar_is_refused(tmp_path, monkeypatch):
    """Reading stops at the limit, inside a wanted file, an unwanted one, a name or the padding."""
    monkeypatch.setattr(cifar_files, "LARGEST", 1 << 20)
    zeros = bytes(5 << 20)
    longname = tarfile.TarInfo("x" * (5 << 20))
    bombs = {"test_batch.bin": zeros, "unwanted": zeros}
    for name, content in bombs.items():
        path = write_tar(tmp_path / f"{name}.tar.gz", "folder", {name: content})
        assert path.stat().st_size < 100_000
        with pytest.raises(ValueError, match="unpacks to more than 1,048,576 bytes"):
            cifar_files.read_cifar(path, 10, "test", 2)
    for raw in (longname.tobuf(tarfile.GNU_FORMAT), bytes(1024) + zeros):
        (tmp_path / "other.tar.gz").write_bytes(gzip.compress(raw))
        with pytest.raises(ValueError, match="unpacks to more than 1,048,576 bytes"):
            cifar_files.read_cifar(tmp_path / "other.tar.gz", 10, "test", 2)
    (tmp_path / "test_batch.bin").write_bytes(zeros)
    with pytest.raises(ValueError, match="5,242,880 bytes, more than all of CIFAR"):
        cifar_files.read_cifar(tmp_path, 10, "test", 2)

"""Files in the published formats, written small."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile

import numpy as np


def text(value):
    """A str of Python 2."""
    return b"U" + bytes([len(value)]) + value


def number(value):
    return b"J" + struct.pack("<i", value)


DTYPE = (
    b"cnumpy\ndtype\n(" + text(b"u1") + b"K\x00K\x01tR(K\x03" + text(b"|") + b"NNN"
    + number(-1) + number(-1) + b"K\x00tb"
)  # fmt: skip


def python2_array(array, fortran=False):
    raw = array.tobytes("F" if fortran else "C")
    return (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85" + text(b"b")
        + b"tR(K\x01(" + b"".join(map(number, array.shape)) + b"t" + DTYPE
        + (b"\x88" if fortran else b"\x89") + b"T" + struct.pack("<i", len(raw)) + raw + b"tb"
    )  # fmt: skip


def python2_batch(images, labels, key="labels", fortran=False):
    """A batch as cPickle of Python 2 wrote it: protocol 2, byte strings, numpy.core."""
    return (
        b"\x80\x02}(" + text(b"batch_label") + text(b"training batch 1 of 5")
        + text(key.encode()) + b"](" + b"".join(map(number, labels)) + b"e"
        + text(b"data") + python2_array(images.reshape(len(images), -1), fortran)
        + text(b"filenames") + b"](" + text(b"cat.png") + b"eu."
    )  # fmt: skip


def python3_batch(images, labels, key="labels"):
    """The same, written again by Python 3 with its own numpy."""
    return pickle.dumps(
        {"data": images.reshape(len(images), -1), key: np.array(labels)}, protocol=4
    )


def scalar_batch(images, labels, key="labels"):
    return pickle.dumps(
        {b"data": images.reshape(len(images), -1), key: [np.int64(y) for y in labels]}
    )


def binary_batch(images, labels, coarse=False):
    rows = [
        b"\x13" * coarse + bytes([y]) + x.tobytes() for x, y in zip(images, labels, strict=True)
    ]
    return b"".join(rows)


FORMS = {
    "10 python": (10, "cifar-10-batches-py", "cifar-10-python", "", python2_batch),
    "10 binary": (10, "cifar-10-batches-bin", "cifar-10-binary", ".bin", binary_batch),
    "100 python": (
        100, "cifar-100-python", "cifar-100-python", "",
        lambda x, y: python2_batch(x, y, "fine_labels"),
    ),
    "100 binary": (
        100, "cifar-100-binary", "cifar-100-binary", ".bin", lambda x, y: binary_batch(x, y, True)
    ),
}  # fmt: skip


def cifar(form, seed=0):
    """(classes, folder, archive, {file: bytes}, {split: (images, labels)}) of a small CIFAR."""
    classes, folder, archive, suffix, write = FORMS[form]
    rng = np.random.default_rng(seed)
    names = [f"data_batch_{i}" for i in range(1, 6)] if classes == 10 else ["train"]
    test = "test_batch" if classes == 10 else "test"
    files, parts = {}, []
    for name in [*names, test]:
        images = rng.integers(0, 256, (10 // len(names), 3, 32, 32), dtype=np.uint8)
        labels = rng.integers(0, classes, len(images)).tolist()
        files[name + suffix] = write(images, labels)
        parts.append((images, labels))
    train = np.concatenate([x for x, _ in parts[:-1]]), [y for _, ys in parts[:-1] for y in ys]
    return classes, folder, archive + ".tar.gz", files, {"train": train, "test": parts[-1]}


def write_folder(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "readme.html").write_text("<html>")
    return folder


def write_tar(path, folder, files, compress=True):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        directory = tarfile.TarInfo(folder)
        directory.type = tarfile.DIRTYPE
        tar.addfile(directory)
        for name, content in {**files, "readme.html": b"<html>"}.items():
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    raw = stream.getvalue()
    path.write_bytes(gzip.compress(raw, 1) if compress else raw)
    return path

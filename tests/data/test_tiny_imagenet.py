"""Tiny ImageNet: its folders, the cache beside them, and what is refused."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from fastbcd.data.npz import read_npz
from fastbcd.data.sources import load
from fastbcd.data.tiny_imagenet import read_tiny_imagenet

WNIDS = ["n03", "n01", "n02"]


@pytest.fixture
def fake_pillow(monkeypatch):
    """A Pillow whose JPEG files hold one byte: the grey level of a 4×4 image."""

    class Opened:
        def __init__(self, path):
            content = path.read_bytes()
            if len(content) != 1:
                raise OSError("broken data stream")
            decoded.append(path.name)
            self.size = 5 if content == b"\xff" else 4
            self.level = content[0]

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def convert(self, mode):
            assert mode == "RGB"
            return np.full((self.size, 4, 3), self.level, np.uint8)

    decoded: list[str] = []
    monkeypatch.setitem(sys.modules, "PIL.Image", SimpleNamespace(open=Opened))
    return decoded


@pytest.fixture
def tiny(tmp_path):
    """Two train images of each of three classes, with levels 10·class + number; two val images."""
    root = tmp_path / "tiny-imagenet-200"
    for wnid in WNIDS:
        images = root / "train" / wnid / "images"
        images.mkdir(parents=True)
        (images.parent / f"{wnid}_boxes.txt").write_text("boxes")
        for i in range(2):
            (images / f"{wnid}_{i}.JPEG").write_bytes(bytes([10 * int(wnid[1:]) + i]))
    (root / "val" / "images").mkdir(parents=True)
    for i in range(2):
        (root / "val" / "images" / f"val_{i}.JPEG").write_bytes(bytes([100 + i]))
    (root / "val" / "val_annotations.txt").write_text(
        "val_1.JPEG\tn02\t0\t0\t62\t57\nval_0.JPEG\tn03\t0\t0\t62\t57\n"
    )
    (root / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
    return root


def levels(arrays):
    return arrays[0][:, 0, 0, 0].tolist(), arrays[1].tolist()


def test_tiny_imagenet(tiny, fake_pillow):
    # One of each class in turn; labels by the names of the folders, not the lines of wnids.txt.
    expected = [10, 20, 30, 11, 21, 31], [0, 1, 2, 0, 1, 2]
    images, labels = read_tiny_imagenet(tiny, "train")
    assert images.shape == (6, 3, 4, 4)
    assert levels((images, labels)) == expected
    assert levels(read_tiny_imagenet(tiny, "test")) == ([101, 100], [1, 2])
    for root in (tiny, tiny.parent):
        by_name = load("tiny-imagenet", root=root)
        assert by_name.classes == 200
        assert by_name.labels.tolist() == expected[1]
    assert len(fake_pillow) == 8  # each file once
    assert sorted(p.name for p in tiny.glob("*.npz")) == ["fastbcd-test.npz", "fastbcd-train.npz"]
    assert not list(tiny.glob(".*"))  # no temporary file is left


def test_tiny_imagenet_cache_follows_its_files(tiny, fake_pillow):
    read_tiny_imagenet(tiny, "train")
    (tiny / "train" / "n01" / "images" / "n01_2.JPEG").write_bytes(b"\x63")
    assert levels(read_tiny_imagenet(tiny, "train"))[0] == [10, 20, 30, 11, 21, 31, 99]
    assert len(fake_pillow) == 6 + 7
    images = tiny / "train" / "n01" / "images"
    (images / "n01_2.JPEG").rename(images / "n01_00.JPEG")  # as many files, in another order
    assert levels(read_tiny_imagenet(tiny, "train"))[0] == [10, 20, 30, 99, 21, 31, 11]
    cache = tiny / "fastbcd-train.npz"
    whole = cache.read_bytes()
    fingerprint = read_npz(cache, "fingerprint")
    np.savez(tiny / "other.npz", images=np.zeros((5, 3, 4, 4), np.uint8), fingerprint=fingerprint)
    for damaged in (b"", whole[:100], whole[:-1], (tiny / "other.npz").read_bytes()):
        fake_pillow.clear()
        cache.write_bytes(damaged)
        assert len(read_tiny_imagenet(tiny, "train")[0]) == 7
        assert len(fake_pillow) == 7
        assert cache.read_bytes() == whole


def test_tiny_imagenet_without_room_for_a_cache(tiny, fake_pillow, monkeypatch):
    def full(file, **arrays):
        file.write(b"half a file")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.warns(UserWarning, match="fastbcd-train.npz cannot be written.*No space left"):
        images, _ = read_tiny_imagenet(tiny, "train")
    assert len(images) == 6
    assert not [p for p in tiny.iterdir() if "npz" in p.name]


def test_tiny_imagenet_without_pillow(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match="pip install pillow"):
        read_tiny_imagenet(tiny, "train")


def no_annotations(root):
    (root / "val" / "val_annotations.txt").unlink()
    return "no .*val_annotations.txt; unpack"


def empty_annotations(root):
    (root / "val" / "val_annotations.txt").write_text("\n")
    return "val_annotations.txt is empty"


def unknown_class(root):
    (root / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\nval_1.JPEG\tn77\n")
    return "val_annotations.txt, line 2: 'n77' is not in wnids.txt"


def line_without_class(root):
    (root / "val" / "val_annotations.txt").write_text("val_0.JPEG\n")
    return "val_annotations.txt, line 1: '' is not in wnids.txt"


def image_missing(root):
    (root / "val" / "images" / "val_1.JPEG").unlink()
    return "val_annotations.txt, line 1: there is no file .*val_1.JPEG"


def no_wnids(root):
    (root / "wnids.txt").unlink()
    return "no .*wnids.txt; unpack .*tiny-imagenet-200.zip"


def class_without_images(root):
    for file in (root / "train" / "n02" / "images").iterdir():
        file.unlink()
    return "n02/images has no .JPEG files, but wnids.txt names n02"


def class_without_folder(root):
    (root / "wnids.txt").write_text("n01\nn09\n")
    return "n09/images has no .JPEG files"


def broken_image(root):
    (root / "train" / "n02" / "images" / "n02_1.JPEG").write_bytes(b"")
    return "n02_1.JPEG cannot be decoded .*broken data stream"


def image_of_another_size(root):
    (root / "train" / "n02" / "images" / "n02_1.JPEG").write_bytes(b"\xff")
    return r"n02_1.JPEG is \(3, 5, 4\), but .*n01_0.JPEG is \(3, 4, 4\)"


VAL = [no_annotations, empty_annotations, unknown_class, line_without_class, image_missing]
TRAIN = [no_wnids, class_without_images, class_without_folder, broken_image, image_of_another_size]


@pytest.mark.parametrize(
    ("action", "split"), [*((a, "test") for a in VAL), *((a, "train") for a in TRAIN)]
)
def test_tiny_imagenet_refused(action, split, tiny, fake_pillow):
    message = action(tiny)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_tiny_imagenet(tiny, split)
    assert not list(tiny.glob("*.npz"))


def test_tiny_imagenet_real_jpeg(tiny):
    image = pytest.importorskip("PIL.Image")
    for i, path in enumerate(sorted(tiny.glob("train/*/images/*.JPEG"))):
        mode = "L" if i % 2 else "RGB"
        image.new(mode, (64, 64), 40 * i if mode == "L" else (40 * i,) * 3).save(path, "JPEG")
    images, _ = read_tiny_imagenet(tiny, "train")
    assert images.shape == (6, 3, 64, 64)
    assert (
        np.abs(images[:, :, 0, 0].astype(int) - np.array([[0, 80, 160, 40, 120, 200]]).T).max() <= 2
    )

"""The file formats: what was published is read, what is damaged or hostile is refused."""

from __future__ import annotations

import contextlib
import gzip
import io
import pickle
import struct
import sys
import tarfile
from types import SimpleNamespace

import numpy as np
import pytest

from fastbcd.data import archives, load, unpickling
from fastbcd.data.tiny_imagenet import read_tiny_imagenet

# ---------------------------------------------------------------------- writing the formats


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
    """The same written anew by a Python 3 with its own numpy."""
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


def test_arrays_in_column_order_and_other_byte_orders():
    images = np.arange(2 * 3072, dtype=np.uint32).astype(np.uint8).reshape(2, 3, 32, 32)
    batch = unpickling.unpickle_arrays(python2_batch(images, [1, 2], fortran=True), "memory")
    assert np.array_equal(batch[b"data"].reshape(images.shape), images)
    for dtype in (">i4", "<i8", ">u2", "|i1"):
        array = np.array([[1, 100], [3, 4]], dtype=dtype)
        read = unpickling.unpickle_arrays(pickle.dumps({"x": array}, protocol=4), "memory")
        assert np.array_equal(read["x"], array)


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


# --------------------------------------------------------------------------------- pickles


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
    ],
)
def test_pickles_that_ask_for_more_than_arrays(raw, message):
    with pytest.raises(ValueError, match=rf"m cannot be read.*{message}|{message}.*get it again"):
        unpickling.unpickle_arrays(raw, "m")


@pytest.mark.parametrize("name", ["numpy\nndarray", "numpy\ndtype", "numpy.core.multiarray\nscalar",
                                  "numpy.core.multiarray\n_reconstruct"])  # fmt: skip
def test_pickles_cannot_change_the_stand_ins(name):
    # BUILD with (None, {...}) sets attributes on whatever lies on the stack.
    stand_in = unpickling._STAND_INS[tuple(name.split("\n"))]
    before = dict(vars(stand_in))
    for state in (b"(N}Vhacked\nI1\nst", b"}Vhacked\nI1\ns"):
        with pytest.raises(ValueError, match="m cannot be read"):
            unpickling.unpickle_arrays(b"c" + name.encode() + b"\n" + state + b"b.", "m")
    assert dict(vars(stand_in)) == before


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


# --------------------------------------------------------------------------- Tiny ImageNet

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
    fingerprint = archives.read_npz(cache, "fingerprint")
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
    with pytest.warns(UserWarning, match="not kept: .*No space left"):
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

"""The file formats images come in: .npz, and the archives and folders of CIFAR.

A file that is damaged, cut short or not what it should be is an error that names the file, the
member and the way out. No code in a file is ever run: pickles go through an unpickler that knows
nothing but arrays.
"""

from __future__ import annotations

import contextlib
import gzip
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from fastbcd.data.image_arrays import check_labels
from fastbcd.data.unpickling import as_text, unpickle_arrays
from fastbcd.runtime.atomic_files import write_atomically

Arrays = tuple[np.ndarray, np.ndarray]  # images, uint8 [N,C,H,W], and labels, int64 [N]
DAMAGE = (OSError, EOFError, ValueError, zlib.error, zipfile.BadZipFile, tarfile.TarError)


# ---------------------------------------------------------------------------------------- .npz


def npz_keys(path: str | Path) -> list[str]:
    """The names of the arrays in an .npz file."""
    with _open_npz(path) as archive:
        return list(archive.files)


def read_npz(path: str | Path, key: str) -> np.ndarray:
    """One array of an .npz file; never an object array, which would be a pickle."""
    with _open_npz(path) as archive:
        if key not in archive.files:
            names = ", ".join(archive.files) or "none"
            raise ValueError(f"{path} has no array {key!r}; it has {names}")
        try:
            return archive[key]
        except DAMAGE as error:
            raise ValueError(
                f"{path}: the array {key!r} cannot be read ({error}); the file is damaged or "
                f"holds Python objects: write it anew with numpy.savez"
            ) from error


@contextlib.contextmanager
def _open_npz(path: str | Path) -> Iterator[np.lib.npyio.NpzFile]:
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    with open(path, "rb") as file:
        try:
            archive = np.load(file, allow_pickle=False)
        except DAMAGE as error:
            raise ValueError(f"{path} is not an .npz file or was cut short ({error})") from error
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError(f"{path} holds one array; write images and labels with numpy.savez")
        yield archive


def save_npz(path: Path, **arrays: np.ndarray) -> None:
    """numpy.savez that leaves a whole file or none, whatever happens meanwhile."""
    write_atomically(path, lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------- CIFAR


class Layout(NamedTuple):
    """One published form of CIFAR: how its folder, archive and files are called."""

    folder: str
    archive: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    label: str | int  # the pickle's key, or the label's place among a record's first bytes
    label_bytes: int = 0  # how many bytes of labels a record begins with; 0 for pickles


_FIVE = tuple(f"data_batch_{i}" for i in range(1, 6))
CIFAR: dict[int, tuple[Layout, ...]] = {  # by the number of classes
    10: (
        Layout("cifar-10-batches-py", "cifar-10-python.tar.gz", _FIVE, ("test_batch",), "labels"),
        Layout("cifar-10-batches-bin", "cifar-10-binary.tar.gz",
               tuple(f"{name}.bin" for name in _FIVE), ("test_batch.bin",), 0, 1),
    ),
    100: (
        Layout("cifar-100-python", "cifar-100-python.tar.gz", ("train",), ("test",), "fine_labels"),
        Layout("cifar-100-binary", "cifar-100-binary.tar.gz", ("train.bin",), ("test.bin",), 1, 2),
    ),
}  # fmt: skip
PUBLISHED = {"train": 50_000, "test": 10_000}  # images of a split, in both
PIXELS = 3 * 32 * 32


def find_cifar(root: str | Path, classes: int) -> Path | None:
    """Where CIFAR lies: root itself, or one of its published names inside root."""
    root = Path(root)
    if root.is_file() or any((root / layout.test[0]).is_file() for layout in CIFAR[classes]):
        return root
    places = [root / place for layout in CIFAR[classes] for place in layout[:2]]
    return next((place for place in places if place.exists()), None)


def read_cifar(path: str | Path, classes: int, split: str, images: int | None = None) -> Arrays:
    """CIFAR-10 or -100 (by its classes) from a folder or tar.gz, python or binary version.

    split: "train" or "test"; images: how many it must have (by default what was published, so
    that a file without its end is noticed).
    """
    total = PUBLISHED[split] if images is None else images
    choices = [(lay, lay.train if split == "train" else lay.test) for lay in CIFAR[classes]]
    files = _members(Path(path), {file for _, names in choices for file in names})
    layout, wanted = max(choices, key=lambda choice: sum(file in files for file in choice[1]))
    missing = [file for file in wanted if file not in files]
    if missing:
        raise FileNotFoundError(
            f"{path} has no {', '.join(missing)}, so it is not a whole CIFAR-{classes}; get "
            f"{layout.archive} from https://www.cs.toronto.edu/~kriz/cifar.html"
        )
    parts = [_cifar_file(files[f], f"{path}: {f}", layout, total // len(wanted)) for f in wanted]
    for file, (_, labels) in zip(wanted, parts, strict=True):
        check_labels(labels, classes, f"{path}: {file}: labels")
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def _cifar_file(raw: bytes, where: str, layout: Layout, expected: int) -> Arrays:
    """One batch file; `expected` images or an error."""
    if isinstance(layout.label, str):
        pixels, labels = _cifar_pickle(raw, where, layout.label)
    else:
        record = layout.label_bytes + PIXELS
        if len(raw) % record:
            raise ValueError(
                f"{where} has {len(raw)} bytes, not a multiple of {record}: it is damaged or was "
                f"cut short in image {len(raw) // record}; get it again"
            )
        table = np.frombuffer(raw, np.uint8).reshape(-1, record)
        pixels, labels = table[:, layout.label_bytes :], table[:, layout.label].astype(np.int64)
    if len(pixels) != expected:
        raise ValueError(
            f"{where} has {len(pixels)} images instead of {expected}: it was cut short or is "
            f"another file; get it again"
        )
    return pixels.reshape(-1, 3, 32, 32), labels


def _cifar_pickle(raw: bytes, where: str, key: str) -> Arrays:
    """The pixels [N,3072] and labels [N] of one pickled batch."""
    batch = unpickle_arrays(raw, where)
    batch = {as_text(k): v for k, v in batch.items() if isinstance(k, str | bytes)}
    for name in ("data", key):
        if name not in batch:
            raise ValueError(f"{where} has no {name!r}; it has {', '.join(batch) or 'nothing'}")
    pixels, labels = batch["data"], batch[key]
    if getattr(pixels, "dtype", None) != np.uint8 or pixels.shape[1:] != (PIXELS,):
        got = f"{pixels.dtype} {pixels.shape}" if isinstance(pixels, np.ndarray) else type(pixels)
        raise ValueError(f"{where}: data is {got}, not uint8 [N,{PIXELS}]")
    if isinstance(labels, list) and all(type(y) is int and abs(y) < 2**63 for y in labels):
        labels = np.array(labels, dtype=np.int64)
    if not isinstance(labels, np.ndarray):
        raise ValueError(f"{where}: {key} are not a list of whole numbers")
    if labels.shape != pixels.shape[:1]:
        raise ValueError(f"{where}: {key} are {labels.shape} beside {len(pixels)} images")
    return pixels, labels.astype(np.int64)


def _members(path: Path, names: set[str]) -> dict[str, bytes]:
    """The contents of those files of a folder or tar archive that are called so."""
    if path.is_dir():
        return {name: (path / name).read_bytes() for name in names if (path / name).is_file()}
    if not path.is_file():
        raise FileNotFoundError(f"there is no file or folder {path}")
    found: dict[str, bytes] = {}
    place = "its beginning"
    try:
        with _open_maybe_gzip(path) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
            for member in tar:
                base = member.name.rsplit("/", 1)[-1]
                if base in names and member.isreg():
                    place = f"the member {member.name}"
                    content = tar.extractfile(member)
                    assert content is not None  # it is a regular file
                    found[base] = content.read()
                    place = f"what follows {member.name}"
            while stream.read(1 << 20):  # to the end: gzip keeps its checksum there
                pass
    except DAMAGE as error:
        raise ValueError(
            f"{path} is damaged or was cut short at {place} ({error}); get it again"
        ) from error
    return found


def _open_maybe_gzip(path: Path) -> BinaryIO:
    with open(path, "rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if zipped else open(path, "rb")  # type: ignore[return-value]

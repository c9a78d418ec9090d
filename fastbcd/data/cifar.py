"""CIFAR-10 and CIFAR-100 from the published archives or their unpacked folders.

A file that is damaged, cut short, too large or not what it should be is an error that names the
file, the member and the way out. No code in a file is run.
"""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from fastbcd.data.arrays import check_labels
from fastbcd.data.unpickling import as_text, unpickle_arrays

Arrays = tuple[np.ndarray, np.ndarray]  # images, uint8 [N,C,H,W], and labels, int64 [N]


class Layout(NamedTuple):
    """One published form of CIFAR: the names of its folder, archive and files."""

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
LARGEST = 256 << 20  # bytes that are read of an archive or a file; the whole of CIFAR has 178 MiB


def find_cifar(root: str | Path, classes: int) -> Path | None:
    """The path of CIFAR: root itself, or one of its published names inside root."""
    root = Path(root)
    if root.is_file() or any((root / layout.test[0]).is_file() for layout in CIFAR[classes]):
        return root
    places = [root / place for layout in CIFAR[classes] for place in layout[:2]]
    return next((place for place in places if place.exists()), None)


def read_cifar(path: str | Path, classes: int, split: str, images: int | None = None) -> Arrays:
    """CIFAR-10 or -100 (by its classes) from a folder or tar.gz, python or binary version.

    split: "train" or "test"; images: how many it must have (by default the published number, so
    that a file that is cut short is noticed).
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
    parts = []
    for file in wanted:
        where = f"{path}: {file}"
        pixels, labels = _read_batch(files[file], where, layout)
        expected = total // len(wanted)
        if len(pixels) != expected:
            raise ValueError(
                f"{where} has {len(pixels)} images instead of {expected}: it is cut short or "
                f"another file; get it again"
            )
        check_labels(labels, classes, f"{where}: labels")
        parts.append((pixels.reshape(-1, 3, 32, 32), labels))
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def _read_batch(raw: bytes, where: str, layout: Layout) -> Arrays:
    """The pixels [N,3072] and labels [N] of one batch file."""
    if isinstance(layout.label, str):
        return _read_pickle(raw, where, layout.label)
    record = layout.label_bytes + PIXELS
    if len(raw) % record:
        raise ValueError(
            f"{where} has {len(raw)} bytes, not a multiple of {record}: it is damaged or cut "
            f"short in image {len(raw) // record}; get it again"
        )
    table = np.frombuffer(raw, np.uint8).reshape(-1, record)
    return table[:, layout.label_bytes :], table[:, layout.label].astype(np.int64)


def _read_pickle(raw: bytes, where: str, key: str) -> Arrays:
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
    """The contents of the files with these names in a folder or tar archive."""
    if path.is_dir():
        return {name: _read_file(path / name) for name in names if (path / name).is_file()}
    if not path.is_file():
        raise FileNotFoundError(f"there is no file or folder {path}")
    found: dict[str, bytes] = {}
    place = "its beginning"
    try:
        with open(path, "rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            stream = _Bounded(gzip.GzipFile(fileobj=file) if zipped else file)  # type: ignore[arg-type]
            with tarfile.open(fileobj=stream, mode="r|") as tar:
                for member in tar:
                    base = member.name.rsplit("/", 1)[-1]
                    if base in names and member.isreg():
                        place = f"the member {member.name}"
                        content = tar.extractfile(member)
                        assert content is not None  # it is a regular file
                        found[base] = content.read()
                        place = f"what follows {member.name}"
            while stream.read(1 << 20):  # to the end, where gzip has its checksum
                pass
    except Exception as error:  # damaged bytes can raise anything
        raise ValueError(
            f"{path} is damaged or cut short at {place} ({error}); get it again"
        ) from error
    return found


def _read_file(path: Path) -> bytes:
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes, more than all of CIFAR")
    return path.read_bytes()


class _Bounded(io.RawIOBase):
    """A stream that ends in an error after LARGEST bytes, so that a small archive cannot unpack

    to more than there is memory for.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.left = stream, LARGEST

    def read(self, size: int = -1) -> bytes:
        wanted = self.left + 1 if size < 0 else min(size, self.left + 1)
        chunk = self.stream.read(wanted)
        self.left -= len(chunk)
        if self.left < 0:
            raise ValueError(f"it unpacks to more than {LARGEST:,} bytes, more than all of CIFAR")
        return chunk

"""CIFAR-10 and CIFAR-100 from the published archives or their unpacked folders.

A file that is damaged, cut short or too large is an error. No code in a file is run.
"""

from __future__ import annotations

import gzip
import io
import pickle
import pickletools
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fastbcd.data.arrays import check_labels

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
HOME = "https://www.cs.toronto.edu/~kriz/cifar.html"
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
            f"{layout.archive} from {HOME}"
        )
    parts = []
    for file in wanted:
        where = f"{path}: {file}"
        pixels, labels = _read_batch(files[file], where, layout)
        if len(pixels) != total // len(wanted):
            found = f"{where} has {len(pixels)} images instead of {total // len(wanted)}"
            raise ValueError(f"{found}: it is cut short or another file; get it again")
        check_labels(torch.from_numpy(labels), classes, f"{where}: labels")
        parts.append((pixels.reshape(-1, 3, 32, 32), labels))
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def _read_batch(raw: bytes, where: str, layout: Layout) -> Arrays:
    """The pixels [N,3072] and labels [N] of one batch file."""
    key = layout.label
    if not isinstance(key, str):
        record = layout.label_bytes + PIXELS
        if len(raw) % record:
            raise ValueError(
                f"{where} has {len(raw)} bytes, not a multiple of {record}: it is damaged or cut "
                f"short in image {len(raw) // record}; get it again"
            )
        table = np.frombuffer(raw, np.uint8).reshape(-1, record)
        return table[:, layout.label_bytes :], table[:, key].astype(np.int64)
    batch = unpickle_arrays(raw, where)
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
        return {name: _read(path / name) for name in names if (path / name).is_file()}
    if not path.is_file():
        raise FileNotFoundError(f"there is no file or folder {path}")
    found: dict[str, bytes] = {}
    place = "its beginning"
    try:
        raw = _read(path)
        if raw[:2] == b"\x1f\x8b":
            with gzip.open(path) as file:  # reads to the end, where gzip has its checksum
                raw = file.read(LARGEST + 1)
        if len(raw) > LARGEST:
            raise ValueError(f"it unpacks to more than {LARGEST:,} bytes, more than all of CIFAR")
        with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as tar:
            for member in tar:
                place = f"the member {member.name}"
                base = member.name.rsplit("/", 1)[-1]
                content = tar.extractfile(member) if base in names and member.isreg() else None
                if content is not None:
                    found[base] = content.read()
    except Exception as error:  # damaged bytes can raise anything
        what = f"{path} is damaged or cut short at {place} ({error})"
        raise ValueError(f"{what}; get it again") from error
    return found


def _read(path: Path) -> bytes:
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes, more than all of CIFAR")
    return path.read_bytes()


# ------------------------------------------------------------------ pickles, read as data

_CODES = ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8")


class _Dtype:
    """A dtype of whole numbers; numpy's own can crash when a pickle sets its size and fields."""

    def __init__(self, code: str | bytes, *_: Any) -> None:
        if _text(code) not in _CODES:
            raise pickle.UnpicklingError(f"an array of dtype {_text(code)!r}, not whole numbers")
        self.numpy = np.dtype(_text(code))

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.numpy = self.numpy.newbyteorder(_text(state[1]))  # type: ignore[arg-type]


class _Array(np.ndarray):
    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, raw = state
        super().__setstate__((1, shape, dtype.numpy, fortran, raw))


class _Unpickler(pickle.Unpickler):
    """Refuses every name but those that numpy writes for arrays and whole numbers.

    The functions are new in each unpickler: a pickle can set attributes on what it is given.
    """

    def find_class(self, module: str, name: str) -> Any:
        allowed = {
            "numpy.ndarray": object,  # a mere argument of _reconstruct
            "numpy.dtype": _Dtype,
            "numpy.core.multiarray._reconstruct": lambda *_: _Array(0, np.uint8),
            "numpy.core.multiarray.scalar": lambda dtype, raw: int(
                np.frombuffer(raw, dtype.numpy, count=1)[0]
            ),
        }
        found = allowed.get(f"{module}.{name}".replace("numpy._core.", "numpy.core."))
        if found is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is refused")
        return found


def unpickle_arrays(raw: bytes, where: str) -> dict[str, Any]:
    """What a pickled dict holds under strings: arrays, and nothing that could run."""
    try:
        for opcode, argument, _ in pickletools.genops(raw):
            # The unpickler keeps a table of this size.
            if "PUT" in opcode.name and int(argument or 0) > len(raw):
                raise pickle.UnpicklingError(f"a memo of {argument:,} entries")
        value = _Unpickler(io.BytesIO(raw), encoding="bytes").load()
        if not isinstance(value, dict):
            raise pickle.UnpicklingError(f"it holds a {type(value).__name__}, not a dict")
        arrays = {_text(k): v for k, v in value.items() if isinstance(k, str | bytes)}
        return {k: v.view(np.ndarray) if isinstance(v, _Array) else v for k, v in arrays.items()}
    except Exception as error:  # damaged bytes can raise anything
        raise ValueError(
            f"{where} cannot be read ({error or type(error).__name__}); it is damaged, cut short "
            f"or not a CIFAR file: get it again"
        ) from error


def _text(value: str | bytes) -> str:
    """A string of a pickle; those of Python 2 come as bytes."""
    return value.decode("latin1") if isinstance(value, bytes) else value

"""The file formats images come in: .npz, the CIFAR archives, a Tiny ImageNet folder.

Each reader gives `(images, labels)`: numpy uint8 [N,C,H,W] and int64 [N]. A file that is damaged,
cut short or not what it should be is an error that names the file, the member and the way out.
No code in a file is ever run: pickles go through an unpickler that knows nothing but arrays.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import io
import os
import pickle
import tarfile
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

Arrays = tuple[np.ndarray, np.ndarray]
DAMAGE = (OSError, EOFError, ValueError, zlib.error, zipfile.BadZipFile, tarfile.TarError)


def check_labels(labels: np.ndarray, classes: int, where: str) -> None:
    """Refuse labels outside 0 .. classes-1, naming the first."""
    bad = np.flatnonzero((labels < 0) | (labels >= classes))
    if bad.size:
        raise ValueError(
            f"{where}[{bad[0]}] is {labels[bad[0]]}; with {classes} classes labels are "
            f"0 to {classes - 1} ({bad.size} of {labels.size} are not)"
        )


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


def _open_npz(path: str | Path) -> np.lib.npyio.NpzFile:
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        archive = np.load(path, allow_pickle=False)
    except DAMAGE as error:
        raise ValueError(f"{path} is not an .npz file or was cut short ({error})") from error
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise ValueError(f"{path} holds a single array; write images and labels with numpy.savez")
    return archive


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
    batch = {_text(k): v for k, v in batch.items() if isinstance(k, str | bytes)}
    for name in ("data", key):
        if name not in batch:
            raise ValueError(f"{where} has no {name!r}; it has {', '.join(batch) or 'nothing'}")
    pixels, labels = batch["data"], batch[key]
    if getattr(pixels, "dtype", None) != np.uint8 or pixels.shape[1:] != (PIXELS,):
        got = f"{pixels.dtype} {pixels.shape}" if isinstance(pixels, np.ndarray) else type(pixels)
        raise ValueError(f"{where}: data is {got}, not uint8 [N,{PIXELS}]")
    whole = all(type(label) is int for label in labels) if isinstance(labels, list) else (
        isinstance(labels, np.ndarray))  # fmt: skip
    if not whole:
        raise ValueError(f"{where}: {key} are not whole numbers")
    if np.shape(labels) != pixels.shape[:1]:
        raise ValueError(f"{where}: {key} are {np.shape(labels)} beside {len(pixels)} images")
    return pixels, np.asarray(labels, dtype=np.int64)


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


# --------------------------------------------------------------------- pickles, arrays only


class _StandIn:
    """What a pickle gets instead of a part of numpy. Having a __setstate__ keeps it from setting
    attributes on these classes themselves, which pickle would otherwise do."""

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it sets a state where none belongs")


class _Dtype(_StandIn):
    """Stands for numpy.dtype in a pickle: a type code and a byte order."""

    def __init__(self, code: str | bytes, *_: Any) -> None:
        self.code, self.order = _text(code), "|"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = _text(state[1])

    def numpy(self) -> np.dtype:
        if self.code not in ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8"):
            raise pickle.UnpicklingError(f"an array of dtype {self.code!r}, not of whole numbers")
        return np.dtype(("" if self.order == "|" else self.order) + self.code)


class _Array(_StandIn):
    """Stands for numpy.ndarray in a pickle: shape, dtype and bytes, until `array` reads them."""

    state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def array(self) -> np.ndarray:
        _, shape, dtype, fortran, raw = self.state
        flat = np.frombuffer(raw, dtype.numpy())
        return flat.reshape(shape, order="F" if fortran else "C")


class _Reconstruct(_StandIn):
    """Stands for numpy's _reconstruct(ndarray, shape, code): an array still to be filled."""

    def __new__(cls, *_: Any) -> Any:
        return _Array()


class _Scalar(_StandIn):
    """Stands for numpy's scalar(dtype, bytes): a whole number."""

    def __new__(cls, dtype: _Dtype, raw: bytes) -> Any:
        return int(np.frombuffer(raw, dtype.numpy(), count=1)[0])


_STAND_INS: dict[tuple[str, str], type] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    **{
        (f"numpy.{core}.multiarray", name): stand_in
        for core in ("core", "_core")
        for name, stand_in in (("_reconstruct", _Reconstruct), ("scalar", _Scalar))
    },
}


class _ArrayUnpickler(pickle.Unpickler):
    """Reads containers, numbers, strings and arrays. Whatever else is named is refused."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _STAND_INS[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is refused") from None


def unpickle_arrays(raw: bytes, where: str) -> dict[Any, Any]:
    """The dict in a pickle that holds arrays and nothing that could run.

    >>> unpickle_arrays(pickle.dumps({"data": [1, 2]}), "memory")
    {'data': [1, 2]}
    >>> unpickle_arrays(pickle.dumps(print), "memory")
    Traceback (most recent call last):
    ValueError: memory cannot be read (it asks for builtins.print, which is refused); ...
    """
    try:
        value = _ArrayUnpickler(io.BytesIO(raw), encoding="bytes").load()
        if not isinstance(value, dict):
            raise pickle.UnpicklingError(f"it holds a {type(value).__name__}, not a dict")
        return {k: v.array() if isinstance(v, _Array) else v for k, v in value.items()}
    # The bytes are not ours: any of the virtual machine's own failures may come out of them.
    except Exception as error:
        raise ValueError(
            f"{where} cannot be read ({error or type(error).__name__}); it is damaged, cut short "
            f"or not a CIFAR file: get it again"
        ) from error


def _text(value: str | bytes) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else value


# -------------------------------------------------------------------------------- Tiny ImageNet


def read_tiny_imagenet(folder: str | Path, split: str, class_order: str = "wnids") -> Arrays:
    """Tiny ImageNet from its unpacked folder, decoded once and kept beside it as .npz.

    split: "train", or "test" for the val folder (the test folder has no labels). class_order:
    class k is line k of wnids.txt, or with "sorted" the k-th folder by name, as in torchvision's
    ImageFolder. Train images come one of each class in turn, so that the first n are balanced.
    """
    folder = Path(folder)
    wnids = _lines(folder / "wnids.txt")
    files = _tiny_train(folder, wnids) if split == "train" else _tiny_val(folder, wnids)
    number = {w: k for k, w in enumerate(sorted(wnids) if class_order == "sorted" else wnids)}
    labels = np.array([number[wnid] for _, wnid in files], dtype=np.int64)
    paths = [path for path, _ in files]
    listing = "".join(f"{p.relative_to(folder).as_posix()} {p.stat().st_size}\n" for p in paths)
    fingerprint = np.frombuffer(hashlib.sha256(listing.encode()).digest(), np.uint8)
    cache = folder / f"fastbcd-{split}.npz"
    images = _cached(cache, fingerprint, len(paths))
    if images is None:
        images = _decode_all(paths)
        try:
            save_npz(cache, images=images, fingerprint=fingerprint)
        except OSError as error:  # a read-only folder still serves; it is only slow again
            warnings.warn(f"the decoded images are not kept: {error}", stacklevel=2)
    return images, labels


def _tiny_train(folder: Path, wnids: list[str]) -> list[tuple[Path, str]]:
    ranked = []
    for wnid in wnids:
        images = folder / "train" / wnid / "images"
        files = sorted(images.glob("*.JPEG")) if images.is_dir() else []
        if not files:
            raise FileNotFoundError(f"{images} has no .JPEG files, but wnids.txt names {wnid}")
        ranked += [(rank, wnid, file) for rank, file in enumerate(files)]
    return [(file, wnid) for _, wnid, file in sorted(ranked)]


def _tiny_val(folder: Path, wnids: list[str]) -> list[tuple[Path, str]]:
    table, known, files = folder / "val" / "val_annotations.txt", set(wnids), []
    for number, line in enumerate(_lines(table), 1):
        name, wnid = [*line.split("\t"), ""][:2]
        path = folder / "val" / "images" / name
        if wnid not in known:
            raise ValueError(f"{table}, line {number}: {wnid!r} is not in wnids.txt")
        if not path.is_file():
            raise FileNotFoundError(f"{table}, line {number}: there is no file {path}")
        files.append((path, wnid))
    return files


def _lines(path: Path) -> list[str]:
    """The lines of a text file; at least one."""
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no {path}; unpack http://cs231n.stanford.edu/tiny-imagenet-200.zip "
            f"and give the folder tiny-imagenet-200 unchanged"
        )
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path} is empty; unpack tiny-imagenet-200.zip again")
    return lines


def _decode_all(paths: list[Path]) -> np.ndarray:
    """RGB pixels of all files, uint8 [N,3,H,W]; all must have the size of the first."""
    try:
        pil = importlib.import_module("PIL.Image")
    except ImportError as error:
        raise ImportError(
            "decoding JPEG files needs Pillow: pip install pillow (torchvision brings it too)"
        ) from error
    images = np.empty((0,), np.uint8)
    for i, path in enumerate(paths):
        try:
            with pil.open(path) as file:
                image = np.asarray(file.convert("RGB")).transpose(2, 0, 1)  # grey: three alike
        except (OSError, SyntaxError, ValueError) as error:  # what Pillow raises on bad files
            raise ValueError(f"{path} cannot be decoded ({error}); unpack it again") from error
        if i == 0:
            images = np.empty((len(paths), *image.shape), np.uint8)
        if image.shape != images.shape[1:]:
            raise ValueError(f"{path} is {image.shape}, but {paths[0]} is {images.shape[1:]}")
        images[i] = image
    return images


def _cached(path: Path, fingerprint: np.ndarray, count: int) -> np.ndarray | None:
    """The images of a cache that was made from the same files; None if there is none."""
    try:
        if not np.array_equal(read_npz(path, "fingerprint"), fingerprint):
            return None
        images = read_npz(path, "images")
    except (OSError, ValueError):  # absent or damaged: decode again
        return None
    whole = images.dtype == np.uint8 and images.ndim == 4 and images.shape[:2] == (count, 3)
    return images if whole else None


def save_npz(path: Path, **arrays: np.ndarray) -> None:
    """numpy.savez that leaves a whole file or none, whatever happens meanwhile."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)

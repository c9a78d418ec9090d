"""Tiny ImageNet, from the folder it unpacks to."""

from __future__ import annotations

import hashlib
import importlib
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from fastbcd.data.cifar import Arrays
from fastbcd.data.npz import read_npz
from fastbcd.runtime.atomic_files import write_atomically


def read_tiny_imagenet(folder: str | Path, split: str) -> Arrays:
    """Tiny ImageNet from its unpacked folder or the one around it, decoded once, cached as .npz.

    split: "train", or "test" for the val folder (the test folder has no labels). Class k is the
    k-th class folder by name, as in torchvision's ImageFolder. Train images are ordered by their
    number in the class, then by class, so that the first n are balanced.
    """
    inside = Path(folder) / "tiny-imagenet-200"
    folder = inside if inside.is_dir() else Path(folder)
    wnids = sorted(_lines(folder / "wnids.txt"))
    files = _train_files(folder, wnids) if split == "train" else _val_files(folder, wnids)
    labels = np.searchsorted(wnids, [wnid for _, wnid in files]).astype(np.int64)
    paths = [path for path, _ in files]
    listing = "".join(f"{p.relative_to(folder).as_posix()} {p.stat().st_size}\n" for p in paths)
    mark = np.frombuffer(hashlib.sha256(listing.encode()).digest(), np.uint8)
    cache = folder / f"fastbcd-{split}.npz"
    try:
        images = read_npz(cache, "images")
        same = np.array_equal(read_npz(cache, "fingerprint"), mark)
    except (OSError, ValueError):  # absent or damaged: decode again
        same = False
    if same and images.dtype == np.uint8 and images.shape[:2] == (len(paths), 3):
        return images, labels
    arrays: Any = {"images": _decode_all(paths), "fingerprint": mark}
    try:
        write_atomically(cache, lambda file: np.savez(file, **arrays))
    except OSError as error:  # such as a read-only folder
        warnings.warn(
            f"{cache} cannot be written, so the images are decoded again next time: {error}",
            stacklevel=2,
        )
    return arrays["images"], labels


def _train_files(folder: Path, wnids: list[str]) -> list[tuple[Path, str]]:
    ranked = []
    for wnid in wnids:
        images = folder / "train" / wnid / "images"
        files = sorted(images.glob("*.JPEG")) if images.is_dir() else []
        if not files:
            raise FileNotFoundError(f"{images} has no .JPEG files, but wnids.txt names {wnid}")
        ranked += [(rank, wnid, file) for rank, file in enumerate(files)]
    return [(file, wnid) for _, wnid, file in sorted(ranked)]


def _val_files(folder: Path, wnids: list[str]) -> list[tuple[Path, str]]:
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
        raise ImportError("decoding JPEG files needs Pillow: pip install pillow") from error
    images = np.empty(0, np.uint8)
    for i, path in enumerate(paths):
        try:
            with pil.open(path) as file:
                image = np.asarray(file.convert("RGB")).transpose(2, 0, 1)
        except Exception as error:  # Pillow raises many kinds on bad files
            raise ValueError(f"{path} cannot be decoded ({error}); unpack it again") from error
        images = images if i else np.empty((len(paths), *image.shape), np.uint8)
        if image.shape != images.shape[1:]:
            raise ValueError(f"{path} is {image.shape}, but {paths[0]} is {images.shape[1:]}")
        images[i] = image
    return images

""".npz files of arrays, read without pickles."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

LARGEST = 256 << 20  # bytes that an array may have however much it was compressed


def npz_keys(path: str | Path) -> list[str]:
    """The names of the arrays in an .npz file."""
    with _open(path) as archive:
        return list(archive.files)


def read_npz(path: str | Path, key: str) -> np.ndarray:
    """One array of an .npz file; never an object array, which would be a pickle."""
    with _open(path) as archive:
        if key not in archive.files:
            names = ", ".join(archive.files) or "none"
            raise ValueError(f"{path} has no array {key!r}; it has {names}")
        try:
            for info in archive.zip.infolist():  # type: ignore[union-attr]
                # No images can be compressed as much as this.
                bomb = info.file_size > max(LARGEST, 100 * info.compress_size)
                if bomb and info.filename in (key, f"{key}.npy"):
                    raise ValueError(
                        f"it unpacks from {info.compress_size:,} to {info.file_size:,} bytes; if "
                        f"that is right, write it uncompressed"
                    )
            return archive[key]
        except Exception as error:  # damaged bytes can raise anything
            raise ValueError(
                f"{path}: the array {key!r} cannot be read ({error}); the file is damaged or "
                f"holds Python objects: write it again with numpy.savez"
            ) from error


@contextlib.contextmanager
def _open(path: str | Path) -> Iterator[np.lib.npyio.NpzFile]:
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    with open(path, "rb") as file:
        try:
            archive = np.load(file, allow_pickle=False)
        except Exception as error:  # damaged bytes can raise anything
            raise ValueError(f"{path} is not an .npz file or is cut short ({error})") from error
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError(f"{path} holds one array; write images and labels with numpy.savez")
        yield archive

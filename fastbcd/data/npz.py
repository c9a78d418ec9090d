""".npz files of arrays, read without pickles."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def read_npz(path: str | Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file; never an object array, which would be a pickle."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    name = None
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {}
            for name in archive.files:
                arrays[name] = archive[name]
            return arrays
    except Exception as error:  # damaged bytes can raise anything
        raise ValueError(
            f"{path}: the array {name!r} cannot be read ({error}); the file is damaged, cut short "
            f"or holds Python objects: write images and labels with numpy.savez"
        ) from error

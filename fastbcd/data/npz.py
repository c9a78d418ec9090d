""".npz files of images and labels, read without pickles."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fastbcd.data.arrays import Stats, are_indices, count_classes, target_tensor
from fastbcd.data.images import ImageData


def load_npz(
    path: str | Path, split: str, mean: Stats = None, std: Stats = None
) -> ImageData:
    """The arrays {split}_images and {split}_labels, or images and labels, of an .npz file.

    mean and std that are not given are those of the file, if it has arrays of these names; classes
    are counted over all of its labels.
    """
    arrays = _read(path)
    prefix = f"{split}_"
    if "images" in arrays and f"{split}_images" not in arrays:
        prefix = ""
    for name in (f"{prefix}images", f"{prefix}labels"):
        if name not in arrays:
            raise ValueError(
                f"{path} has no array {name!r}; it has {', '.join(arrays) or 'none'}"
            )
    try:
        targets = [
            target_tensor(arrays[name]) for name in arrays if name.endswith("labels")
        ]
        classes = None
        if all(map(are_indices, targets)):
            classes = count_classes(*targets)
        if mean is None:
            mean = arrays.get("mean")
        if std is None:
            std = arrays.get("std")
        images = arrays[f"{prefix}images"]
        labels = arrays[f"{prefix}labels"]
        return ImageData.from_arrays(images, labels, mean, std, classes)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{path}, split {split!r}: {error}") from error


def _read(path: str | Path) -> dict[str, np.ndarray]:
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

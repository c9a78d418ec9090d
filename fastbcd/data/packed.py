"""Packed images: a folder that is written once and mapped afterwards.

`images.bin` holds the images one after the other, `meta.safetensors` their shape and dtype, labels,
mean, std and classes. It is written last: without it the folder is not complete.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save
from torch.utils.data import DataLoader, Dataset

from fastbcd.data import pixels
from fastbcd.data.arrays import Stats, check_labels, target_tensor
from fastbcd.data.items import Items
from fastbcd.runtime.atomic_files import write_atomically
from fastbcd.runtime.show import bar

FORMAT = "fastbcd images 1"
IMAGES = "images.bin"
META = "meta.safetensors"


def pack(
    source: Dataset | DataLoader,
    path: str | Path,
    *,
    mean: Stats = None,
    std: Stats = None,
    classes: int | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> None:
    """Write a dataset of any size, in constant memory, into a folder that `ImageData.open` maps.

    An interrupted call leaves a folder that `ImageData.open` refuses, and the next call begins
    again. Call it in one process only.

    Args:
        source: a torch Dataset of (image, label) items without random transforms, or a DataLoader
            of one, whose workers then read. The order is that of the dataset. Give bytes, without
            ToTensor and Normalize: floats take four times the space.
        path: the folder. `fastbcd.load(path)` opens the folders `train` and `test` in a path.
        mean, std: per channel, for (x - mean)/std, where x is uint8/255, or the floats themselves;
            0 and 1 if not given.
        classes: the number of classes; the largest label + 1 if not given.
        overwrite: replace a complete folder, instead of refusing it.
        progress: show a progress bar.

    >>> import tempfile, fastbcd
    >>> dataset = torch.utils.data.TensorDataset(torch.rand(6, 3, 8, 8), torch.arange(6))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fastbcd.pack(dataset, folder, progress=False)
    ...     fastbcd.ImageData.open(folder)
    ImageData(6 × 3×8×8 float32, 6 classes, cpu)
    """
    folder = Path(path)
    if (folder / META).exists() and not overwrite:
        raise FileExistsError(
            f"{path} is packed already: use fastbcd.ImageData.open, or pass overwrite=True"
        )
    items = Items(source)
    items.check_repeatable()
    folder.mkdir(parents=True, exist_ok=True)
    for name in (META, IMAGES):  # whoever has mapped a file keeps the old one
        (folder / name).unlink(missing_ok=True)
    targets: list[np.ndarray] = []
    with open(folder / IMAGES, "wb") as file:
        shown = bar(progress, items, desc=f"packing {path}", total=items.count)
        for image, target in shown:
            if not targets:
                means, stds = pixels.stats(mean, std, image.shape)
                like = np.empty((0, *image.shape), image.dtype)
            file.write(np.ascontiguousarray(image).data)
            targets.append(target)
        file.flush()
        os.fsync(file.fileno())
    if not targets:
        raise ValueError("the dataset has no items, so its images have no shape")
    labels = target_tensor(np.stack(targets))
    if classes is not None:
        check_labels(labels, classes, "the data")
    arrays = {
        "labels": labels.numpy(),
        "like": like,
        "mean": np.array(means),
        "std": np.array(stds),
    }
    meta = save(arrays, {"format": FORMAT, "classes": json.dumps(classes)})
    write_atomically(folder / META, meta)


def read_packed(folder: Path) -> dict[str, Any]:
    """images (mapped, read-only), labels, mean, std and classes; many errors if it is damaged."""
    with safe_open(folder / META, framework="np") as file:
        notes = file.metadata() or {}
        arrays = {
            name: file.get_tensor(name) for name in ("labels", "mean", "std", "like")
        }
    if notes.get("format") != FORMAT:
        raise ValueError(f"its format is {notes.get('format')!r}, not {FORMAT!r}")
    like = arrays.pop("like")
    labels = arrays.pop("labels")
    shape = (len(labels), *like.shape[1:])
    images = np.memmap(folder / IMAGES, like.dtype, "r", shape=shape)
    size = os.path.getsize(folder / IMAGES)
    if images.nbytes != size:
        raise ValueError(f"{IMAGES} has {size:,} bytes, not {images.nbytes:,}")
    with warnings.catch_warnings():  # it is read-only, and nothing here writes into it
        warnings.simplefilter("ignore", UserWarning)
        mapped = torch.from_numpy(images)
    classes = json.loads(notes["classes"])
    return arrays | {
        "images": mapped,
        "labels": target_tensor(labels),
        "classes": classes,
    }

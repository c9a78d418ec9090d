"""Data by name, and as ImageData from whatever `score` and `bcd` are given."""

from __future__ import annotations

import dataclasses
import os
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch.utils import data as torch_data

from fastbcd.data.images import ImageData
from fastbcd.data.items import Items
from fastbcd.data.known import cifar, image_folder, tiny_imagenet
from fastbcd.data.npz import load_npz
from fastbcd.runtime import ranks
from fastbcd.runtime.limits import default_memory

# Mean and std of the train set, and the number of classes, of the data known by name.
KNOWN: dict[str, tuple[tuple[float, ...], tuple[float, ...], int]] = {
    "fashion-mnist-mini": ((0.2860,), (0.3530,), 10),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), 10),
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761), 100),
    "tiny-imagenet": ((0.480, 0.448, 0.398), (0.277, 0.269, 0.282), 200),
}


def as_data(data: Any) -> ImageData:
    """What `score` and `bcd` take, as ImageData.

    data: ImageData, an (images, labels) pair as for `ImageData.from_arrays`, or a Dataset or a
    DataLoader that fits into memory, which is read once. Floats are used as they are. Inputs and
    targets may have any shape.

    >>> as_data((torch.zeros(2, 3, 8, 8), torch.tensor([0, 1])))
    ImageData(2 × 3×8×8 float32, 2 classes, cpu)
    """
    if isinstance(data, ImageData):
        return data
    if isinstance(data, tuple | list) and len(data) == 2 and hasattr(data[0], "shape"):
        return ImageData.from_arrays(*data)
    if not isinstance(data, torch_data.DataLoader | torch_data.Dataset):
        raise TypeError(
            f"data is a {type(data).__name__}; give ImageData, an (images, labels) pair of arrays, "
            f"a torch Dataset or a DataLoader"
        )
    if not isinstance(data, torch_data.TensorDataset):  # which is in memory already
        _check_memory(data)
    return ImageData.from_dataset(data)


def _check_memory(data: Any) -> None:
    """Refuse a Dataset that takes more than half of the free memory, or that has no length.

    The ranks of a machine share its memory, and rank 0 answers for all.
    """
    items = Items(data)
    name = type(items.dataset).__name__
    way = "fastbcd.pack(dataset, path) writes it once, fastbcd.ImageData.open(path) maps it"
    if items.count is None:
        raise TypeError(f"{name} has no length: {way}")
    needed = items.count * sum(array.nbytes for array in items.item(0))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # ranks of this machine
    free = default_memory(torch.device("cpu")) // here
    if not ranks.from_first(torch.tensor(needed <= free)):
        raise ValueError(
            f"{name} does not fit into half of the free memory, {free / 2**30:,.1f} GiB: its "
            f"{items.count:,} items take {needed / 2**30:,.1f} GiB; {way}"
        )


def load(
    name: str | Path,
    split: str = "train",
    root: str | Path | None = None,
    *,
    download: bool = False,
) -> ImageData:
    """Data by name.

    Args:
        name: "fashion-mnist-mini" (inside the package), "cifar10", "cifar100", "tiny-imagenet", the
            path of an .npz file, or of a folder in which `fastbcd.pack` wrote `train` and `test`;
            "folder:PATH" with images of one size in PATH/train/CLASS and PATH/test/CLASS, through
            torchvision, as RGB values from 0 to 1.
        split: "train" or "test".
        root: the folder that holds the unpacked folder of the data; by default $FASTBCD_DATA, else
            ./data.
        download: fetch CIFAR, through torchvision.

    >>> load("fashion-mnist-mini", "test")
    ImageData(2000 × 1×28×28 uint8, 10 classes, cpu)
    """
    folder = Path(root or os.environ.get("FASTBCD_DATA") or "data")
    if str(name).endswith(".npz"):
        data = load_npz(name, split)
    elif split not in ("train", "test"):
        raise ValueError(f"split is {split!r}; {name} has 'train' and 'test'")
    elif str(name).startswith("folder:"):
        path = Path(str(name).removeprefix("folder:"))
        data = as_data(image_folder(path, split))
    elif name in KNOWN:
        data = _known(str(name), split, folder, download)
    elif Path(name).is_dir():
        data = ImageData.open(Path(name, split))
    else:
        raise ValueError(
            f"no data is called {name!r}; there are {', '.join(KNOWN)}, .npz paths, folders of "
            f"fastbcd.pack, and folder:PATH for images by class"
        )
    return dataclasses.replace(data, name=str(name))


def _known(name: str, split: str, root: Path, download: bool) -> ImageData:
    mean, std, classes = KNOWN[name]
    if name == "tiny-imagenet":
        return ImageData.from_dataset(tiny_imagenet(root, split), mean, std, classes)
    if name.startswith("cifar"):
        images, labels = cifar(name, root, split, download)
        return ImageData.from_arrays(images, labels, mean, std, classes)
    file = resources.files("fastbcd.data") / "assets" / f"{name}.npz"
    with resources.as_file(file) as path:
        return load_npz(path, split, mean, std)

"""Data by name, and as ImageData from whatever `score` and `bcd` are given."""

from __future__ import annotations

import dataclasses
import os
from functools import partial
from importlib import import_module, resources
from pathlib import Path
from typing import Any

import torch
from torch.utils import data as torch_data

from fastbcd.data.arrays import read_item
from fastbcd.data.cifar import CIFAR, HOME, Arrays, find_cifar, read_cifar
from fastbcd.data.images import ImageData
from fastbcd.data.stream import StreamData
from fastbcd.data.tiny_imagenet import read_tiny_imagenet
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

    data: ImageData, an (images, labels) pair as for `ImageData.from_arrays`, a Dataset or a
    DataLoader, which is read once, or streamed if it does not fit into memory. Floats are used as
    they are. Inputs and targets may have any shape.

    >>> as_data((torch.zeros(2, 3, 8, 8), torch.tensor([0, 1])))
    ImageData(2 × 3×8×8 float32, 2 classes, cpu)
    """
    if isinstance(data, ImageData):
        return data
    if isinstance(data, torch_data.DataLoader | torch_data.Dataset):
        loader = data if isinstance(data, torch_data.DataLoader) else None
        if not _fits(data if loader is None else loader.dataset):
            return StreamData(data)
        return ImageData.from_dataset(data) if loader is None else ImageData.from_loader(loader)
    if isinstance(data, tuple | list) and len(data) == 2 and hasattr(data[0], "shape"):
        return ImageData.from_arrays(*data)
    raise TypeError(
        f"data is a {type(data).__name__}; give ImageData, an (images, labels) pair of arrays, "
        f"a torch Dataset or a DataLoader"
    )


def _fits(dataset: Any) -> bool:
    """Does a Dataset fit into half of the free memory, shared by the ranks of this machine?

    Rank 0 answers for all ranks.
    """
    if isinstance(dataset, torch_data.TensorDataset) or not getattr(dataset, "__len__", int)():
        return True
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed = len(dataset) * sum(array.nbytes for array in read_item(dataset, 0))
    fits = needed <= default_memory(torch.device("cpu")) // local
    return bool(ranks.from_first(torch.tensor(fits)))


def load(
    name: str | Path,
    split: str = "train",
    root: str | Path | None = None,
    *,
    download: bool = False,
) -> ImageData:
    """Data by name: "fashion-mnist-mini" (inside the package), "cifar10", "cifar100",
    "tiny-imagenet", or the path of an .npz file. split: "train" or "test".

    root: the folder that holds the data, or the archive itself; by default $FASTBCD_DATA, else
    ./data. download: fetch CIFAR through torchvision.

    >>> load("fashion-mnist-mini", "test")
    ImageData(2000 × 1×28×28 uint8, 10 classes, cpu)
    """
    if str(name).endswith(".npz"):
        return dataclasses.replace(ImageData.from_npz(name, split), name=str(name))
    if name not in KNOWN:
        raise ValueError(f"no data is called {name!r}; there are {', '.join(KNOWN)} and .npz paths")
    if split not in ("train", "test"):
        raise ValueError(f"split is {split!r}; {name} has 'train' and 'test'")
    mean, std, classes = KNOWN[str(name)]
    folder = Path(root or os.environ.get("FASTBCD_DATA") or "data")
    if name == "fashion-mnist-mini":
        with resources.as_file(resources.files("fastbcd.data") / "assets" / f"{name}.npz") as path:
            data = ImageData.from_npz(path, split, mean, std, classes)
    else:
        cifar, tiny = partial(_cifar, classes=classes, download=download), read_tiny_imagenet
        read = (tiny if name == "tiny-imagenet" else cifar)(folder, split)
        data = ImageData.from_arrays(*read, mean, std, classes, "NCHW")
    return dataclasses.replace(data, name=str(name))


def _cifar(root: Path, split: str, *, classes: int, download: bool) -> Arrays:
    place = find_cifar(root, classes)
    if place is None and download:
        try:
            datasets = import_module("torchvision.datasets")
        except (ImportError, RuntimeError) as error:  # RuntimeError: built for another torch
            raise ImportError(
                f"downloading goes through torchvision, which cannot be imported ({error}): pip "
                f"install torchvision, or put {CIFAR[classes][0].archive} from {HOME} into {root}"
            ) from error
        getattr(datasets, f"CIFAR{classes}")(str(root), download=True)
        place = find_cifar(root, classes)
    if place is None:
        names = ", ".join(layout.archive for layout in CIFAR[classes])
        raise FileNotFoundError(
            f"there is no CIFAR-{classes} in {root}: neither {names} nor an unpacked folder of "
            f"one; pass root=..., set FASTBCD_DATA, or download=True"
        )
    return read_cifar(place, classes, split)

"""CIFAR and Tiny ImageNet, from the folders that their archives unpack to."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset


def _module(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:  # RuntimeError: built for another torch
        raise ImportError(
            f"{what}, which cannot be imported ({error}): pip install 'fastbcd[vision]'"
        ) from error


def read_cifar(name: str, root: Path, split: str, download: bool) -> tuple[np.ndarray, list[int]]:
    """Images, uint8 [N,32,32,3], and labels of "cifar10" or "cifar100"; root: around the folder.

    The files are pickles; torchvision opens them only if they are, by their MD5, the published
    ones.
    """
    missing = FileNotFoundError(
        f"there is no {name} in {root}, or its files are damaged: unpack the python archive of "
        f"https://www.cs.toronto.edu/~kriz/cifar.html there, pass root=..., set FASTBCD_DATA, "
        f"or pass download=True"
    )
    if not (download or root.is_dir()):
        raise missing
    datasets = _module("torchvision.datasets", f"{name} is read through torchvision")
    try:
        data = getattr(datasets, name.upper())(root, split == "train", download=download)
    except RuntimeError as error:
        raise missing from error
    return data.data, data.targets


class TinyImageNet(Dataset):
    """RGB images and labels of a split: "train", or "test" for the val folder, which has labels.

    Class k is the k-th class folder by name, as in torchvision's ImageFolder. Train images are
    ordered by their number in the class, then by class, so that the first n are balanced.
    """

    def __init__(self, root: Path, split: str) -> None:
        self.pil = _module("PIL.Image", "JPEG files are read by Pillow")
        folder = root / "tiny-imagenet-200"
        if not folder.is_dir():
            folder = root
        try:
            files = _train_files(folder) if split == "train" else _val_files(folder / "val")
            classes = sorted(path.name for path in folder.glob("train/n*"))
            self.files = [(path, classes.index(name)) for path, name in files]
        except (OSError, ValueError) as error:
            raise FileNotFoundError(
                f"there is no whole Tiny ImageNet in {folder} ({error}): unpack "
                f"http://cs231n.stanford.edu/tiny-imagenet-200.zip and give the folder "
                f"tiny-imagenet-200 unchanged"
            ) from error

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        path, label = self.files[i]
        try:
            with self.pil.open(path) as file:
                return file.convert("RGB"), label
        except Exception as error:  # Pillow raises many kinds on damaged files
            raise ValueError(f"{path} cannot be decoded ({error}); unpack it again") from error


def _train_files(folder: Path) -> list[tuple[Path, str]]:
    """Each image, such as train/n01443537/images/n01443537_7.JPEG, and the name of its class."""
    files = [(path, path.parts[-3]) for path in folder.glob("train/n*/images/*.JPEG")]
    if not files:
        raise ValueError("train/n*/images/*.JPEG is missing")
    return sorted(files, key=lambda file: (file[0].stem.partition("_")[2], file[1]))


def _val_files(folder: Path) -> list[tuple[Path, str]]:
    """Each image and the name of its class, from lines of the two and further columns."""
    lines = (folder / "val_annotations.txt").read_text().splitlines()
    rows = (line.split()[:2] for line in lines)
    return [(folder / "images" / image, name) for image, name in rows]

"""CIFAR, Tiny ImageNet and folders of images, read by torchvision."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np


def _datasets(name: str) -> Any:
    try:
        return importlib.import_module("torchvision.datasets")
    except (ImportError, RuntimeError) as error:  # the latter: built for another torch
        raise ImportError(
            f"{name} is read through torchvision, which cannot be imported ({error}): pip install "
            f"'fastbcd[vision]'"
        ) from error


def cifar(
    name: str, root: Path, split: str, download: bool
) -> tuple[np.ndarray, list[int]]:
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
    read = getattr(_datasets(name), name.upper())
    try:
        data = read(root, split == "train", download=download)
    except RuntimeError as error:
        raise missing from error
    return data.data, data.targets


def tiny_imagenet(root: Path, split: str) -> Any:
    """A Dataset of RGB images and labels: "train", or "test" for the val folder, which has labels.

    Train images are ordered by their number in the class, then by class, so that the first n are
    balanced.
    """
    folder = root / "tiny-imagenet-200"
    if not folder.is_dir():
        folder = root
    datasets = _datasets("tiny-imagenet")
    val = folder / "val"
    try:
        data = datasets.ImageFolder(folder / "train")
        if split == "train":
            data.samples.sort(key=lambda item: (item[0].rpartition("_")[2], item[1]))
        else:
            lines = (val / "val_annotations.txt").read_text().splitlines()
            data.samples = [
                (str(val / "images" / image), data.class_to_idx[name])
                for image, name, *_ in map(str.split, lines)
            ]
    except (OSError, ValueError, KeyError) as error:
        raise FileNotFoundError(
            f"there is no whole Tiny ImageNet in {folder} ({error}): unpack "
            f"http://cs231n.stanford.edu/tiny-imagenet-200.zip and give the folder "
            f"tiny-imagenet-200 unchanged"
        ) from error
    return data


def image_folder(root: Path, split: str) -> Any:
    """A Dataset of RGB images: a class is a folder in root/train, or in root/test or root/val."""
    part = root / split
    if split == "test" and not part.is_dir():
        part = root / "val"
    datasets = _datasets(f"the folder {root}")
    try:
        classes = datasets.folder.find_classes(root / "train")[0]
        data = datasets.ImageFolder(part)
    except OSError as error:
        raise FileNotFoundError(
            f"folder:{root} has no images by class ({error}): give a folder with train and test, "
            f"each with one folder of images per class"
        ) from error
    if data.classes != classes:
        raise ValueError(
            f"{part} has the classes {data.classes}, and {root / 'train'} has {classes}: give both "
            f"the same folders"
        )
    return data

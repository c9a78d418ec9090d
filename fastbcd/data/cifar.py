"""CIFAR-10 and CIFAR-100 through torchvision.

The files are pickles; torchvision opens them only if they are, by their MD5, the published ones.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np


def read_cifar(name: str, root: Path, split: str, download: bool) -> tuple[np.ndarray, list[int]]:
    """Images, uint8 [N,32,32,3], and labels of "cifar10" or "cifar100"; root: around the folder."""
    missing = FileNotFoundError(
        f"there is no {name} in {root}, or its files are damaged: unpack the python archive of "
        f"https://www.cs.toronto.edu/~kriz/cifar.html there, pass root=..., set FASTBCD_DATA, "
        f"or pass download=True"
    )
    if not (download or root.is_dir()):
        raise missing
    try:
        datasets = importlib.import_module("torchvision.datasets")
    except (ImportError, RuntimeError) as error:  # RuntimeError: built for another torch
        raise ImportError(
            f"{name} is read through torchvision, which cannot be imported ({error}): pip install "
            f"'fastbcd[vision]'"
        ) from error
    try:
        data = getattr(datasets, name.upper())(root, split == "train", download=download)
    except RuntimeError as error:
        raise missing from error
    return data.data, data.targets

"""Tiny ImageNet, from the folder it unpacks to."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

HOME = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"


class TinyImageNet(Dataset):
    """RGB images and labels of a split: "train", or "test" for the val folder, which has labels.

    Class k is the k-th class folder by name, as in torchvision's ImageFolder. Train images are
    ordered by their number in the class, then by class, so that the first n are balanced.
    """

    def __init__(self, root: Path, split: str) -> None:
        folder = root
        if (root / "tiny-imagenet-200").is_dir():
            folder = root / "tiny-imagenet-200"
        try:
            self.pil: Any = importlib.import_module("PIL.Image")
        except ImportError as error:
            raise ImportError("JPEG files need Pillow: pip install 'fastbcd[vision]'") from error
        try:
            names = sorted(path.name for path in folder.glob("train/n*"))
            files = _train_files(folder) if split == "train" else _val_files(folder)
            self.files = [(path, names.index(name)) for path, name in files]
        except (OSError, ValueError) as error:
            raise FileNotFoundError(
                f"there is no whole Tiny ImageNet in {folder} ({error}): unpack {HOME} and give "
                f"the folder tiny-imagenet-200 unchanged"
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
    lines = (folder / "val" / "val_annotations.txt").read_text().splitlines()
    rows = (line.split("\t")[:2] for line in lines)
    return [(folder / "val" / "images" / image, name) for image, name in rows]

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
        names = sorted(path.name for path in folder.glob("train/n*"))
        labels = {name: label for label, name in enumerate(names)}
        try:
            if split == "train":
                self.files = _train_files(folder, labels)
            else:
                self.files = _val_files(folder, labels)
            self.pil: Any = importlib.import_module("PIL.Image")
        except (OSError, ValueError, KeyError) as error:
            raise FileNotFoundError(
                f"there is no whole Tiny ImageNet in {folder} ({error}): unpack {HOME} and give "
                f"the folder tiny-imagenet-200 unchanged"
            ) from error
        except ImportError as error:
            raise ImportError("JPEG files need Pillow: pip install 'fastbcd[vision]'") from error

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        path, label = self.files[i]
        try:
            with self.pil.open(path) as file:
                return file.convert("RGB"), label
        except Exception as error:  # Pillow raises many kinds on damaged files
            raise ValueError(f"{path} cannot be decoded ({error}); unpack it again") from error


def _train_files(folder: Path, labels: dict[str, int]) -> list[tuple[Path, int]]:
    ranked = []
    for name, label in labels.items():
        files = sorted(folder.glob(f"train/{name}/images/*.JPEG"))
        ranked += [(rank, label, path) for rank, path in enumerate(files)]
    if not ranked:
        raise ValueError("train/n*/images/*.JPEG is missing")
    return [(path, label) for _, label, path in sorted(ranked)]


def _val_files(folder: Path, labels: dict[str, int]) -> list[tuple[Path, int]]:
    files = []
    for line in (folder / "val" / "val_annotations.txt").read_text().splitlines():
        name, wnid, *_ = line.split("\t")
        files.append((folder / "val" / "images" / name, labels[wnid]))
    return files

"""Images in memory, and their views: what `score`, `bcd` and fine-tuning read.

    data = fastbcd.load("cifar10", "train", root="data")       # ImageData, 50,000 × 3×32×32 uint8
    for x, labels in data.batches(256): ...                    # in order, normalised
    for x, labels, indices, views in data.train_batches(128, seed=0, step=0, epoch=0): ...

A *view* of an image is what a random crop with zero padding p and a horizontal flip can make of
it: number v = (top·(2p+1) + left)·2 + flip, with top and left counted in the padded image, so
there are (2p+1)²·2 of them (162 for p = 4). Which view a sample takes, and the order of samples,
are pure functions of (seed, step, epoch, sample id): not of batches, devices or processes.
"""

from __future__ import annotations

import dataclasses
import operator
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module, resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import data as torch_data

from fastbcd import archives

Stats = Sequence[float] | None
# Samplers that stand for all of their dataset, in whatever order.
WHOLE = (torch_data.SequentialSampler, torch_data.RandomSampler, torch_data.DistributedSampler)
FLOATS = (torch.float32, torch.float64)
# Mean and std of the train set, and the number of classes, of the data known by name.
KNOWN: dict[str, tuple[tuple[float, ...], tuple[float, ...], int]] = {
    "fashion-mnist-mini": ((0.2860,), (0.3530,), 10),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), 10),
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761), 100),
    "tiny-imagenet": ((0.480, 0.448, 0.398), (0.277, 0.269, 0.282), 200),
}
ORDER, VIEWS = 1, 2  # streams of random numbers; 0 is the masks', so none foretells another


@dataclass(frozen=True, eq=False, repr=False)
class ImageData:
    """Images, labels and how to normalise them; all tensors on one device.

    >>> data = ImageData.from_arrays(np.zeros((6, 8, 8, 3), np.uint8), [0, 1, 2, 0, 1, 2])
    >>> data
    ImageData(6 × 3×8×8 uint8, 3 classes, cpu)
    >>> [tuple(x.shape) for x, labels in data.batches(4)]
    [(4, 3, 8, 8), (2, 3, 8, 8)]
    """

    images: Tensor  # uint8 [N,C,H,W]; or float32/float64, which mean and std take as they are
    labels: Tensor  # int64 [N]
    mean: tuple[float, ...]  # per channel, in units of 0..1
    std: tuple[float, ...]
    classes: int
    # int64 [N], each sample's number in the data it was cut from; 0 .. N-1 if not given
    ids: Tensor = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.ids is None:
            ids = torch.arange(len(self.images), device=self.images.device)
            object.__setattr__(self, "ids", ids)
        _check(self)

    # ------------------------------------------------------------------ where it comes from

    @classmethod
    def from_arrays(
        cls,
        images: Any,
        labels: Any,
        mean: Stats = None,
        std: Stats = None,
        classes: int | None = None,
        layout: str | None = None,
    ) -> ImageData:
        """From numpy arrays or tensors, without copying what already fits.

        images: uint8 [N,C,H,W], [N,H,W,C] or [N,H,W]; or floats [N,C,H,W] or [N,H,W].
        layout: "NCHW" or "NHWC" for 4-D images; None takes NHWC if they are uint8 and only the
        last dimension is 1 or 3. mean, std: computed per channel from uint8 images if not given;
        0 and 1 for floats, which then pass as they are. classes: largest label + 1 if not given.
        """
        x, y = _image_tensor(images, layout), _label_tensor(labels)
        y = y.to(x.device)
        if mean is None or std is None:
            measured = _statistics(x)
            mean, std = (m if g is None else g for g, m in zip((mean, std), measured, strict=True))
        if classes is None:
            classes = int(y.max()) + 1 if len(y) else 0
        return cls(x, y, tuple(map(float, mean)), tuple(map(float, std)), classes)

    @classmethod
    def from_npz(
        cls,
        path: str | Path,
        split: str = "train",
        mean: Stats = None,
        std: Stats = None,
        classes: int | None = None,
    ) -> ImageData:
        """From an .npz file with {split}_images and {split}_labels, or images and labels.

        What is not given is taken over the file, so that all its splits are treated alike: mean
        and std from the train images, classes from all labels.
        """
        keys = archives.npz_keys(path)
        prefix = "" if "images" in keys and f"{split}_images" not in keys else f"{split}_"
        images = archives.read_npz(path, f"{prefix}images")
        labels = archives.read_npz(path, f"{prefix}labels")
        if classes is None:
            others = [archives.read_npz(path, k) for k in keys if k.endswith("labels")]
            classes = max((int(o.max()) + 1 for o in others if o.size), default=0)
        if (mean is None or std is None) and prefix != "train_" and "train_images" in keys:
            train = _statistics(_image_tensor(archives.read_npz(path, "train_images"), None))
            mean, std = (m if g is None else g for g, m in zip((mean, std), train, strict=True))
        try:
            return cls.from_arrays(images, labels, mean, std, classes)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{path}, split {split!r}: {error}") from error

    @classmethod
    def from_dataset(
        cls, dataset: Any, mean: Stats = None, std: Stats = None, classes: int | None = None
    ) -> ImageData:
        """From a torch Dataset of (image, label) pairs, read once, in order.

        Images: PIL, uint8 tensors or arrays, or floats that come from uint8: in 0..1 as ToTensor
        makes them, or normalised with the mean and std given here. A TensorDataset is taken as its
        pair of tensors. Random transforms are refused: crops and flips are made here (`views`).
        """
        if isinstance(dataset, torch_data.TensorDataset) and len(dataset.tensors) == 2:
            return cls.from_arrays(*dataset.tensors, mean, std, classes)
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"{type(dataset).__name__} has no length or items; give a Dataset that has"
            )
        if len(dataset) == 0:
            raise ValueError("the dataset has no items, so its images have no shape")
        images = np.empty((0,), np.uint8)
        labels = np.empty(len(dataset), np.int64)
        for i in range(len(dataset)):
            image, labels[i] = _read_item(dataset, i, mean, std)
            if i == 0:
                images = np.empty((len(dataset), *image.shape), np.uint8)
            if image.shape != images.shape[1:]:
                raise ValueError(
                    f"item {i} of the dataset has shape {image.shape}, item 0 {images.shape[1:]}; "
                    f"resize all to one size"
                )
            images[i] = image
            if i < 8 and not np.array_equal(_read_item(dataset, i, mean, std)[0], image):
                raise ValueError(
                    f"item {i} of the dataset is another image each time it is read; give the "
                    f"dataset without its random transforms: fastbcd makes crops and flips itself"
                )
        return cls.from_arrays(images, labels, mean, std, classes, "NCHW")

    @classmethod
    def from_loader(
        cls, loader: Any, mean: Stats = None, std: Stats = None, classes: int | None = None
    ) -> ImageData:
        """From the dataset behind a DataLoader, in the dataset's order, whatever its shuffling."""
        sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
        subset = isinstance(sampler, torch_data.SubsetRandomSampler)
        if not subset and not isinstance(sampler, WHOLE):
            raise TypeError(
                f"the loader's {type(sampler).__name__} may leave samples out or repeat them; "
                f"give the Dataset itself, or a torch.utils.data.Subset of it"
            )
        data = cls.from_dataset(loader.dataset, mean, std, classes)
        return data.subset(sorted(sampler.indices)) if subset else data

    # ------------------------------------------------------------------ parts of it

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        shape, dtype = "×".join(map(str, self.images.shape[1:])), str(self.images.dtype)[6:]
        return f"ImageData({len(self)} × {shape} {dtype}, {self.classes} classes, {self.device})"

    @property
    def device(self) -> torch.device:
        return self.images.device

    def to(self, device: torch.device | str) -> ImageData:
        """The same data on another device."""
        return dataclasses.replace(
            self,
            images=self.images.to(device),
            labels=self.labels.to(device),
            ids=self.ids.to(device),
        )

    def first(self, n: int) -> ImageData:
        """The first n samples, sharing memory."""
        if not 0 <= n <= len(self):
            raise ValueError(f"first({n}): there are {len(self)} samples")
        return self._cut(slice(0, n))

    def shard(self, rank: int, world: int) -> ImageData:
        """Part `rank` of `world` contiguous parts whose sizes differ by at most one.

        >>> data = ImageData.from_arrays(np.zeros((7, 1, 4, 4), np.uint8), range(7))
        >>> [data.shard(r, 3).ids.tolist() for r in range(3)]
        [[0, 1], [2, 3], [4, 5, 6]]
        """
        _check_rank(rank, world)
        return self._cut(slice(rank * len(self) // world, (rank + 1) * len(self) // world))

    def subset(self, indices: Any) -> ImageData:
        """The samples at these positions, copied; they keep their ids and so their views."""
        index = _label_tensor(indices, "indices").to(self.device)
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < len(self):
            raise IndexError(
                f"indices go from {int(index.min())} to {int(index.max())}; "
                f"there are {len(self)} samples"
            )
        return self._cut(index)

    def _cut(self, where: Any) -> ImageData:
        return dataclasses.replace(
            self, images=self.images[where], labels=self.labels[where], ids=self.ids[where]
        )

    # ------------------------------------------------------------------ batches

    def normalise(
        self,
        images: Tensor,
        out: Tensor | None = None,
        *,
        memory_format: torch.memory_format = torch.contiguous_format,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """(images/255 - mean)/std in one pass, into `out` (whose dtype and layout then hold).

        images [B,C,H,W] of this data's dtype; floats are not divided by 255.
        """
        if out is None:
            out = torch.empty(
                images.shape, dtype=dtype, device=images.device, memory_format=memory_format
            )
        elif out.shape != images.shape:
            raise ValueError(f"out has shape {tuple(out.shape)}, the images {tuple(images.shape)}")
        top = 1.0 if images.is_floating_point() else 255.0
        if top == 1.0 and not any(self.mean) and set(self.std) == {1.0}:
            return out.copy_(images)
        wide = torch.float64 if out.dtype == torch.float64 else torch.float32
        scale, shift = _affine(self.mean, self.std, top, wide, images.device)
        return torch.addcmul(shift, images, scale, out=out)

    def batches(
        self,
        batch_size: int,
        *,
        memory_format: torch.memory_format = torch.contiguous_format,
        dtype: torch.dtype = torch.float32,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(normalised images, labels) in order; the last batch may be short."""
        _check_batch_size(batch_size)
        parts = zip(self.images.split(batch_size), self.labels.split(batch_size), strict=True)
        return (
            (self.normalise(x, memory_format=memory_format, dtype=dtype), y)
            for x, y in parts
            if len(y)
        )

    # ------------------------------------------------------------------ views

    def order(self, *, seed: int, step: int, epoch: int) -> Tensor:
        """A shuffle, int64 [N]. Part of the data keeps the order its samples have in the whole."""
        keys = self._random(ORDER, seed, step, epoch)
        return torch.from_numpy(np.argsort(keys, kind="stable")).to(self.device)

    def view_ids(
        self, *, seed: int, step: int, epoch: int, padding: int = 4, flip: bool = True
    ) -> Tensor:
        """The view each sample takes in this epoch, int64 [N] in 0 .. (2·padding+1)²·2-1.

        Without flip all of them are even.
        """
        views = self._random(VIEWS, seed, step, epoch) % np.uint64(view_count(padding))
        ids = torch.from_numpy(views.astype(np.int64))
        return (ids if flip else ids - ids % 2).to(self.device)

    def _random(self, stream: int, seed: int, step: int, epoch: int) -> np.ndarray:
        """One 64-bit number per sample: the id-th of the stream (seed, step, epoch)."""
        for name, value in (("seed", seed), ("step", step), ("epoch", epoch)):
            if not 0 <= value < 2**63:
                raise ValueError(f"{name} is {value}; it must be a whole number from 0 to 2^63-1")
        ids = self.ids.cpu().numpy()
        # Philox counts in the lowest word; raw numbers, as only these never change with numpy.
        generator = np.random.Philox(
            key=np.array([stream, seed], np.uint64),
            counter=np.array([0, 0, epoch, step], np.uint64),
        )
        return generator.random_raw(int(ids.max()) + 1 if len(ids) else 0)[ids]

    def views(
        self,
        indices: Tensor,
        view_ids: Tensor,
        *,
        padding: int = 4,
        out: Tensor | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Samples `indices` under the views `view_ids` (both int64 [B]), normalised [B,C,H,W].

        Equivalent to RandomCrop((H, W), padding) and a flip on the raw image, then normalising.
        """
        # On a GPU the check would wait for the device; train_batches makes only valid ids.
        if view_ids.device.type == "cpu" and len(view_ids):
            low, high, count = int(view_ids.min()), int(view_ids.max()), view_count(padding)
            if low < 0 or high >= count:
                raise ValueError(
                    f"view_ids go from {low} to {high}; padding {padding} gives 0 to {count - 1}"
                )
        x = self.images.index_select(0, indices)
        batch, channels, height, width = x.shape
        index = _crop_index(view_ids, height, width, padding)
        x = F.pad(x, (padding,) * 4).flatten(2)
        x = x.gather(2, index.unsqueeze(1).expand(-1, channels, -1))
        x = x.view(batch, channels, height, width)
        return self.normalise(x, out, memory_format=memory_format, dtype=dtype)

    def train_batches(
        self,
        batch_size: int,
        *,
        seed: int,
        step: int,
        epoch: int,
        padding: int = 4,
        flip: bool = True,
        rank: int = 0,
        world: int = 1,
        memory_format: torch.memory_format = torch.contiguous_format,
        dtype: torch.dtype = torch.float32,
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """One epoch: (images, labels, indices, view_ids), shuffled, each sample in its view.

        With `world` ranks each batch of batch_size is shared out among them, so the batches are
        the same for any number of ranks; a last batch with fewer samples than ranks is left out.
        """
        _check_batch_size(batch_size)
        _check_rank(rank, world)
        order = self.order(seed=seed, step=step, epoch=epoch)
        views = self.view_ids(seed=seed, step=step, epoch=epoch, padding=padding, flip=flip)
        whole = (part for part in order.split(batch_size) if len(part) >= world)
        mine = (b[rank * len(b) // world : (rank + 1) * len(b) // world] for b in whole)
        options: dict[str, Any] = {"memory_format": memory_format, "dtype": dtype}
        return (
            (self.views(i, views[i], padding=padding, **options), self.labels[i], i, views[i])
            for i in mine
        )


def view_count(padding: int) -> int:
    """How many views a padding allows: (2·padding+1)² crops, each with and without flip."""
    if padding < 0:
        raise ValueError(f"padding is {padding}; it must be 0 or more")
    return 2 * (2 * padding + 1) ** 2


def as_data(data: Any, mean: Stats = None, std: Stats = None) -> ImageData:
    """Whatever `score` and `bcd` take, as ImageData.

    data: ImageData, an (images, labels) pair as for `ImageData.from_arrays` (also normalised
    floats, which pass as they are), a Dataset or a DataLoader.

    >>> as_data((torch.zeros(2, 3, 8, 8), torch.tensor([0, 1])))
    ImageData(2 × 3×8×8 float32, 2 classes, cpu)
    """
    if isinstance(data, ImageData):
        given = {k: tuple(v) for k, v in (("mean", mean), ("std", std)) if v is not None}
        return dataclasses.replace(data, **given) if given else data  # type: ignore[arg-type]
    if isinstance(data, torch_data.DataLoader):
        return ImageData.from_loader(data, mean, std)
    if isinstance(data, tuple | list) and len(data) == 2 and hasattr(data[0], "shape"):
        return ImageData.from_arrays(data[0], data[1], mean, std)
    if isinstance(data, torch_data.Dataset):
        return ImageData.from_dataset(data, mean, std)
    raise TypeError(
        f"data is a {type(data).__name__}; give ImageData, an (images, labels) pair of arrays, "
        f"a torch Dataset or a DataLoader"
    )


def load(
    name: str | Path, split: str = "train", root: str | Path | None = None,
    download: bool = False, class_order: str = "wnids",
) -> ImageData:  # fmt: skip
    """Data by name: "fashion-mnist-mini" (inside the package), "cifar10", "cifar100",
    "tiny-imagenet", or the path of an .npz file. split: "train" or "test".

    root: the folder that holds the data, or the archive itself; by default $FASTBCD_DATA, else
    ./data. download: fetch CIFAR through torchvision. class_order: see `read_tiny_imagenet`.

    >>> load("fashion-mnist-mini", "test")
    ImageData(2000 × 1×28×28 uint8, 10 classes, cpu)
    """
    if str(name).endswith(".npz"):
        return ImageData.from_npz(name, split)
    if name not in KNOWN:
        raise ValueError(f"no data is called {name!r}; there are {', '.join(KNOWN)} and .npz paths")
    if split not in ("train", "test"):
        raise ValueError(f"split is {split!r}; {name} has 'train' and 'test'")
    mean, std, classes = KNOWN[str(name)]
    if name == "fashion-mnist-mini":
        with resources.as_file(resources.files("fastbcd") / "assets" / f"{name}.npz") as path:
            return ImageData.from_npz(path, split, mean, std, classes)
    root = Path(root or os.environ.get("FASTBCD_DATA") or "data")
    if name == "tiny-imagenet":
        inside = root / "tiny-imagenet-200"
        folder = inside if inside.is_dir() else root
        arrays = archives.read_tiny_imagenet(folder, split, class_order)
    else:
        place = archives.find_cifar(root, classes)
        if place is None and download:
            _download_cifar(root, classes)
            place = archives.find_cifar(root, classes)
        if place is None:
            names = ", ".join(layout.archive for layout in archives.CIFAR[classes])
            raise FileNotFoundError(
                f"there is no CIFAR-{classes} in {root}: neither {names} nor an unpacked folder of "
                f"one; pass root=..., set FASTBCD_DATA, or download=True"
            )
        arrays = archives.read_cifar(place, classes, split)
    return ImageData.from_arrays(*arrays, mean, std, classes, "NCHW")


def _download_cifar(root: Path, classes: int) -> None:
    try:
        datasets = import_module("torchvision.datasets")
    except (ImportError, RuntimeError) as error:  # RuntimeError: built for another torch
        raise ImportError(
            f"downloading goes through torchvision, which cannot be imported ({error}); install it "
            f"(pip install torchvision), or put cifar-{classes}-python.tar.gz from "
            f"https://www.cs.toronto.edu/~kriz/cifar.html into {root}"
        ) from error
    getattr(datasets, f"CIFAR{classes}")(str(root), download=True)


@lru_cache(maxsize=64)
def _affine(
    mean: tuple[float, ...], std: tuple[float, ...], top: float, dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(x/top - mean)/std = x·scale + shift: scale and shift, [1,C,1,1]."""
    scale = [1 / (top * s) for s in std]
    shift = [-m / s for m, s in zip(mean, std, strict=True)]
    both = torch.tensor([scale, shift], dtype=torch.float64).to(device, dtype)
    return both[0].view(1, -1, 1, 1), both[1].view(1, -1, 1, 1)


def _crop_index(views: Tensor, height: int, width: int, padding: int) -> Tensor:
    """Where in the padded, flattened image each pixel of a view comes from: [B, height·width]."""
    side, stride = 2 * padding + 1, width + 2 * padding
    top, left, flip = views // 2 // side, views // 2 % side, views % 2 == 1
    column = torch.arange(width, device=views.device)
    column = left[:, None] + torch.where(flip[:, None], width - 1 - column, column)
    row = (top[:, None] + torch.arange(height, device=views.device)) * stride
    return (row[:, :, None] + column[:, None, :]).flatten(1)


def _image_tensor(images: Any, layout: str | None) -> Tensor:
    """uint8 or float images [N,C,H,W] from what the user has."""
    if not isinstance(images, Tensor):
        array = np.ascontiguousarray(images)
        images = torch.from_numpy(array if array.flags.writeable else array.copy())
    if images.dtype in (torch.float16, torch.bfloat16):
        images = images.float()
    if images.dtype != torch.uint8 and images.dtype not in FLOATS:
        raise TypeError(f"images are {images.dtype}; give uint8 (0 to 255), or normalised floats")
    if images.ndim == 3:
        return images.unsqueeze(1)
    if images.ndim != 4:
        raise ValueError(f"images are {list(images.shape)}, not [N,C,H,W], [N,H,W,C] or [N,H,W]")
    if layout is None:
        last = images.dtype == torch.uint8 and _channels_last(images.shape[1], images.shape[3])
        layout = "NHWC" if last else "NCHW"
    if layout not in ("NCHW", "NHWC"):
        raise ValueError(f"layout is {layout!r}; it is 'NCHW' or 'NHWC'")
    return images.permute(0, 3, 1, 2).contiguous() if layout == "NHWC" else images


def _channels_last(first: int, last: int) -> bool:
    return last in (1, 3) and first not in (1, 3)


def _label_tensor(labels: Any, name: str = "labels") -> Tensor:
    """int64 [N] from whole numbers of any kind."""
    if not isinstance(labels, Tensor):
        array = np.asarray(labels)
        if array.size and array.dtype.kind not in "iu":
            raise TypeError(f"{name} are {array.dtype}; they must be whole numbers")
        labels = torch.from_numpy(array.astype(np.int64))
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"{name} are {labels.dtype}; they must be whole numbers")
    if labels.ndim != 1:
        raise ValueError(f"{name} are {list(labels.shape)}, not [N]; if one-hot: labels.argmax(1)")
    return labels.long()


def _statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std of each channel in units of 0..1, exact for uint8; 0 and 1 for floats."""
    channels = images.shape[1]
    if images.is_floating_point() or images.numel() == 0:
        return (0.0,) * channels, (1.0,) * channels
    level = torch.arange(256, dtype=torch.float64) / 255
    mean, std = [], []
    for c in range(channels):
        share = torch.bincount(images[:, c].flatten(), minlength=256).cpu().double()
        share /= share.sum()
        mean.append(float((share * level).sum()))
        std.append(float((share * (level - mean[-1]) ** 2).sum().sqrt()) or 1.0)  # constant: 1
    return tuple(mean), tuple(std)


def _check(data: ImageData) -> None:
    """Refuse data that would fail or mislead later."""
    images, labels, ids = data.images, data.labels, data.ids
    if images.dtype != torch.uint8 and images.dtype not in FLOATS:
        raise TypeError(f"images are {images.dtype}; they must be uint8, float32 or float64")
    if images.ndim != 4:
        raise ValueError(f"images have shape {list(images.shape)}, not [N,C,H,W]")
    for name, tensor in (("labels", labels), ("ids", ids)):
        if tensor.dtype != torch.int64 or tensor.shape != images.shape[:1]:
            raise ValueError(
                f"{name} are {tensor.dtype} {list(tensor.shape)} beside {len(images)} images; "
                f"they must be int64 [{len(images)}]"
            )
        if tensor.device != images.device:
            raise ValueError(f"{name} are on {tensor.device}, the images on {images.device}")
    for name, values in (("mean", data.mean), ("std", data.std)):
        if len(values) != images.shape[1]:
            raise ValueError(f"{name} has {len(values)} values for {images.shape[1]} channels")
        if not np.isfinite(values).all() or (name == "std" and min(values, default=1.0) <= 0):
            raise ValueError(f"{name} is {tuple(values)}; it must be finite, and std above 0")
    archives.check_labels(labels.cpu().numpy(), data.classes, "labels")


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be 1 or more")


def _check_rank(rank: int, world: int) -> None:
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} of world {world}: rank goes from 0 to world-1")


def _read_item(dataset: Any, i: int, mean: Stats, std: Stats) -> tuple[np.ndarray, int]:
    """Item i of a Dataset: uint8 [C,H,W] and its label."""
    item = dataset[i]
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise TypeError(f"item {i} of the dataset is a {type(item).__name__}, not (image, label)")
    image, label = item[:2]
    where = f"the image of item {i} of the dataset"
    try:
        label = operator.index(label)
    except (TypeError, ValueError) as error:
        raise TypeError(f"the label of item {i} of the dataset is {label!r}, not an int") from error
    if getattr(image, "mode", "RGB") not in ("L", "RGB"):
        raise TypeError(f"{where} has mode {image.mode!r}; convert it: image.convert('RGB')")
    array = image.numpy(force=True) if isinstance(image, Tensor) else np.asarray(image)
    if array.ndim not in (2, 3) or array.size == 0 or array.dtype.kind not in "fu":
        raise TypeError(
            f"{where} is a {type(image).__name__}: {array.dtype} {list(array.shape)}; it must be a "
            f"PIL image, or uint8 or float [C,H,W]"
        )
    array = array[None] if array.ndim == 2 else array
    if not isinstance(image, Tensor) and _channels_last(array.shape[0], array.shape[2]):
        array = array.transpose(2, 0, 1)
    return (array if array.dtype == np.uint8 else _to_uint8(array, mean, std, where)), label


def _to_uint8(image: np.ndarray, mean: Stats, std: Stats, where: str) -> np.ndarray:
    """The bytes a float image came from: k/255, or (k/255 - mean)/std."""

    def levels(x: np.ndarray) -> np.ndarray | None:
        near = np.rint(x * 255)
        close = np.abs(x * 255 - near).max() < 1e-2 and near.min() >= 0 and near.max() <= 255
        return near.astype(np.uint8) if close else None

    image = image.astype(np.float64)
    found = levels(image)
    if found is None and mean is not None and std is not None:
        found = levels(image * np.reshape(std, (-1, 1, 1)) + np.reshape(mean, (-1, 1, 1)))
    if found is None:
        undo = "is not undone by the mean and std given" if mean is not None else "looks normalised"
        raise ValueError(
            f"{where} has floats from {image.min():.4g} to {image.max():.4g}, not all k/255: it "
            f"{undo}; give the mean and std of its Normalize, or the dataset without Normalize"
        )
    return found

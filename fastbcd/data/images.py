"""ImageData: inputs and labels in memory, what `score`, `bcd` and fine-tuning read.

    data = fastbcd.load("cifar10", "train", root="data")       # ImageData, 50,000 × 3×32×32 uint8
    for x, labels in data.batches(256): ...                    # in order, normalised
    for x, labels, indices, views in data.train_batches(128, seed=0, step=0, epoch=0): ...

A *view* of an image is what a random crop with zero padding p and a horizontal flip can make of
it: number v = (top·(2p+1) + left)·2 + flip, with top and left counted in the padded image, so
there are (2p+1)²·2 of them (162 for p = 4). Which view a sample takes, and the order of samples,
are pure functions of (seed, step, epoch, sample id): not of batches, devices or processes. The
padding is 0 before normalising: black for uint8 images, 0 for floats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from fastbcd.data import arrays, pixels
from fastbcd.data.arrays import Stats, are_indices, target_tensor
from fastbcd.data.npz import npz_keys, read_npz
from fastbcd.runtime.validate import check_whole

ORDER, VIEWS, PLACES = 1, 2, 3  # streams of random numbers; 0 is the masks'
TrainBatches = Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]  # inputs, labels, indices, views


@dataclass(frozen=True, eq=False, repr=False)
class ImageData:
    """Images, labels and how to normalise them; all tensors on one device.

    Inputs may have any shape [N,C,...], such as signals [N,C,L] or feature vectors [N,F]. Labels
    are class indices, int64 [N], and `classes` is their number; or other targets of any shape and
    dtype [N,...] (maps, several labels, real numbers), and `classes` is None.

    >>> data = ImageData.from_arrays(np.zeros((6, 8, 8, 3), np.uint8), [0, 1, 2, 0, 1, 2])
    >>> data
    ImageData(6 × 3×8×8 uint8, 3 classes, cpu)
    >>> [tuple(x.shape) for x, labels in data.batches(4)]
    [(4, 3, 8, 8), (2, 3, 8, 8)]
    >>> ImageData.from_arrays(torch.randn(6, 3, 64), torch.randn(6, 2))
    ImageData(6 × 3×64 float32, targets 2 float32, cpu)
    """

    images: Tensor  # uint8, float32 or float64 [N,C,H,W], or another [N,C,...]
    labels: Tensor  # int64 [N], or targets [N,...]
    mean: tuple[float, ...]  # per channel, of uint8/255 or of the floats; one value for [N,F]
    std: tuple[float, ...]
    classes: int | None  # None: the labels are not class indices
    # int64 [N], each sample's number in the data it is a part of; 0 .. N-1 if not given
    ids: Tensor = None  # type: ignore[assignment]
    name: str | None = None  # what `load` was asked for; a run records it

    streamed, where = False, "in memory"  # how it is read; see StreamData

    def __post_init__(self) -> None:
        images, labels, n = self.images, self.labels, len(self.images)
        if self.ids is None:
            object.__setattr__(self, "ids", torch.arange(n, device=images.device))
        arrays.check_values("images", images)
        if images.dtype not in arrays.DTYPES:
            raise TypeError(f"images are {images.dtype}; they must be uint8, float32 or float64")
        if images.ndim < 2 or 0 in images.shape[1:]:
            shape = list(images.shape)
            raise ValueError(f"images have shape {shape}, not [N,C,H,W] or [N,C,...] of at least 1")
        for name, tensor in (("labels", labels), ("ids", self.ids)):
            if tensor.shape[:1] != images.shape[:1]:
                found = f"{name} are {tensor.dtype} {list(tensor.shape)} beside {n} images"
                raise ValueError(f"{found}; they must be [{n}] or [{n},...]")
            if tensor.device != images.device:
                raise ValueError(f"{name} are on {tensor.device}, the images on {images.device}")
        pixels.stats(self.mean, self.std, images.shape[1:])
        if self.classes is not None:
            check_whole("classes", self.classes, 0)
            if self.classes >= 2**63:
                raise ValueError(f"classes={self.classes}; labels are int64, below 2^63")
            arrays.check_labels(labels, self.classes, "labels")

    # ------------------------------------------------------------------ where it comes from

    @classmethod
    def from_arrays(
        cls, images: Any, labels: Any, mean: Stats = None, std: Stats = None,
        classes: int | None = None, layout: str | None = None,
    ) -> ImageData:  # fmt: skip
        """From numpy arrays or tensors, without copying what already fits.

        images: uint8 or float, [N,C,H,W] or any other [N,C,...]; uint8 [N,H,W,C] and [N,H,W] too.
        layout: None takes uint8 [N,H,W] as images of one channel, and uint8 with only the last of
        four dimensions 1 or 3 as [N,H,W,C]; all else stays as it is: floats [N,3,64] are signals
        of 3 channels. "NHW", "NHWC" or "NCHW" say it for any dtype; "NC..." keeps any shape.
        labels: class indices, whole numbers [N]; or targets of another shape or dtype.
        mean, std: per channel, for (x - mean)/std, where x is uint8/255, or the floats themselves;
        0 and 1 if not given. classes: largest label + 1 if not given.
        """
        x, y = arrays.input_tensor(images, layout), target_tensor(labels)
        if classes is None and are_indices(y):
            classes = int(y.max()) + 1 if len(y) else 0
        return cls(x, y.to(x.device), *pixels.stats(mean, std, x.shape[1:]), classes)

    @classmethod
    def from_npz(
        cls, path: str | Path, split: str = "train", mean: Stats = None, std: Stats = None,
        classes: int | None = None,
    ) -> ImageData:  # fmt: skip
        """From an .npz file with {split}_images and {split}_labels, or images and labels.

        mean and std that are not given are those of the file, if it has arrays of these names;
        classes are counted over all of its labels.
        """
        keys = npz_keys(path)
        prefix = "" if "images" in keys and f"{split}_images" not in keys else f"{split}_"
        images, labels = (read_npz(path, f"{prefix}{what}") for what in ("images", "labels"))
        mean, std = (
            np.atleast_1d(read_npz(path, key)).tolist() if given is None and key in keys else given
            for key, given in (("mean", mean), ("std", std))
        )
        try:
            others = [target_tensor(read_npz(path, k), k) for k in keys if k.endswith("labels")]
            if classes is None and all(map(are_indices, others)):
                classes = max((int(o.max()) + 1 for o in others if len(o)), default=0)
            return cls.from_arrays(images, labels, mean, std, classes=classes)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{path}, split {split!r}: {error}") from error

    @classmethod
    def from_dataset(
        cls, dataset: Any, mean: Stats = None, std: Stats = None, classes: int | None = None
    ) -> ImageData:
        """From a torch Dataset of (image, label) pairs, read once, in order.

        Images: PIL, or uint8 or float tensors or arrays [C,...]; uint8 [H,W] has one channel.
        Labels: ints, or numbers, tensors or arrays of one shape. Floats, as ToTensor or Normalize
        give them, are used as they are. With mean and std given, floats k/255 and floats
        normalised with these are held as bytes. Random transforms are refused: crops and flips
        are made here (`views`).
        """
        if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
            return cls.from_arrays(*dataset.tensors, mean=mean, std=std, classes=classes)
        images, labels = arrays.read_dataset(dataset, mean, std)
        return cls.from_arrays(images, labels, mean, std, classes=classes, layout="NC...")

    @classmethod
    def from_loader(
        cls, loader: Any, mean: Stats = None, std: Stats = None, classes: int | None = None
    ) -> ImageData:
        """From the dataset behind a DataLoader, in the dataset's order, whatever its shuffling."""
        positions = arrays.sampled(loader)
        data = cls.from_dataset(loader.dataset, mean, std, classes)
        return data if positions is None else data.subset(positions)

    # ------------------------------------------------------------------ parts of it

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        (_, *size), (_, *targets) = self.images.shape, self.labels.shape
        what = f"targets {'×'.join(map(str, targets)) or 1} {str(self.labels.dtype)[6:]}"
        what = what if self.classes is None else f"{self.classes} classes"
        inputs = f"{'×'.join(map(str, size))} {str(self.images.dtype)[6:]}"
        return f"{type(self).__name__}({len(self)} × {inputs}, {what}, {self.device})"

    @property
    def device(self) -> torch.device:
        """The device of images and labels."""
        return self.images.device

    def need_classes(self, what: str) -> int:
        """The number of classes; an error that names `what` needs it if there is none."""
        if self.classes is None:
            found = f"the labels are {self.labels.dtype} {[len(self), *self.labels.shape[1:]]}"
            way = "whole numbers [N] (one-hot labels: labels.argmax(1)), or pass metric="
            raise ValueError(f"{what} needs class indices, but {found}: give {way}")
        return self.classes

    def check_labels(self, classes: int, who: str) -> None:
        """Refuse labels outside 0 .. classes-1, the classes of `who`."""
        check_range(self.labels, torch.arange(len(self)), classes, who)

    def identity(self, samples: int) -> dict[str, Tensor]:
        """What a run's digest is made of: about `samples` images, all labels and ids."""
        some = self.images[:: max(1, len(self) // samples)]
        return {"images": some, "labels": self.labels, "ids": self.ids}

    def to(self, device: torch.device | str) -> ImageData:
        """The same data on another device."""
        return self._changed(lambda tensor: tensor.to(device))

    def first(self, n: int) -> ImageData:
        """The first n samples, sharing memory."""
        if not 0 <= n <= len(self):
            raise ValueError(f"first({n}): there are {len(self)} samples")
        return self._changed(lambda tensor: tensor[:n])

    def rest(self, n: int) -> ImageData:
        """All but the first n samples, sharing memory; none if there are no more."""
        return self._changed(lambda tensor: tensor[max(n, 0) :])

    def shard(self, rank: int, world: int) -> ImageData:
        """Part `rank` of `world` contiguous parts whose sizes differ by at most one.

        >>> data = ImageData.from_arrays(np.zeros((7, 1, 4, 4), np.uint8), range(7))
        >>> [data.shard(r, 3).ids.tolist() for r in range(3)]
        [[0, 1], [2, 3], [4, 5, 6]]
        """
        part = _share(len(self), rank, world)
        return self._changed(lambda tensor: tensor[part])

    def subset(self, indices: Any) -> ImageData:
        """The samples at these positions, copied; they keep their ids and so their views."""
        index = target_tensor(indices, "indices").to(self.device)
        if not are_indices(index):
            raise TypeError(f"indices are {index.dtype} {list(index.shape)}, not whole numbers [n]")
        low, high = (int(index.min()), int(index.max())) if len(index) else (0, -1)
        if low < 0 or high >= len(self):
            raise IndexError(f"indices go from {low} to {high}; there are {len(self)} samples")
        return self._changed(lambda tensor: tensor[index])

    def _changed(self, change: Callable[[Tensor], Tensor]) -> ImageData:
        parts = {name: change(getattr(self, name)) for name in ("images", "labels", "ids")}
        return dataclasses.replace(self, **parts)  # type: ignore[arg-type]

    # ------------------------------------------------------------------ batches

    def normalise(
        self, images: Tensor, out: Tensor | None = None, *,
        memory_format: torch.memory_format = torch.contiguous_format,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:  # fmt: skip
        """(images/255 - mean)/std in one pass, new or into `out`, whose dtype and layout stay.

        images [B,C,...] of this data's dtype; floats are not divided by 255. memory_format is for
        images [B,C,H,W]; others are contiguous.
        """
        if out is None:
            order = memory_format if images.ndim == 4 else torch.contiguous_format
            out = torch.empty(images.shape, dtype=dtype, device=images.device, memory_format=order)
        elif out.shape != images.shape:
            raise ValueError(f"out has shape {tuple(out.shape)}, the images {tuple(images.shape)}")
        return pixels.normalise(images, self.mean, self.std, out)

    def batches(self, batch_size: int, **options: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """(normalised images, labels) in order; options: memory_format, dtype of `normalise`."""
        check_whole("batch_size", batch_size, 1)
        parts = zip(self.images.split(batch_size), self.labels.split(batch_size), strict=True)
        return ((self.normalise(x, **options), y) for x, y in parts if len(y))

    # ------------------------------------------------------------------ views

    def order(self, *, seed: int, step: int, epoch: int) -> Tensor:
        """A shuffle, int64 [N]. Part of the data keeps the order its samples have in the whole."""
        keys = self._random(ORDER, seed=seed, step=step, epoch=epoch)
        return torch.from_numpy(np.argsort(keys, kind="stable")).to(self.device)

    def uniform(self, *, seed: int, step: int) -> np.ndarray:
        """A random number above 0 and below 1 for each place, float64 [N], whatever is there."""
        keys = self._random(PLACES, np.arange(len(self)), seed=seed, step=step, epoch=0)
        return ((keys >> np.uint64(11)) + 0.5) * 2.0**-53

    def check_views(self, padding: int, flip: bool) -> None:
        """Refuse crops and flips of inputs that are not images, or with a map as the target."""
        check_whole("padding", padding, 0)
        inputs, targets = ([len(self), *t.shape[1:]] for t in (self.images, self.labels))
        problem = None
        if (padding or flip) and len(inputs) != 4:
            problem = f"is for images [N,C,H,W]; these inputs are {inputs}"
        elif (padding or flip) and len(targets) > 2:
            problem = f"would move the images but not their targets {targets}"
        elif padding and padding > max(inputs[2:]):
            most = max(inputs[2:])
            raise ValueError(
                f"padding={padding} leaves most crops of {inputs[2]}×{inputs[3]} empty: use at "
                f"most {most}"
            )
        if problem:
            raise ValueError(f"padding={padding}, flip={flip} {problem}: use padding=0, flip=False")

    def view_count(self, padding: int) -> int:
        """How many views an image has: (2·padding+1)² crops, each with and without flip."""
        self.check_views(padding, flip=False)
        return 2 * (2 * padding + 1) ** 2

    def view_ids(
        self, *, seed: int, step: int, epoch: int, padding: int = 4, flip: bool = True
    ) -> Tensor:
        """The view each sample takes in this epoch, int64 [N]; without flip all are even."""
        self.check_views(padding, flip)
        count = np.uint64(self.view_count(padding))
        views = self._random(VIEWS, seed=seed, step=step, epoch=epoch) % count
        ids = torch.from_numpy(views.astype(np.int64))
        return (ids if flip else ids - ids % 2).to(self.device)

    def _random(self, stream: int, ids: np.ndarray | None = None, **numbers: int) -> np.ndarray:
        """One 64-bit number per sample: the id-th of the stream (seed, step, epoch)."""
        for name, value in numbers.items():
            check_whole(name, value, 0)
            if value >= 2**63:
                raise ValueError(f"{name}={value}; it must be below 2^63")
        key = np.array([stream, numbers["seed"]], np.uint64)
        # Philox counts in the lowest word; raw numbers, as only these never change with numpy.
        counter = np.array([0, 0, numbers["epoch"], numbers["step"]], np.uint64)
        ids = self.ids.cpu().numpy() if ids is None else ids
        generator = np.random.Philox(key=key, counter=counter)
        return generator.random_raw(int(ids.max(initial=-1)) + 1)[ids]

    def views(
        self, indices: Tensor, view_ids: Tensor, *, padding: int = 4, out: Tensor | None = None,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        """Samples `indices` under the views `view_ids` (both int64 [B]), normalised [B,C,...].

        Equivalent to RandomCrop((H, W), padding) and a flip on the raw image, then normalising.
        out and options (memory_format, dtype): as for `normalise`.
        """
        image = self.images.ndim == 4
        last = self.view_count(padding) - 1 if image else 0
        # On a GPU the check would wait for the device; train_batches makes only valid ids.
        if view_ids.device.type == "cpu" and len(view_ids):
            low, high = int(view_ids.min()), int(view_ids.max())
            if low < 0 or high > last:
                found = f"view_ids go from {low} to {high}"
                raise ValueError(f"{found}; padding {padding} gives 0 to {last}")
        x = self._take(indices)
        return self.normalise(pixels.crop(x, view_ids, padding) if image else x, out, **options)

    def _take(self, indices: Tensor) -> Tensor:
        return self.images.index_select(0, indices)

    def sizes(self, batch_size: int, smallest: int = 1) -> list[int]:
        """The sizes of an epoch's batches; a last one below `smallest` joins the one before it."""
        return batch_sizes(len(self), batch_size, smallest)

    def train_batches(
        self, batch_size: int, *, seed: int, step: int, epoch: int, padding: int = 4,
        flip: bool = True, rank: int = 0, world: int = 1, smallest: int = 1, **options: Any,
    ) -> TrainBatches:  # fmt: skip
        """One epoch: (images, labels, indices, view_ids), shuffled, each sample in its view.

        With `world` ranks each batch of batch_size is divided among them, so the batches are the
        same for any number of ranks; a last batch with fewer samples than ranks is left out. One
        with fewer than `smallest` samples joins the batch before it.
        options: memory_format and dtype, as for `normalise`.
        """
        check_whole("batch_size", batch_size, 1)
        order = self.order(seed=seed, step=step, epoch=epoch)
        views = self.view_ids(seed=seed, step=step, epoch=epoch, padding=padding, flip=flip)
        whole = order.split(self.sizes(batch_size, smallest))
        mine = [batch[_share(len(batch), rank, world)] for batch in whole if len(batch) >= world]
        return self._in_views(mine, views, padding, **options)

    def _in_views(
        self, parts: list[Tensor], views: Tensor, padding: int, **options: Any
    ) -> TrainBatches:
        return (
            (self.views(i, views[i], padding=padding, **options), self.labels[i], i, views[i])
            for i in parts
        )


def check_range(labels: Tensor, numbers: Tensor, classes: int, who: str) -> None:
    """Refuse labels outside 0 .. classes-1; numbers: those of the images, for the error."""
    for i in ((labels < 0) | (labels >= classes)).nonzero().flatten().tolist()[:1]:
        what = f"label {int(labels[i])} of image {int(numbers[i])}"
        raise ValueError(f"{what} is out of range: {who} has {classes} classes")


def batch_sizes(samples: int, batch_size: int, smallest: int = 1) -> list[int]:
    """The sizes of an epoch's batches; a last one below `smallest` joins the one before it."""
    sizes = [min(batch_size, samples - i) for i in range(0, samples, batch_size)]
    if len(sizes) > 1 and sizes[-1] < smallest:
        sizes[-2:] = [sum(sizes[-2:])]
    return sizes


def _share(samples: int, rank: int, world: int) -> slice:
    """Part `rank` of `world` contiguous parts."""
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} of world {world}: rank goes from 0 to world-1")
    return slice(rank * samples // world, (rank + 1) * samples // world)

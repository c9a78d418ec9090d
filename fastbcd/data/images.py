"""ImageData: inputs and labels, what `score`, `bcd` and fine-tuning read.

    data = fastbcd.load("cifar10", "train", root="data")       # ImageData, 50,000 × 3×32×32 uint8
    for x, labels in data.batches(256): ...                    # in order, normalised
    for x, labels, indices, views in data.train_batches(128, seed=0, step=0, epoch=0): ...

The images lie in memory, on the host or on a GPU, or in a mapped file. Batches are the same
wherever they lie.

A *view* of an image is what a random crop with zero padding p and a horizontal flip can make of
it: number v = (top·(2p+1) + left)·2 + flip, with top and left counted in the padded image, so
there are (2p+1)²·2 of them (162 for p = 4). Which view a sample takes, and the order of samples,
are pure functions of (seed, step, epoch, sample id): not of batches, devices or processes. The
padding is 0 before normalising: black for uint8 images, 0 for floats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.utils.data import TensorDataset

from fastbcd.data import arrays, pixels
from fastbcd.data.arrays import Stats, are_indices, target_tensor
from fastbcd.data.items import Items
from fastbcd.data.packed import read_packed
from fastbcd.data.reader import ahead
from fastbcd.runtime.limits import default_memory
from fastbcd.runtime.philox import AUGMENT, ORDER, VIEWS, philox
from fastbcd.runtime.validate import check_whole

# Inputs, labels, indices, views.
TrainBatches = Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]
Augment = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class ImageData:
    """Images, labels and how to normalise them.

    Inputs may have any shape [N,C,...], such as signals [N,C,L] or feature vectors [N,F]. Labels
    are class indices, int64 [N], and `classes` is their number; or other targets of any shape and
    dtype [N,...] (maps, several labels, real numbers), and `classes` is None.

    Images in a mapped file, or on the host beside a GPU that they would fill, stay there: each
    batch is gathered ahead and copied to the device of the labels. A part that fits goes there.

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
    # Per channel, of uint8/255 or of the floats; one value for [N,F]; 0 and 1 if not given.
    mean: tuple[float, ...]
    std: tuple[float, ...]
    # The largest label + 1 if not given; None if labels are not indices.
    classes: int | None = None
    # int64 [N], each sample's number in the data it is a part of; 0 .. N-1 if not given
    ids: Tensor = None  # type: ignore[assignment]
    name: str | None = None  # what `load` was asked for; a run records it

    def __post_init__(self) -> None:
        shape = list(self.images.shape)
        if self.images.dtype not in arrays.DTYPES:
            raise TypeError(
                f"images are {self.images.dtype}; they must be uint8, float32 or float64"
            )
        if len(shape) < 2 or 0 in shape[1:]:
            raise ValueError(
                f"images have shape {shape}, not [N,C,H,W] or [N,C,...] of at least 1"
            )
        count = shape[0]
        if self.labels.shape[:1] != (count,):
            raise ValueError(
                f"labels are {self.labels.dtype} {list(self.labels.shape)} beside {count} images; "
                f"they must be [{count}] or [{count},...]"
            )
        if self.images.device not in (self.device, torch.device("cpu")):
            raise ValueError(
                f"labels are on {self.device}, the images on {self.images.device}"
            )
        mean, std = pixels.stats(self.mean, self.std, shape[1:])
        ids = self.ids
        if ids is None:
            ids = torch.arange(count, device=self.device)
        classes = self.classes
        if classes is None and are_indices(self.labels):
            classes = arrays.count_classes(self.labels)
        if classes is not None:
            check_whole("classes", classes, 0, most=2**63 - 1)
            arrays.check_labels(self.labels, classes, "the data")
        vars(self).update(mean=mean, std=std, ids=ids, classes=classes)

    # ------------------------------------------------------------------ where it comes from

    @classmethod
    def from_arrays(
        cls,
        images: Any,
        labels: Any,
        mean: Stats = None,
        std: Stats = None,
        classes: int | None = None,
    ) -> ImageData:
        """From numpy arrays or tensors, without copying what already fits.

        images: uint8 or float, [N,C,H,W] or any other [N,C,...]. uint8 [N,H,W] are images of one
        channel, and uint8 with only the last of four dimensions 1 or 3 are [N,H,W,C]; all else
        stays as it is: floats [N,3,64] are signals of 3 channels.
        labels: class indices, whole numbers [N]; or targets of another shape or dtype.
        mean, std: per channel, for (x - mean)/std, where x is uint8/255, or the floats themselves;
        0 and 1 if not given. classes: largest label + 1 if not given.
        """
        x = arrays.input_tensor(images)
        return cls(x, target_tensor(labels).to(x.device), mean, std, classes)  # type: ignore[arg-type]

    @classmethod
    def from_dataset(
        cls,
        source: Any,
        mean: Stats = None,
        std: Stats = None,
        classes: int | None = None,
    ) -> ImageData:
        """From a torch Dataset of (image, label) pairs, or a DataLoader of one, read once.

        The order is that of the dataset, however the loader shuffles. Images: PIL, or uint8 or
        float tensors or arrays [C,...]; uint8 [H,W] has one channel. Labels: ints, or numbers,
        tensors or arrays of one shape. mean, std: as for `from_arrays`. Random transforms are
        refused: crops and flips are made here (`views`).
        """
        items = Items(source)
        if isinstance(items.dataset, TensorDataset) and len(items.dataset.tensors) == 2:
            return cls.from_arrays(*items.dataset.tensors, mean, std, classes)
        items.check_repeatable()
        first, _ = items.item(0)
        images = np.empty((items.count or 0, *first.shape), first.dtype)
        targets = []
        for number, (image, target) in enumerate(items):
            images[number] = image
            targets.append(target)
        labels = target_tensor(np.stack(targets))
        return cls(torch.from_numpy(images), labels, mean, std, classes)  # type: ignore[arg-type]

    @classmethod
    def open(cls, path: str | Path) -> ImageData:
        """Map what `fastbcd.pack` wrote: images are read when a batch needs them."""
        try:
            return cls(**read_packed(Path(path)))
        except (
            SafetensorError,
            TypeError,
            ValueError,
            KeyError,
            OverflowError,
            OSError,
        ) as error:
            raise ValueError(
                f"{path} is not a complete folder of fastbcd.pack ({error}): pack it again"
            ) from error

    # ------------------------------------------------------------------ parts of it

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        shape = "×".join(map(str, self.images.shape[1:]))
        kind = str(self.images.dtype)[6:]
        targets = f"{self.classes} classes"
        if self.classes is None:
            size = "×".join(map(str, self.labels.shape[1:])) or 1
            targets = f"targets {size} {str(self.labels.dtype)[6:]}"
        return f"ImageData({len(self)} × {shape} {kind}, {targets}, {self.device})"

    @property
    def device(self) -> torch.device:
        """The device of labels and batches."""
        return self.labels.device

    def need_classes(self, what: str) -> int:
        """The number of classes; an error that names `what` needs it if there is none."""
        if self.classes is None:
            raise ValueError(
                f"{what} needs class indices, but the labels are {self.labels.dtype} "
                f"{list(self.labels.shape)}: give whole numbers [N] (one-hot labels: "
                f"labels.argmax(1)), or pass metric="
            )
        return self.classes

    def check_labels(self, classes: int, who: str) -> None:
        """Refuse labels outside 0 .. classes-1, the classes of `who`."""
        arrays.check_labels(self.labels, classes, who)

    def identity(self, samples: int) -> dict[str, Tensor]:
        """What a run's digest is made of: about `samples` images, all labels and ids."""
        images = self.images[:: max(1, len(self) // samples)]
        return {"images": images, "labels": self.labels, "ids": self.ids}

    def to(self, device: torch.device | str) -> ImageData:
        """The same data with batches on another device.

        The images go there, too, unless they would take more than half of the memory of a GPU.
        """
        device = torch.device(device)
        labels = self.labels.to(device)
        if labels.device == self.device:
            return self
        return self._with(self.images, labels, self.ids.to(device))

    def _with(self, images: Tensor, labels: Tensor, ids: Tensor) -> ImageData:
        """These samples, with images where the labels are, unless they would fill a GPU."""
        device = labels.device
        if (
            device.type == "cpu"
            or images.is_cuda
            or images.nbytes <= default_memory(device) // 2
        ):
            images = images.to(device)
        return dataclasses.replace(self, images=images, labels=labels, ids=ids)

    def first(self, n: int) -> ImageData:
        """The first n samples, sharing memory."""
        if not 0 <= n <= len(self):
            raise ValueError(f"first({n}): there are {len(self)} samples")
        return self._part(slice(0, n))

    def rest(self, n: int) -> ImageData:
        """All but the first n samples, sharing memory; none if there are no more."""
        return self._part(slice(max(n, 0), None))

    def shard(self, rank: int, world: int) -> ImageData:
        """Part `rank` of `world` contiguous parts whose sizes differ by at most one.

        >>> data = ImageData.from_arrays(np.zeros((7, 1, 4, 4), np.uint8), range(7))
        >>> [data.shard(r, 3).ids.tolist() for r in range(3)]
        [[0, 1], [2, 3], [4, 5, 6]]
        """
        return self._part(_share(len(self), rank, world))

    def subset(self, indices: Any) -> ImageData:
        """A copy of the samples at these positions; they keep their ids, so their views."""
        index = target_tensor(indices, "indices").cpu()
        if not are_indices(index):
            raise TypeError(
                f"indices are {index.dtype} {list(index.shape)}, not whole numbers [n]"
            )
        return self._part(index)

    def _part(self, part: slice | Tensor) -> ImageData:
        return self._with(self.images[part], self.labels[part], self.ids[part])

    # ------------------------------------------------------------------ batches

    def _gathered(self, parts: Iterable[Tensor]) -> Iterator[Tensor]:
        """The images at these positions, part by part, on the data's device."""
        if self.images.device == self.device:
            for positions in parts:
                yield self.images.index_select(0, positions)
            return

        def pinned(count: int) -> Tensor:
            size = (count, *self.images.shape[1:])
            return torch.empty(size, dtype=self.images.dtype, pin_memory=True)

        @torch.inference_mode()  # as a buffer may be of the caller's
        def read(into: tuple[Tensor, Tensor]) -> Tensor:
            buffer, positions = into
            return torch.index_select(self.images, 0, positions, out=buffer)

        buffers = ((pinned(len(positions)), positions) for positions in parts)
        for images in ahead(read, buffers):
            yield images.to(self.device, non_blocking=True)

    def normalise(self, images: Tensor, **options: Any) -> Tensor:
        """(images/255 - mean)/std of [B,C,...]; floats are not divided by 255.

        options: memory_format (torch.contiguous_format) and dtype (torch.float32).
        """
        return pixels.normalise(images, self.mean, self.std, **options)

    def batches(
        self, batch_size: int, positions: Tensor | None = None, **options: Any
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(normalised images, labels) in order, or at these positions in theirs.

        options: memory_format and dtype, as for `normalise`.
        """
        check_whole("batch_size", batch_size, 1)
        if positions is None:
            positions = torch.arange(len(self), device=self.device)
        if not len(positions):
            return iter(())
        parts = positions.split(batch_size)
        # Images that lie elsewhere are gathered there: the positions are copied once.
        gathered = self._gathered(positions.to(self.images.device).split(batch_size))
        return (
            (self.normalise(images, **options), self.labels[part])
            for images, part in zip(gathered, parts, strict=True)
        )

    # ------------------------------------------------------------------ views

    def order(self, *, seed: int, step: int, epoch: int) -> Tensor:
        """A shuffle, int64 [N]. Part of the data keeps the order its samples have in the whole."""
        keys = _random(ORDER, self.ids, seed=seed, step=step, epoch=epoch)
        return torch.from_numpy(np.argsort(keys, kind="stable")).to(self.device)

    def check_views(self, padding: int, flip: bool) -> None:
        """Refuse crops and flips of inputs that are not images, or with a map as the target."""
        check_whole("padding", padding, 0)
        if not padding and not flip:
            return
        _, *size = self.images.shape[1:]
        problem = ""
        if len(size) != 2:
            inputs = [len(self), *self.images.shape[1:]]
            problem = f"is for images [N,C,H,W]; these inputs are {inputs}"
        elif self.labels.ndim > 2:
            problem = (
                f"would move the images but not their targets {list(self.labels.shape)}"
            )
        elif padding > max(size):  # the crop would be empty
            problem = f"is larger than the images, {size[0]}×{size[1]}"
        if problem:
            raise ValueError(
                f"padding={padding}, flip={flip} {problem}: use padding=0, flip=False"
            )

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
        drawn = _random(VIEWS, self.ids, seed=seed, step=step, epoch=epoch) % count
        if not flip:
            drawn -= drawn % 2
        return torch.from_numpy(drawn.astype(np.int64)).to(self.device)

    def views(
        self, indices: Tensor, view_ids: Tensor, *, padding: int = 4, **options: Any
    ) -> Tensor:
        """Samples `indices` under the views `view_ids` (both int64 [B]), normalised [B,C,...].

        Equivalent to RandomCrop((H, W), padding) and a flip on the raw image, then normalising.
        options: memory_format and dtype, as for `normalise`.
        """
        (images,) = self._gathered([indices.to(self.images.device)])
        return self.normalise(pixels.crop(images, view_ids, padding), **options)

    def sizes(self, batch_size: int, smallest: int = 1) -> list[int]:
        """The sizes of an epoch's batches; a last one below `smallest` joins the one before it."""
        full, last = divmod(len(self), batch_size)
        sizes = [batch_size] * full + [last] * (last > 0)
        if full and 0 < last < smallest:
            sizes[-2:] = [batch_size + last]
        return sizes

    def train_batches(
        self,
        batch_size: int,
        *,
        seed: int,
        step: int,
        epoch: int,
        padding: int = 4,
        flip: bool = True,
        augment: Augment | None = None,
        rank: int = 0,
        world: int = 1,
        smallest: int = 1,
        **options: Any,
    ) -> TrainBatches:
        """One epoch: (images, labels, indices, view_ids), shuffled, each sample in its view.

        With `world` ranks each batch of batch_size is divided among them, so the batches are the
        same for any number of ranks; a last batch with fewer samples than ranks is left out. One
        with fewer than `smallest` samples joins the batch before it.
        augment: called with the cropped images [B,C,...], uint8 or float, before normalising, and a
        torch.Generator on their device, which (seed, step, epoch, batch, rank) determine; returns
        images of the same shape and dtype.
        options: memory_format and dtype, as for `normalise`.
        """
        check_whole("batch_size", batch_size, 1)
        numbers = {"seed": seed, "step": step, "epoch": epoch}
        order = self.order(**numbers)
        views = self.view_ids(**numbers, padding=padding, flip=flip)
        sizes = self.sizes(batch_size, smallest)
        batch_ids = torch.arange(len(sizes) * world)[rank::world]
        draws = _random(AUGMENT, batch_ids, **numbers)

        def shares(samples: Tensor) -> list[Tensor]:
            whole = [part for part in samples.split(sizes) if len(part) >= world]
            return [part[_share(len(part), rank, world)] for part in whole]

        def batches() -> TrainBatches:
            # Images that lie elsewhere are gathered there: the order is copied once.
            gathered = self._gathered(shares(order.to(self.images.device)))
            for images, part, draw in zip(gathered, shares(order), draws, strict=False):
                images = pixels.crop(images, views[part], padding)
                if augment is not None:
                    images = _augmented(augment, images, int(draw))
                inputs = self.normalise(images, **options)
                yield inputs, self.labels[part], part, views[part]

        return batches()


def _random(stream: int, ids: Tensor, **numbers: int) -> np.ndarray:
    """A 64-bit number for each id: the id-th of the stream (seed, step, epoch)."""
    positions = ids.cpu().numpy()
    count = int(positions.max(initial=-1)) + 1
    return philox(stream, **numbers).random_raw(count)[positions]


def _augmented(augment: Augment, images: Tensor, seed: int) -> Tensor:
    generator = torch.Generator(images.device)
    generator.manual_seed(seed >> 1)  # torch takes 63 bits
    changed = augment(images, generator)
    if changed.shape != images.shape or changed.dtype != images.dtype:
        raise ValueError(
            f"augment= returned {changed.dtype} {list(changed.shape)} for {images.dtype} "
            f"{list(images.shape)}; both must be alike"
        )
    return changed


def _share(samples: int, rank: int, world: int) -> slice:
    """Part `rank` of `world` contiguous parts."""
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} of world {world}: rank goes from 0 to world-1")
    return slice(rank * samples // world, (rank + 1) * samples // world)

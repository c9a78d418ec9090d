"""ImageData from datasets and loaders, read once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from fastbcd.data.images import ImageData
from fastbcd.data.sources import as_data
from helpers.image_cases import make


class Items(Dataset):
    """A Dataset of given (image, label) items, with a transform."""

    def __init__(self, images, labels, transform=lambda x: x):
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.transform(self.images[i]), self.labels[i]


class Picture:
    """What is known of a PIL image: a mode and the array interface."""

    def __init__(self, array, mode):
        self.array, self.mode = array, mode
        self.__array_interface__ = array.__array_interface__


RAW = make(12, 3, 6, 5, seed=4)
MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.2, 0.1)


def column(values):
    return torch.tensor(values).view(3, 1, 1)


TRANSFORMS = {
    "uint8 tensor": lambda x: x,
    "array": lambda x: x.permute(1, 2, 0).numpy(),
    "ToTensor": lambda x: x.float() / 255,
    "scaled by 1/255": lambda x: x.float() * (1 / 255),
    "Normalize": lambda x: (x / 255 - column(MEAN)) / column(STD),
    "PIL": lambda x: Picture(np.ascontiguousarray(x.permute(1, 2, 0).numpy()), "RGB"),
}  # fmt: skip


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_datasets(transform):
    items = Items(RAW.images, RAW.labels, transform)
    read = as_data(items, MEAN, STD)
    assert torch.equal(read.images, RAW.images)
    assert torch.equal(read.labels, RAW.labels)
    assert (read.mean, read.std) == (MEAN, STD)
    loader = as_data(DataLoader(items, batch_size=5, shuffle=True), MEAN, STD)
    assert torch.equal(loader.images, RAW.images)


def test_one_bright_image_does_not_pass_for_another():
    # Normalised with 0.5 and 0.5, bytes from 128 on become k/255 themselves.
    images = RAW.images.clone()
    images[1] |= 128
    items = Items(images, RAW.labels, lambda x: (x / 255 - 0.5) / 0.5)
    assert torch.equal(as_data(items, (0.5,) * 3, (0.5,) * 3).images, images)


def test_grey_pictures():
    items = Items(RAW.images, RAW.labels.tolist(), lambda x: Picture(x[0].numpy(), "L"))
    assert torch.equal(ImageData.from_dataset(items).images, RAW.images[:, :1])


def test_tensor_dataset_is_its_pair():
    x = torch.randn(5, 3, 4, 4)
    read = as_data(TensorDataset(x, torch.arange(5)))
    assert read.images.data_ptr() == x.data_ptr()


def test_subsets():
    items = Items(RAW.images, RAW.labels)
    picked = DataLoader(items, sampler=SubsetRandomSampler([9, 2, 5]))
    part = ImageData.from_loader(picked, classes=4)
    assert part.ids.tolist() == [2, 5, 9]
    assert torch.equal(part.images, RAW.images[[2, 5, 9]])
    assert torch.equal(as_data(Subset(items, [4, 1])).images, RAW.images[[4, 1]])
    with pytest.raises(TypeError, match="WeightedRandomSampler may leave samples out"):
        as_data(DataLoader(items, sampler=WeightedRandomSampler([0.5] * 12, 12)))


def random_flip(x):
    return x.flip(-1) if torch.rand(()) < 0.5 else x


def refuse(transform=lambda x: x, images=RAW.images, labels=RAW.labels, mean=None, std=None):
    return lambda: ImageData.from_dataset(Items(images, labels, transform), mean, std)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (
            refuse(TRANSFORMS["Normalize"]),
            "item 0 .*not all k/255.*looks normalised; give the mean",
        ),
        (refuse(TRANSFORMS["Normalize"], mean=STD, std=MEAN), "item 0.*is not undone by the mean"),
        (refuse(random_flip), "another image each time.*without its random transforms"),
        (
            refuse(images=[RAW.images[0], RAW.images[1, :, 1:]]),
            r"item 1 .*\(3, 5, 5\), item 0 \(3, 6",
        ),
        (refuse(labels=["cat"] * 12), "label of item 0 .* is 'cat', not an int"),
        (refuse(lambda x: x * torch.nan), "item 0 .*from nan to nan, not all k/255"),
        (refuse(lambda x: x.long()), r"item 0 .*int64 \[3, 6, 5\]"),
        (refuse(lambda x: None), "item 0 .*NoneType"),
        (refuse(lambda x: Picture(x[0].numpy(), "P")), r"item 0 .*mode 'P'.*convert\('RGB'\)"),
        (refuse(images=[]), "no items"),
        (lambda: as_data(Stream()), "Stream has no length"),
        (lambda: ImageData.from_dataset([1, 2]), "item 0 of the dataset is a int"),
        (lambda: as_data("cifar10"), "data is a str; give ImageData"),
        (lambda: as_data((1, 2)), "data is a tuple"),
    ],
)
def test_datasets_refused(read, message):
    torch.manual_seed(0)
    with pytest.raises((ValueError, TypeError), match=message):
        read()


def test_as_data_keeps_image_data():
    assert as_data(RAW) is RAW
    other = as_data(RAW, mean=[0.0] * 3)
    assert (other.mean, other.std) == ((0.0,) * 3, RAW.std)
    assert other.images is RAW.images

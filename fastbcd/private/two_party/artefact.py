"""The artefact: a net as a list of operations on arrays, in a safetensors file. Needs numpy only.

The file's metadata has one entry, "fastbcd", a JSON object:

    version       1
    image         the shape of one image
    operations    in order; the last one gives the logits
    secret        the shapes of the tensors that only the server may see, by name
    fixed_point   [bits, fraction bits]
    checked       the images that the file was checked on, the largest difference of logits
                  relative to the largest logit, and the share of equal classes

An operation has a name, a kind, the layer it belongs to, the shape of its result without the batch,
and `of`: the names of what it computes with, which are "image", operations before it, or tensors.

    convolution   of x, weights, biases; with stride, padding, dilation, groups
    product       of x, weights [terms, channels], biases
    add, subtract, multiply    of two
    square, relu  of one
    sum           over the last dimension
    take          elements of the flattened inputs, one after the other, at the positions in the
                  tensor `index`, -1 is a 0; without `index` all of them, in another shape
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load, save

VERSION = 1
KEY = "fastbcd"


class Artefact(NamedTuple):
    """What the file holds.

    >>> relu = {"name": "y", "kind": "relu", "layer": "act", "of": ["image"], "shape": [3]}
    >>> artefact = Artefact.of([relu], {}, secret=(), image=(3,))
    >>> artefact.logits(np.array([[-1.0, 0.5, 2.0]], np.float32)).tolist()
    [[0.0, 0.5, 2.0]]
    """

    about: dict[str, Any]
    tensors: dict[str, np.ndarray]

    @classmethod
    def of(
        cls,
        operations: list[dict[str, Any]],
        tensors: dict[str, np.ndarray],
        *,
        secret: Any,
        image: Any,
        fixed_point: Any = (64, 16),
    ) -> Artefact:
        """secret: the names of the tensors that only the server may see."""
        about = {
            "version": VERSION,
            "image": list(image),
            "operations": operations,
            "secret": {name: list(tensors[name].shape) for name in secret},
            "fixed_point": list(fixed_point),
            "checked": {},
        }
        return cls(about, tensors)

    @classmethod
    def read(cls, data: bytes, source: str) -> Artefact:
        """The artefact that these bytes hold."""
        try:
            size = int.from_bytes(data[:8], "little")
            metadata = json.loads(data[8 : 8 + size])["__metadata__"]
            about = json.loads(metadata[KEY])
            tensors = load(data)
        except Exception as error:
            raise ValueError(
                f"{source} is no artefact of fastbcd.private.export ({error!r}): write one "
                f"that ends in .pi"
            ) from error
        if about["version"] != VERSION:
            raise ValueError(
                f"{source} is of version {about['version']}; this fastbcd reads version "
                f"{VERSION}: export the net again"
            )
        return cls(about, tensors)

    @classmethod
    def open(cls, path: str | Path) -> Artefact:
        """Read the file."""
        return cls.read(Path(path).read_bytes(), str(path))

    def written(self) -> bytes:
        """The file."""
        return save(self.tensors, {KEY: json.dumps(self.about)})

    def without_secrets(self) -> Artefact:
        """What the client may see: the operations and all shapes, but no weights."""
        secret = self.about["secret"]
        public = {
            name: array for name, array in self.tensors.items() if name not in secret
        }
        return Artefact(self.about, public)

    @property
    def operations(self) -> list[dict[str, Any]]:
        """In order."""
        return self.about["operations"]

    @property
    def output(self) -> str:
        """The name of the logits."""
        return self.operations[-1]["name"]

    def fingerprint(self) -> str:
        """The first digits of a hash of what the client may see."""
        return hashlib.sha256(self.without_secrets().written()).hexdigest()[:16]

    def logits(self, images: np.ndarray) -> np.ndarray:
        """images [B, ...] -> logits [B, classes], in plain numpy."""
        values = {"image": images, **self.tensors}
        for operation in self.operations:
            values[operation["name"]] = computed(operation, values, Plain)
        return values[self.output]

    def check_images(self, images: np.ndarray) -> None:
        """Refuse images of another shape, and what is not finite."""
        expected = tuple(self.about["image"])
        if images.ndim != len(expected) + 1 or images.shape[1:] != expected:
            raise ValueError(
                f"the images have shape {images.shape}; this net takes batches of {expected}"
            )
        if len(images) == 0 or not np.isfinite(images).all():
            raise ValueError("give one image or more, with finite values")


def computed(operation: dict[str, Any], values: Any, algebra: Any) -> Any:
    """The result of one operation. values: by name; algebra: `Plain`, or that of an engine."""
    inputs = [values[name] for name in operation["of"]]
    kind = operation["kind"]
    if kind == "convolution":
        x, weight, bias = inputs
        return algebra.convolution(x, weight, **operation["options"]) + bias
    if kind == "product":
        x, weight, bias = inputs
        return x @ weight + bias
    if kind == "add":
        return inputs[0] + inputs[1]
    if kind == "subtract":
        return inputs[0] - inputs[1]
    if kind == "multiply":
        return inputs[0] * inputs[1]
    if kind == "take":
        index = values[operation["index"]] if "index" in operation else None
        return algebra.take(inputs, index, operation["shape"])
    return getattr(algebra, kind)(*inputs)


class Plain:
    """Operations on numpy arrays: the reference that engines are compared with."""

    @staticmethod
    def convolution(
        x: np.ndarray,
        weight: np.ndarray,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        groups: int,
    ) -> np.ndarray:
        """x [B, C, H, W], weight [N, C / groups, h, w] -> [B, N, ...]."""
        height, width = padding
        x = np.pad(x, ((0, 0), (0, 0), (height, height), (width, width)))
        area = [
            d * (size - 1) + 1
            for d, size in zip(dilation, weight.shape[2:], strict=True)
        ]
        windows = np.lib.stride_tricks.sliding_window_view(x, area, axis=(2, 3))
        windows = windows[:, :, :: stride[0], :: stride[1]]
        windows = windows[..., :: dilation[0], :: dilation[1]]
        results = []
        for part, kernel in zip(
            np.split(windows, groups, 1), np.split(weight, groups), strict=True
        ):
            result = np.tensordot(part, kernel, ((1, 4, 5), (1, 2, 3)))
            results.append(np.moveaxis(result, -1, 1))
        return np.concatenate(results, 1)

    @staticmethod
    def relu(x: np.ndarray) -> np.ndarray:
        """max(x, 0)."""
        return np.maximum(x, 0)

    @staticmethod
    def square(x: np.ndarray) -> np.ndarray:
        """x²."""
        return x * x

    @staticmethod
    def sum(x: np.ndarray) -> np.ndarray:
        """[B, ..., n] -> [B, ...]."""
        return x.sum(-1)

    @staticmethod
    def take(
        inputs: list[np.ndarray], index: np.ndarray | None, shape: list[int]
    ) -> np.ndarray:
        """[B, ...] each -> [B, *shape]."""
        count = len(inputs[0])
        flat = np.concatenate([x.reshape(count, -1) for x in inputs], 1)
        if index is not None:
            flat = np.pad(flat, ((0, 0), (0, 1)))[:, index]
        return flat.reshape(count, *shape)

"""Masks: one bit per neuron, over one flat index space in execution order."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from fastbcd.masking.activations import MaskedActivation
from fastbcd.runtime.atomic_files import write_atomically
from fastbcd.runtime.philox import MASKS, philox


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """For each name of a net's tensors, the name without the prefixes of wrappers.

    A prefix is removed only if all names have it: `module` may be a part of the net.

    >>> plain_names(["module.fc.weight", "module.fc.bias"])
    {'module.fc.weight': 'fc.weight', 'module.fc.bias': 'fc.bias'}
    """
    whole = list(names)
    plain = whole
    for prefix in ("module.", "_orig_mod.") * 2:  # of DataParallel and torch.compile
        if all(name.startswith(prefix) for name in plain):
            plain = [name.removeprefix(prefix) for name in plain]
    plain = [name.replace("._orig_mod.", ".") for name in plain]
    twice = [name for name, times in Counter(plain).items() if times > 1]
    if twice:
        equal = [
            name for name, short in zip(whole, plain, strict=True) if short == twice[0]
        ]
        raise ValueError(
            f"tensors have the same name, {twice[0]!r}, once the prefixes of torch.compile are "
            f"removed: {', '.join(equal)}; rename one of the modules"
        )
    return dict(zip(whole, plain, strict=True))


class Site(NamedTuple):
    """One call of ReLU in the net; its neurons have the flat ids start .. start + numel - 1.

    >>> Site("layer1.relu", shape=(64, 8, 8), start=0).numel
    4096
    """

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """How many neurons: the product of the shape."""
        return math.prod(self.shape)


class MaskSet:
    """The bits of all sites, BoolTensor[total] on the CPU: True = this ReLU is kept.

    >>> m = MaskSet.full({"relu": (2, 2), "head": (3,)})
    >>> m.without([0, 5]).counts()
    {'relu': 3, 'head': 2}
    """

    def __init__(self, sites: Sequence[Site], bits: Tensor) -> None:
        self.sites = tuple(sites)
        self.total = sum(site.numel for site in self.sites)
        if bits.dtype != torch.bool or bits.shape != (self.total,):
            raise ValueError(
                f"bits are {bits.dtype} {tuple(bits.shape)}; these {len(self.sites)} sites need "
                f"torch.bool ({self.total},)"
            )
        self.bits = bits.cpu()

    @classmethod
    def full(cls, shapes: dict[str, tuple[int, ...]]) -> MaskSet:
        """All ReLUs kept, for sites of the given names and shapes in execution order."""
        sites = make_sites(shapes)
        return cls(sites, torch.ones(sum(s.numel for s in sites), dtype=torch.bool))

    def count(self) -> int:
        """How many ReLUs are kept."""
        return int(self.bits.sum())

    def counts(self) -> dict[str, int]:
        """How many ReLUs each site keeps."""
        return {
            s.name: int(b.sum()) for s, b in zip(self.sites, self.split(), strict=True)
        }

    def split(self) -> list[Tensor]:
        """The bits as one tensor per site, in the site's shape."""
        return self.parts(self.bits)

    def parts(self, values: Tensor) -> list[Tensor]:
        """Values of all ReLUs, [total], as one tensor per site, in the site's shape."""
        parts = values.split([site.numel for site in self.sites])
        return [
            part.view(site.shape) for part, site in zip(parts, self.sites, strict=True)
        ]

    def copy(self) -> MaskSet:
        """The bits as they are now: unlike a live view, a copy does not follow the net."""
        return MaskSet(self.sites, self.bits.clone())

    def without(self, ids: Tensor | Sequence[int]) -> MaskSet:
        """A copy with the ReLUs `ids` removed; refuses ids that are not kept."""
        smaller = self.copy()
        smaller.bits[self.check_kept(torch.as_tensor(ids))] = False
        return smaller

    def including(self, ids: Tensor) -> MaskSet:
        """A copy with the removed ReLUs `ids` returned."""
        larger = self.copy()
        larger.bits[ids] = True
        return larger

    def check_kept(self, ids: Tensor) -> Tensor:
        """ids as a LongTensor on the CPU, or an error that names the first bad one."""
        if ids.numel() and (ids.is_floating_point() or ids.dtype == torch.bool):
            raise TypeError(
                f"ids are {ids.dtype}; they must be integers, flat positions of ReLUs"
            )
        ids = ids.to(device="cpu", dtype=torch.int64)
        outside = ids[(ids < 0) | (ids >= self.total)]
        if outside.numel():
            raise IndexError(
                f"id {int(outside[0])} is out of range: there are {self.total} ReLUs"
            )
        for removed in ids[~self.bits[ids]].tolist()[:1]:
            site, position = self.locate(removed)
            where = f"site {site.name!r}, position {position}"
            raise ValueError(
                f"id {removed} ({where}) is not kept: that ReLU was removed before"
            )
        return ids

    def locate(self, flat: int) -> tuple[Site, tuple[int, ...]]:
        """The site of a flat id and the position inside it."""
        site = next(s for s in self.sites if s.start <= flat < s.start + s.numel)
        return site, tuple(map(int, np.unravel_index(flat - site.start, site.shape)))

    def sample(self, k: int, *, seed: int, step: int, trial: int) -> Tensor:
        """k distinct kept ids, uniform over all such sets: LongTensor[k].

        A pure function of (bits, k, seed, step, trial): the same on every machine.
        """
        kept = self.bits.nonzero().flatten()
        if not 0 <= k <= len(kept):
            raise ValueError(f"cannot sample {k} ReLUs: {len(kept)} are kept")
        return kept[torch.from_numpy(_distinct(len(kept), k, seed, step, trial))]

    def iou(self, other: MaskSet) -> float:
        """|m1·m2| / |m1|, m1 the one with fewer ReLUs (the paper's overlap score)."""
        self.check_same_sites(other.sites, "the other mask")
        smaller = min(self.count(), other.count())
        if smaller == 0:
            raise ValueError("the overlap with an empty mask is not defined")
        return int((self.bits & other.bits).sum()) / smaller

    def check_same_sites(self, sites: Sequence[Site], whose: str) -> None:
        """Refuse sites of another network, naming the first difference."""
        differences = [
            f"site {i} is {theirs.name!r} {theirs.shape}, expected {mine.name!r} {mine.shape}"
            for i, (mine, theirs) in enumerate(zip(self.sites, sites, strict=False))
            if mine != theirs
        ]
        if len(self.sites) != len(sites):
            differences.append(f"it has {len(sites)} sites, expected {len(self.sites)}")
        if differences:
            raise ValueError(f"{whose} belongs to another network: {differences[0]}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the bits of every site to a safetensors file, atomically."""
        sites = json.dumps([[s.name, s.shape] for s in self.sites])
        metadata = {"format": "fastbcd.masks", "version": "1", "sites": sites}
        content = save({"bits": self.bits.to(torch.uint8)}, metadata)
        write_atomically(Path(path), content)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> MaskSet:
        """Read what `save` wrote. `set_masks` then checks that it fits the net."""
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(
                f"{path} is not a readable safetensors file: {error}"
            ) from error
        if metadata.get("format") != "fastbcd.masks":
            raise ValueError(f"{path} holds no masks: write them with MaskSet.save")
        try:
            sites = make_sites(dict(json.loads(metadata["sites"])))
            return MaskSet(sites, tensors["bits"].bool())
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path}: its masks are damaged: {error}") from error

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MaskSet):
            return NotImplemented
        return self.sites == other.sites and torch.equal(self.bits, other.bits)

    __hash__ = None  # type: ignore[assignment]  # the bits of a live view change

    def __repr__(self) -> str:
        rows = [
            f"{self.count():,} of {self.total:,} ReLUs kept, {len(self.sites)} sites"
        ]
        width = max((len(site.name) for site in self.sites), default=0)
        for site, kept in zip(self.sites, self.counts().values(), strict=True):
            shape = "×".join(map(str, site.shape))
            rows.append(
                f"{site.name:<{width}}  {shape:>12}  {kept:>9,} of {site.numel:>9,}"
            )
        return "MaskSet: " + "\n  ".join(rows)


class NetMasks(MaskSet):
    """A live view of a net's masks: `bits` is read from the net each time."""

    def __init__(self, net: nn.Module) -> None:
        self.modules = mask_modules(net)
        self.sites = make_sites(
            {n: tuple(m.mask.shape) for n, m in self.modules.items()}
        )
        self.total = sum(s.numel for s in self.sites)

    @property
    def bits(self) -> Tensor:  # type: ignore[override]
        parts = [m.mask.flatten().bool() for m in self.modules.values()]
        if len({part.device for part in parts}) > 1:
            parts = [part.cpu() for part in parts]
        return torch.cat(parts).cpu()  # one copy from the device


def masks(net: nn.Module) -> MaskSet:
    """A live view of the net's masks, in execution order: it always shows the net's bits.

    >>> net = nn.Sequential(nn.Linear(4, 3), fastbcd.MaskedReLU(3))
    >>> live, before = fastbcd.masks(net), fastbcd.masks(net).copy()
    >>> fastbcd.set_masks(net, live.without([0]))
    >>> live.count(), before.count()
    (2, 3)
    """
    return NetMasks(net)


def set_masks(net: nn.Module, masks: MaskSet) -> None:
    """Write `masks` into the net, in place; refuses the masks of another net.

    >>> net = nn.Sequential(nn.Linear(4, 3), fastbcd.MaskedReLU(3))
    >>> set_masks(net, fastbcd.masks(net).without([0, 2]))
    >>> net[1].mask
    tensor([False,  True, False])
    """
    live = NetMasks(net)
    live.check_same_sites(masks.sites, "this mask")
    modules = list(live.modules.values())
    bits = masks.bits.to(modules[0].mask.device)  # one copy to the device
    for module, part in zip(modules, live.parts(bits), strict=True):
        module.mask.copy_(part)


def mask_modules(net: nn.Module) -> dict[str, MaskedActivation]:
    """The net's masked activations by name, as `convert` numbered them, or in module order."""
    buffers = net.named_buffers(remove_duplicate=False)
    plain = plain_names(name for name, _ in (*net.named_parameters(), *buffers))
    acts = {
        plain[f"{name}.mask".lstrip(".")].removesuffix("mask").rstrip("."): module
        for name, module in net.named_modules()
        if isinstance(module, MaskedActivation)
    }
    if not acts:
        raise ValueError(
            f"{type(net).__name__} has no masked activations: fastbcd.convert it, "
            f"or place fastbcd.MaskedReLU by hand"
        )
    return dict(sorted(acts.items(), key=lambda item: item[1].order))


def make_sites(shapes: dict[str, tuple[int, ...]]) -> tuple[Site, ...]:
    """Sites with consecutive ids in the given order."""
    sites = []
    start = 0
    for name, shape in shapes.items():
        site = Site(name, tuple(map(int, shape)), start)
        if min(site.shape, default=0) < 0:
            raise ValueError(f"site {name!r} has shape {site.shape}")
        sites.append(site)
        start += site.numel
    return tuple(sites)


def _distinct(n: int, k: int, seed: int, step: int, trial: int) -> np.ndarray:
    """k distinct numbers below n, uniform over all k-subsets.

    The first k distinct values of a sequence of independent uniform draws are such a sample.
    For k > n/2 the n - k numbers left out are drawn instead.
    """
    if k > n // 2:
        return np.delete(np.arange(n), _distinct(n, n - k, seed, step, trial))
    stream = philox(MASKS, seed=seed, step=step, trial=trial)
    drawn = np.empty(0, dtype=np.int64)
    while len(drawn) < k:
        raw = stream.random_raw(2 * (k - len(drawn)) + 16) >> np.uint64(32)
        # Lemire: (raw * n) >> 32 is uniform once raw with a low product is rejected.
        product = raw * np.uint64(n)
        fair = (product & np.uint64(0xFFFFFFFF)) >= np.uint64(2**32 % n)
        drawn = np.concatenate(
            [drawn, (product[fair] >> np.uint64(32)).astype(np.int64)]
        )
        _, first = np.unique(drawn, return_index=True)
        drawn = drawn[np.sort(first)]
    return drawn[:k]

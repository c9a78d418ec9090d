"""pack: what it writes, what it refuses, and what is left when it is interrupted."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

import fastbcd
from fastbcd import ImageData
from fastbcd.data import sources
from fastbcd.data.sources import as_data, load


class Made(Dataset):
    """Bytes that are made when they are read."""

    def __init__(self, count=20, shape=(3, 6, 5), broken=None):
        self.count = count
        self.shape = shape
        self.broken = broken

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        if i == self.broken:
            raise OSError(f"file {i} is damaged")
        return np.random.default_rng(i).integers(0, 256, self.shape, np.uint8), i % 4


class Streamed(IterableDataset):
    """The same, without a length."""

    def __iter__(self):
        return (Made()[i] for i in range(20))


def pack(source, path, **options):
    fastbcd.pack(source, path, progress=False, **options)
    return ImageData.open(path)


@pytest.mark.parametrize(
    "source",
    [
        Made(),
        DataLoader(Made(), 7, shuffle=True),
        DataLoader(Made(), 7, num_workers=1, multiprocessing_context="fork"),
        Streamed(),
        DataLoader(Streamed(), 7),
    ],
    ids=["dataset", "loader", "worker", "stream", "loader of a stream"],
)
def test_a_packed_dataset_is_that_in_memory(source, tmp_path) -> None:
    state = torch.get_rng_state()
    packed = pack(source, tmp_path / "new" / "folder", mean=(0.5,) * 3, std=(0.2, 0.3, 0.4))
    assert torch.equal(torch.get_rng_state(), state)
    memory = ImageData.from_dataset(Made(), mean=(0.5,) * 3, std=(0.2, 0.3, 0.4))
    assert torch.equal(packed.images, memory.images)
    assert torch.equal(packed.labels, memory.labels)
    assert torch.equal(packed.ids, memory.ids)
    assert (packed.mean, packed.std, packed.classes) == (memory.mean, memory.std, 4)


def test_parts_floats_and_other_targets(tmp_path) -> None:
    part = pack(Subset(Made(), [2, 5, 9]), tmp_path / "part")
    assert part.labels.tolist() == [2, 1, 1]
    for dtype in (torch.float32, torch.float64):
        items = [(torch.randn(2, 8, dtype=dtype), torch.randn(3)) for _ in range(5)]
        floats = pack(items, tmp_path / str(dtype))
        assert torch.equal(floats.images, torch.stack([x for x, _ in items]))
        assert torch.equal(floats.labels, torch.stack([y for _, y in items]))
        assert floats.classes is None
    assert pack(Made(), tmp_path / "more", classes=9).classes == 9


def test_what_does_not_fit_into_memory_is_refused_with_the_way_out(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sources, "default_memory", lambda device: 1500)
    for source in (Made(), DataLoader(Made(), 7)):
        with pytest.raises(
            ValueError, match=r"Made does not fit .* 20 items .*fastbcd\.pack.*open"
        ):
            as_data(source)
    assert len(as_data(Made(10))) == 10
    with pytest.raises(TypeError, match=r"Streamed has no length: fastbcd\.pack"):
        as_data(Streamed())
    for split, count in (("train", 20), ("test", 10)):
        pack(Made(count), tmp_path / split)
        assert len(load(tmp_path, split)) == count
    assert load(tmp_path).name == str(tmp_path)


def test_memory_is_constant(tmp_path) -> None:
    tracemalloc.start()
    try:
        pack(Made(300, (3, 128, 128)), tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "images.bin").stat().st_size == 300 * 3 * 128 * 128
    assert peak < 2 << 20


KILLED = """
import os, sys
sys.path.insert(0, sys.argv[1])
import fastbcd
from test_pack import Made

class Killed(Made):
    def __getitem__(self, i):
        if i == 15:
            os.kill(os.getpid(), 9)
        return super().__getitem__(i)

fastbcd.pack(Killed(), sys.argv[2], progress=False)
"""


def test_a_killed_process_leaves_nothing_that_looks_finished(tmp_path) -> None:
    here = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", KILLED, here, str(tmp_path)])
    assert done.returncode == -9
    assert [path.name for path in tmp_path.iterdir()] == ["images.bin"]
    with pytest.raises(ValueError, match=f"{tmp_path} is not a complete folder of fastbcd.pack"):
        ImageData.open(tmp_path)
    packed = pack(Made(), tmp_path)
    assert torch.equal(packed.images, ImageData.from_dataset(Made()).images)


def test_a_complete_folder_is_kept_unless_overwrite_is_said(tmp_path) -> None:
    before = pack(Made(), tmp_path)
    with pytest.raises(FileExistsError, match=r"is packed already: .*overwrite=True"):
        pack(Made(5), tmp_path)
    with pytest.raises(OSError, match="file 12 is damaged"):
        pack(Made(broken=12), tmp_path, overwrite=True)
    with pytest.raises(ValueError, match="not a complete folder"):
        ImageData.open(tmp_path)
    assert len(pack(Made(5), tmp_path, overwrite=True)) == 5
    assert torch.equal(before.images, ImageData.from_dataset(Made()).images)  # still mapped


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (Made(), {"mean": (0.5,)}, "mean has 1 values for 3 channels"),
        (Made(), {"classes": 3}, "label 3 of image 3 is out of range: the data has 3 classes"),
        (Made(0), {}, "no items"),
        ([(np.zeros((3, 4, 4), np.uint8), 0), (np.zeros((3, 5, 4), np.uint8), 0)], {}, "item 1"),
    ],
)
def test_refused(source, options, message, tmp_path) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        pack(source, tmp_path, **options)
    assert not (tmp_path / "meta.safetensors").exists()


def test_damaged_and_foreign_folders_are_refused_by_name(tmp_path) -> None:
    folder = tmp_path / "packed"
    pack(Made(), folder)
    images, meta = folder / "images.bin", folder / "meta.safetensors"
    whole = {path: path.read_bytes() for path in (images, meta)}
    damages = [(path, raw[:length]) for path, raw in whole.items()
               for length in (0, 1, len(raw) // 2, len(raw) - 1)]  # fmt: skip
    fastbcd.masks(fastbcd.MaskedReLU(4)).save(tmp_path / "masks")
    damages += [(images, whole[images] + b"x"), (meta, (tmp_path / "masks").read_bytes())]
    for path, raw in damages:
        path.write_bytes(raw)
        with pytest.raises(ValueError, match=f"{folder} is not a complete folder of fastbcd.pack"):
            ImageData.open(folder)
        path.write_bytes(whole[path])
    for missing in (tmp_path / "nowhere", images):
        with pytest.raises(ValueError, match=f"{missing} is not a complete folder"):
            ImageData.open(missing)

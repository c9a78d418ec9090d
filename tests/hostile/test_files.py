"""Damaged and hostile files: a clear refusal or a sound result, in bounded memory, nothing run."""

from __future__ import annotations

import io
import random
import resource
import zipfile

import numpy as np
import pytest
import torch

import fastbcd
from fastbcd.data.images import ImageData
from fastbcd.data.npz import load_npz
from helpers import published_nets
from helpers.hostile import seeds

REFUSALS = (ValueError, TypeError, FileNotFoundError)  # what a reader may raise
MEMORY = 512 << 20  # bytes that reading a file of some kilobytes may add to the process


def peak() -> int:
    """The most memory that the process has had, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def damage(raw: bytes, rng: random.Random) -> bytes:
    """Cut, flip, overwrite, insert, repeat or move parts of a file, a few times."""
    data = bytearray(raw)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        size = len(data)
        at, length = rng.randrange(size + 1), min(rng.choice([1, 1, 2, 4, 8, 64, 1000]), size)
        kind = rng.randrange(7)
        if kind == 0:
            del data[at:]
        elif kind == 1 and at < size:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[at : at + length] = rng.randbytes(length)
        elif kind == 3:
            data[at:at] = rng.randbytes(length)
        elif kind == 4:
            data[at:at] = data[at : at + length]
        elif kind == 5:
            other = rng.randrange(size + 1)
            data[at : at + length] = data[other : other + length]
        else:
            data[at : at + length] = rng.choice([b"\xff", b"\x00", b"\x7f"]) * length
        if not data:
            return b""
    return bytes(data)


def repack(raw: bytes, rng: random.Random) -> bytes:
    """A zip archive in which one member is damaged and the checksums are right again."""
    result = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(result, "w") as new:
        names = old.namelist()
        chosen = rng.choice(names)
        for name in names:
            content = old.read(name)
            new.writestr(name, damage(content, rng) if name == chosen and content else content)
    return result.getvalue()


def checkpoint(**options) -> bytes:
    stream = io.BytesIO()
    torch.save({"state_dict": published_nets.snl("resnet18").state_dict()}, stream, **options)
    return stream.getvalue()


def npz(tmp_path) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, images=np.zeros((3, 3, 4, 4), np.uint8), labels=np.arange(3), mean=np.ones(3))
    return stream.getvalue()


def packed_meta(tmp_path) -> bytes:
    dataset = torch.utils.data.TensorDataset(torch.rand(3, 3, 4, 4), torch.arange(3))
    fastbcd.pack(dataset, tmp_path, progress=False)
    return (tmp_path / "meta.safetensors").read_bytes()


def open_packed(path) -> ImageData:
    path.rename(path.parent / "meta.safetensors")
    return ImageData.open(path.parent)


FORMATS = {
    "checkpoint": (lambda _: checkpoint(), lambda path: fastbcd.load_snl(path)),
    "old checkpoint": (
        lambda _: checkpoint(_use_new_zipfile_serialization=False),
        lambda path: fastbcd.load_snl(path),
    ),
    "npz": (npz, lambda path: load_npz(path, "train")),
    "packed": (packed_meta, open_packed),
}


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files(name, tmp_path) -> None:
    write, read = FORMATS[name]
    raw, path = write(tmp_path), tmp_path / "damaged"
    path = path.with_suffix(".npz") if name == "npz" else path
    refused = 0
    for seed in seeds(40):
        rng = random.Random(seed)
        broken = repack(raw, rng) if raw[:2] == b"PK" and rng.random() < 0.5 else damage(raw, rng)
        path.write_bytes(broken)
        where = str(path.parent if name == "packed" else path)
        before, message = peak(), where
        try:
            result = read(path)
        except REFUSALS as error:
            refused, message = refused + 1, str(error)
        else:
            if isinstance(result, torch.nn.Module):
                assert all(p.isfinite().all() for p in result.parameters())
        assert where in message
        assert peak() - before < MEMORY
    assert refused


class Attack:
    """Pickles as a call."""

    def __init__(self, function, *arguments) -> None:
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_pickles_that_run_code_are_refused_at_any_place(tmp_path) -> None:
    """A call is put at a random place of a file's contents; the file it would write stays away."""
    mark, state = tmp_path / "run", published_nets.snl("resnet18").state_dict()
    for seed in seeds(15):
        rng = random.Random(seed)
        attack = rng.choice([Attack(exec, f"open({str(mark)!r}, 'w')"), Attack(mark.touch)])
        nested = rng.choice([attack, [attack], {"x": attack}, (1, [attack]), {attack: 1}])
        place = rng.choice(["state_dict", "optimizer", "masks"])
        content = {"state_dict": state, place: nested}
        torch.save(content, tmp_path / "c.pth", _use_new_zipfile_serialization=rng.random() < 0.5)
        for load in (fastbcd.load_snl, fastbcd.load_relupruner):
            with pytest.raises(REFUSALS, match=r"c\.pth"):
                load(tmp_path / "c.pth")
        np.savez(tmp_path / "x.npz", images=np.array([nested], dtype=object), labels=[0])
        with pytest.raises(REFUSALS, match=r"x\.npz"):
            load_npz(tmp_path / "x.npz", "train")
        assert not mark.exists()


@pytest.mark.parametrize(
    ("shape", "words"),
    [((4, 1, 8, 8), r"\[1, 8, 8\].*3 channels"), ((4, 3, 9, 9), r"\[3, 9, 9\]: mask has shape")],
)
def test_images_that_the_net_does_not_take(shape, words) -> None:
    net = fastbcd.models.resnet20(5, 8, width=4, blocks=1)
    data = torch.randn(shape), torch.arange(4)
    removals = torch.tensor([[0], [1]])
    calls = [
        lambda: fastbcd.score(net, removals, data),
        lambda: fastbcd.accuracy(net, data),
        lambda: fastbcd.saliency(net, data),
        lambda: fastbcd.train(net, data, epochs=1),
        lambda: fastbcd.bcd(net, data, budget=300, drc=100, rt=2),
        lambda: fastbcd.snl(net, data, 300),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"the net does not run on images of shape {words}"):
            call()

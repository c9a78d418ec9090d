"""Ranks: the processes of a torchrun job, or this one process alone.

    torchrun --nproc-per-node 2 -m fastbcd bcd ...       # or torch.distributed set up by hand

With one process every function here returns its argument, so that the code above is the same for
one rank and for many.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fastbcd.runtime.warn_once import warn_once

Answer = TypeVar("Answer")

TIMEOUT = timedelta(minutes=10)  # that a rank waits for the others
MISSING = "(missing)"
_alone = False


def rank() -> int:
    """This process's number, 0 unless torch.distributed is initialised.

    >>> rank(), world()
    (0, 1)
    """
    return dist.get_rank() if _joined() else 0


def world() -> int:
    """The number of processes, 1 unless torch.distributed is initialised."""
    return dist.get_world_size() if _joined() else 1


@contextmanager
def alone() -> Iterator[None]:
    """What this rank does here it does without the others, as if it was the only one."""
    global _alone
    _alone = True
    try:
        yield
    finally:
        _alone = False


def _joined() -> bool:
    return not _alone and dist.is_available() and dist.is_initialized()


def all_sum(t: Tensor) -> Tensor:
    """The sum over ranks, the same on all of them; t itself when there is one.

    >>> all_sum(torch.tensor([1, 2]))
    tensor([1, 2])
    """
    if world() == 1 or not t.numel():
        return t
    summed = _sendable(t).clone()
    dist.all_reduce(summed)
    return summed.to(t.device)


def from_first(t: Tensor) -> Tensor:
    """Rank 0's value on every rank; all ranks give a tensor of the same shape and dtype."""
    if world() == 1 or not t.numel():
        return t
    # As bytes: backends differ in the dtypes they know.
    sent = _sendable(t).contiguous().clone()
    dist.broadcast(sent.view(-1).view(torch.uint8), src=0)
    return sent.to(t.device)


def agree(tensors: Iterable[Tensor]) -> None:
    """Make tensors the same on all ranks, in place: floats their mean, others rank 0's.

    Tensors of one dtype go through one collective.

    >>> running_mean = torch.tensor([1.0, 2.0])
    >>> agree([running_mean])
    >>> running_mean
    tensor([1., 2.])
    """
    groups: dict[torch.dtype, list[Tensor]] = {}
    for t in tensors if world() > 1 else ():
        groups.setdefault(t.dtype, []).append(t.detach())
    for dtype, group in groups.items():
        flat = torch.cat([t.reshape(-1) for t in group])
        flat = all_sum(flat) / world() if dtype.is_floating_point else from_first(flat)
        for t, part in zip(group, flat.split([t.numel() for t in group]), strict=True):
            t.copy_(part.view_as(t))


def on_first(work: Callable[[], Answer]) -> Answer:
    """Rank 0 does the work, all ranks get its answer. If it fails all fail, so that none waits."""
    if world() == 1:
        return work()
    failure: Exception | None = None
    answer: list[Any] = [None, None]  # the text of an error, what the work gave
    if rank() == 0:
        try:
            answer[1] = work()
        except Exception as error:
            failure = error
            answer[0] = f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(answer, src=0)
    if failure is not None:
        raise failure
    if answer[0] is not None:
        raise RuntimeError(f"rank 0 failed: {answer[0]}")
    return answer[1]


def check_facts(
    facts: dict[str, Any],
    way_out: str = "give every rank the same net, data and settings",
) -> None:
    """RuntimeError on all ranks, naming the first difference, if their facts differ.

    facts: JSON-able. A rank waits TIMEOUT at most for the others.
    """
    if world() == 1:
        return
    arrived = dist.all_reduce(_sendable(torch.zeros(1)), async_op=True)
    try:
        arrived.wait(TIMEOUT)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {rank()} waited {TIMEOUT.total_seconds():.0f} s for the other ranks: they have "
            f"not made the same call, or ended with an error of their own ({error})"
        ) from error
    everyone: list[Any] = [None] * world()
    dist.all_gather_object(everyone, facts)
    for number, other in enumerate(everyone):
        for name, first, here in differences(everyone[0], other):
            raise RuntimeError(
                f"ranks differ: {name} is {first} on rank 0 and {here} on rank {number}; {way_out}"
            )


def differences(one: Any, other: Any, name: str = "") -> Iterator[tuple[str, str, str]]:
    """(dotted name, JSON text in one, JSON text in the other) wherever two JSON values differ.

    >>> list(differences({"a": {"b": 1}}, {"a": {"b": 2, "c": 3}}))
    [('a.b', '1', '2'), ('a.c', '(missing)', '3')]
    """
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**other, **one}:
            inner = f"{name}.{key}" if name else key
            yield from differences(
                one.get(key, MISSING), other.get(key, MISSING), inner
            )
        return
    texts = [_text(value) for value in (one, other)]
    if texts[0] != texts[1]:
        yield name, texts[0], texts[1]


def _text(value: Any) -> str:
    if value is MISSING:
        return MISSING
    return json.dumps(value, ensure_ascii=False)


def check_same(what: str, tensors: dict[str, Tensor]) -> None:
    """RuntimeError on all ranks, naming `what`, if their tensors differ in any bit."""
    if world() == 1:
        return
    digests = {name: digest({name: t}).hex()[:16] for name, t in tensors.items()}
    check_facts(
        {f"the digest of {what}": digests},
        "give every rank the same net, and train it in DistributedDataParallel",
    )


def digest(tensors: dict[str, Tensor]) -> bytes:
    """SHA-256 over names, dtypes, shapes and bytes, in the order of the names.

    >>> digest({"a": torch.zeros(2)}) == digest({"a": torch.zeros(2)})
    True
    """
    h = hashlib.sha256()
    for name, t in sorted(tensors.items()):
        h.update(f"{name} {t.dtype} {tuple(t.shape)};".encode())
        if t.numel():
            h.update(
                t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            )
    return h.digest()


@contextmanager
def joined(device: str = "cpu") -> Iterator[None]:
    """Join the job that torchrun started, if any, to work on `device`; leave it at the end.

    "cuda" is one GPU per rank, joined by NCCL. Ranks that share a GPU, which NCCL refuses, and
    CPU tensors go through gloo.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or dist.is_initialized():
        yield
        return
    backend = "gloo"
    if device.startswith("cuda") and torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        ranks = int(os.environ["LOCAL_WORLD_SIZE"])
        number = torch.device(device).index
        if number is not None:
            gpus = 1
        else:
            number = int(os.environ["LOCAL_RANK"]) % gpus
        torch.cuda.set_device(number)
        if ranks <= gpus:
            backend = "cpu:gloo,cuda:nccl"
        else:
            warn_once(
                f"{ranks} ranks share {gpus} of the GPUs: they exchange their values through "
                f"the host"
            )
    dist.init_process_group(backend, timeout=TIMEOUT)
    yield
    # Only on success: after an error the others may have ended, and leaving would wait for them.
    dist.destroy_process_group()


def _sendable(t: Tensor) -> Tensor:
    """t on a device that the group's backends read: its own, unless the group is NCCL's alone."""
    readable = [pair.partition(":")[0] for pair in dist.get_backend_config().split(",")]
    return t.detach() if t.device.type in readable else t.detach().to(readable[0])

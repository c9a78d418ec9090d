"""CrypTen 0.4.1 on a current torch: operations one after the other, on secret tensors.

Its dealer of triples is party 0, so this simulates private inference and is not private.
"""

from __future__ import annotations

import os
import sys
import time
import types
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .artefact import computed
from .channel import Connection


class CrypTenParty:
    """One party. addresses: of client and server; rank: 0 of the client, 1 of the server."""

    def __init__(
        self,
        name: str,
        rank: int,
        addresses: list[str],
        channel: Connection,
        *,
        fixed_point: list[int],
        owned: bool,
        tls: Any,
        narrow: dict[str, Any],
    ) -> None:
        if owned:
            raise ValueError(
                "crypten shares the weights: leave out weights_of='server'"
            )
        if tls:
            raise ValueError(
                "crypten has no TLS, and its dealer is party 0: take spu-cheetah"
            )
        if fixed_point[0] != 64:
            raise ValueError(f"crypten has 64 bits, not {fixed_point[0]}")
        torch.set_num_threads(1)
        host, port = addresses[1].rsplit(":", 1)
        os.environ.update(
            RANK=str(rank), WORLD_SIZE="2", RENDEZVOUS=f"tcp://{host}:{port}",
            MASTER_ADDR=host, MASTER_PORT=port,
        )  # fmt: skip
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.crypten = imported()
        dist.all_reduce = Exchange  # type: ignore[assignment]
        self.crypten.init()
        self.crypten.cfg.encoder.precision_bits = fixed_point[1]
        self.crypten.cfg.communicator.verbose = True  # count
        self.network = self.crypten.communicator.get()
        self.rank = rank
        self.channel = channel
        self.narrow = narrow
        self.values: dict[str, Any] = {}

    def share(self, name: str, owner: int, shape: Any, value: Any = None) -> int:
        """Make shares of what the owner alone has; returns the bytes of a share that is sent."""
        array = np.zeros(shape, np.float32) if value is None else value
        tensor = torch.from_numpy(np.array(array, np.float32))
        self.values[name] = self.crypten.cryptensor(tensor, src=owner)
        return 0  # the other party makes its share from a common random number

    def compile(
        self,
        operations: list[dict[str, Any]],
        results: list[str],
        constants: dict[str, np.ndarray],
        batch: int,
    ) -> Any:
        """The operations with their constants, as tensors."""
        tensors = {name: torch.from_numpy(array) for name, array in constants.items()}
        window = self.narrow.get(operations[0]["layer"])
        return operations, results, tensors, _algebra(window)

    def run(self, executable: Any) -> dict[str, Any]:
        """Run it; what it took."""
        operations, results, tensors, algebra = executable
        self.network.reset_communication_stats()
        begin = time.perf_counter()
        values = {**self.values, **tensors}
        for operation in operations:
            values[operation["name"]] = computed(operation, values, algebra)
        self.values.update((name, values[name]) for name in results)
        seconds = time.perf_counter() - begin
        counted = self.network.get_communication_stats()
        return {
            "sent": counted["bytes"] // 2,  # of both directions
            "received": counted["bytes"] // 2,
            "messages_sent": counted["rounds"],
            "messages_received": counted["rounds"],
            "seconds": seconds,
        }

    def reveal(self, name: str) -> tuple[np.ndarray | None, int]:
        """The value, to the client alone, and the bytes that the server sent."""
        shared = self.values[name]
        mine = shared.share.numpy()
        if self.rank == 1:
            self.channel.send(mine.tobytes())
            return None, mine.nbytes
        theirs = np.frombuffer(self.channel.receive(), np.int64)
        total = mine + theirs.reshape(mine.shape)
        return (total / shared.encoder.scale).astype(np.float32), mine.nbytes

    def close(self) -> None:
        """Wait for the other party: one that leaves with its connections open may abort."""
        self.network.barrier()
        self.crypten.uninit()


def imported() -> Any:
    """CrypTen, on a torch that no longer has a module that it imports and does not use."""
    missing: Any = types.ModuleType("torch.onnx._internal.registration")
    missing.registry = None
    sys.modules.setdefault(missing.__name__, missing)
    import crypten

    return crypten


class Exchange:
    """dist.all_reduce between two parties: each sends its numbers to the other and adds.

    Gloo's own splits the numbers between the parties and then collects the sums: two round trips
    for one.
    """

    count = 0

    def __init__(self, mine: Any, op: Any, group: Any, async_op: bool = False) -> None:
        self.mine = mine
        self.op = op
        self.sent = mine.contiguous().clone(memory_format=torch.contiguous_format)
        self.theirs = torch.empty_like(self.sent)
        Exchange.count += 1
        other = 1 - dist.get_rank()
        self.parts: list[Any] = [
            dist.irecv(self.theirs, other, group=group, tag=Exchange.count),
            dist.isend(self.sent, other, group=group, tag=Exchange.count),
        ]
        if not async_op:
            self.wait()

    def wait(self) -> None:
        """Until both have arrived."""
        for part in self.parts:
            part.wait()
        if self.op == dist.ReduceOp.SUM:
            self.mine += self.theirs
        elif self.op == dist.ReduceOp.BXOR:
            self.mine ^= self.theirs
        else:
            raise NotImplementedError(f"{self.op} of two shares")


def _algebra(window: Any) -> Any:
    """Operations on secret tensors. window: the bits that a comparison reads; None: all."""
    import crypten

    from .narrow import narrow_relu

    class OnShares:
        @staticmethod
        def convolution(
            x: Any, weight: Any, stride: Any, padding: Any, dilation: Any, groups: int
        ) -> Any:
            options = {"stride": stride, "padding": padding, "dilation": dilation}
            return x.conv2d(weight, groups=groups, **options)

        @staticmethod
        def relu(x: Any) -> Any:
            if window is None:
                return x.relu()
            return narrow_relu(x, *window)

        @staticmethod
        def square(x: Any) -> Any:
            return x.square()

        @staticmethod
        def sum(x: Any) -> Any:
            return x.sum(-1)

        @staticmethod
        def take(inputs: Any, index: Any, shape: Any) -> Any:
            count = inputs[0].shape[0]
            flat = crypten.cat([x.reshape(count, -1) for x in inputs], 1)
            if index is not None:
                flat = flat.pad((0, 1))[:, index.long()]
            return flat.reshape(count, *shape)

    return OnShares

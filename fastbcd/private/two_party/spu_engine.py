"""SPU 0.9.5: each layer is one executable, whose traffic SPU's log states."""

from __future__ import annotations

import os
import re
import tempfile
import time
from typing import Any

import numpy as np

from .artefact import computed
from .channel import Connection

KINDS = {"spu-cheetah": "CHEETAH", "spu-semi2k": "SEMI2K"}
LINK = re.compile(
    r"Link details: total send bytes (\d+), recv bytes (\d+), "
    r"send actions (\d+), recv actions (\d+)"
)


class SpuParty:
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
        os.environ["JAX_PLATFORMS"] = "cpu"
        self.log = _Log()
        from spu import api, libspu

        if narrow:
            raise ValueError(f"{name} has no narrow comparisons; crypten has")
        self.rank = rank
        self.channel = channel
        self.owned = owned
        self.config = libspu.RuntimeConfig(
            protocol=getattr(libspu.ProtocolKind, KINDS[name]),
            field=getattr(libspu.FieldType, f"FM{fixed_point[0]}"),
        )
        self.config.fxp_fraction_bits = fixed_point[1]
        self.config.enable_pphlo_profile = True  # what is sent, by executable
        self.config.max_concurrency = 1  # more threads send more messages
        self.config.experimental_enable_colocated_optimization = owned
        description = libspu.link.Desc()
        for party, address in zip(("client", "server"), addresses, strict=True):
            description.add_party(party, address)
        description.recv_timeout_ms = int(channel.seconds * 1000)
        if tls:
            _secure(description, tls)
        self.link = libspu.link.create_brpc(description, rank)
        self.io = api.Io(2, self.config)
        self.runtime = api.Runtime(self.link, self.config)
        self.libspu = libspu
        self.secret = libspu.Visibility.VIS_SECRET
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.link.barrier()

    def share(self, name: str, owner: int, shape: Any, value: Any = None) -> int:
        """Make shares of what the owner alone has; returns the bytes of a share that is sent."""
        self.shapes[name] = tuple(shape)
        if self.rank == owner:
            private = 1 if self.owned and owner == 1 else -1
            array = np.ascontiguousarray(value, np.float32)
            shares = self.io.make_shares(array, self.secret, owner_rank=private)
            mine = shares[self.rank]
            other = shares[1 - self.rank]
            self._send(other)
        else:
            mine = other = self._receive()
        self.runtime.set_var(name, mine)
        return _size(other)

    def _send(self, share: Any) -> None:
        parts = [share.meta, *share.share_chunks]
        self.channel.send(str(len(parts)).encode())
        for part in parts:
            self.channel.send(part)

    def _receive(self) -> Any:
        count = int(self.channel.receive())
        meta, *chunks = [self.channel.receive() for _ in range(count)]
        share = self.libspu.Share()
        share.meta = meta
        share.share_chunks = chunks
        return share

    def compile(
        self,
        operations: list[dict[str, Any]],
        results: list[str],
        constants: dict[str, np.ndarray],
        batch: int,
    ) -> Any:
        """The executable of some operations."""
        from spu.utils import frontend

        made = [operation["name"] for operation in operations]
        used = dict.fromkeys(name for each in operations for name in each["of"])
        names = [name for name in used if name not in {*made, *constants}]

        def layer(*arrays: Any) -> Any:
            values = {**constants, **dict(zip(names, arrays, strict=True))}
            for operation in operations:
                values[operation["name"]] = computed(operation, values, _algebra())
            return tuple(values[name] for name in results)

        examples = [np.zeros(self.shapes[name], np.float32) for name in names]
        executable, _ = frontend.compile(
            frontend.Kind.JAX,
            layer,
            examples,
            {},
            names,
            [self.secret] * len(names),
            lambda _: results,
        )
        for operation in operations:
            self.shapes[operation["name"]] = (batch, *operation["shape"])
        return executable

    def run(self, executable: Any) -> dict[str, Any]:
        """Run it; what it took."""
        begin = time.perf_counter()
        self.runtime.run(executable)
        seconds = time.perf_counter() - begin
        lines = LINK.findall(self.log.new())
        sent, received, out, back = map(int, lines[-1])
        return {
            "sent": sent,
            "received": received,
            "messages_sent": out,
            "messages_received": back,
            "seconds": seconds,
        }

    def reveal(self, name: str) -> tuple[np.ndarray | None, int]:
        """The value, to the client alone, and the bytes that the server sent."""
        share = self.runtime.get_var(name)
        if self.rank == 1:
            self._send(share)
            return None, _size(share)
        theirs = self._receive()
        return self.io.reconstruct([share, theirs]), _size(theirs)

    def close(self) -> None:
        """Wait for the other party."""
        self.link.barrier()
        self.link.stop_link()


def _size(share: Any) -> int:
    """Bytes of a share."""
    return sum(map(len, share.share_chunks))


def _algebra() -> Any:
    """Operations on jax arrays."""
    import jax.numpy as jnp
    from jax import lax

    class OnJax:
        @staticmethod
        def convolution(
            x: Any, weight: Any, stride: Any, padding: Any, dilation: Any, groups: int
        ) -> Any:
            return lax.conv_general_dilated(
                x,
                weight,
                stride,
                [(size, size) for size in padding],
                rhs_dilation=dilation,
                dimension_numbers=("NCHW", "OIHW", "NCHW"),
                feature_group_count=groups,
            )

        @staticmethod
        def relu(x: Any) -> Any:
            return jnp.maximum(x, 0.0)

        @staticmethod
        def square(x: Any) -> Any:
            return x * x

        @staticmethod
        def sum(x: Any) -> Any:
            return x.sum(-1)

        @staticmethod
        def take(inputs: Any, index: Any, shape: Any) -> Any:
            count = len(inputs[0])
            flat = [x.reshape(count, -1) for x in inputs]
            if index is None:
                return jnp.concatenate(flat, 1).reshape(count, *shape)
            if (index < 0).any():
                flat.append(jnp.zeros((count, 1), jnp.float32))
            joined = jnp.concatenate(flat, 1)
            index = np.where(index < 0, joined.shape[1] - 1, index)
            taken = joined.at[:, index].get(mode="promise_in_bounds")
            return taken.reshape(count, *shape)

    return OnJax


def _secure(description: Any, folder: Any) -> None:
    """Mutual TLS on the link, with the same certificates as the channel."""
    description.enable_ssl = True
    for side in ("client_ssl_opts", "server_ssl_opts"):
        options = getattr(description, side)
        options.cert.certificate_path = str(folder / "cert.pem")
        options.cert.private_key_path = str(folder / "key.pem")
        options.verify.verify_depth = 1
        options.verify.ca_file_path = str(folder / "peer.pem")
        setattr(description, side, options)


class _Log:
    """What SPU writes to the standard output of this process."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115, as long as the process
        os.dup2(self.file.fileno(), 1)
        self.read = 0

    def new(self) -> str:
        """Since the last call."""
        end = os.fstat(self.file.fileno()).st_size
        text = os.pread(self.file.fileno(), end - self.read, self.read)
        self.read = end
        return text.decode(errors="replace")

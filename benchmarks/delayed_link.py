"""A link with a round trip of any length between two processes on one Linux machine.

Each process enters a network namespace of its own, whose only device is a TUN. A thread of the
parent moves every IP packet from one device to the other, half a round trip after it was sent: data
and TCP's acknowledgements alike, at any bandwidth. (`tc netem` does the same inside the kernel,
where the kernel has it.) The thread itself adds some 0.1 ms, more on a busy machine.

It needs /dev/net/tun, `ip` of iproute2, and root; `unshare -r command` may serve for root.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import threading
import time
from collections import deque
from multiprocessing import reduction
from pathlib import Path
from typing import Any

DEVICE, ADDRESSES = "tun0", ("10.77.0.1", "10.77.0.2")
MTU = 65_000  # bytes
SPIN = 3e-4  # seconds before a packet is due in which the thread does not sleep
# Buffers for a long link: with the usual 128 kB a message takes several round trips.
BUFFERS = {"tcp_rmem": "4096 8388608 16777216", "tcp_wmem": "4096 8388608 16777216"}
NEW_NETWORK, TUNSETIFF, TUN_WITHOUT_HEADER = 0x40000000, 0x400454CA, 0x1001  # of Linux


class DelayedLink:
    """Made by the parent, which calls `start`; its two child processes call `join`."""

    def __init__(self, context: Any) -> None:
        """context: multiprocessing's, that the children are made with."""
        self.one_way = context.Value("d", 0.0)  # seconds; any process may change it
        self.devices = context.SimpleQueue()

    def join(self, rank: int) -> None:
        """Move this process (0 or 1) into a namespace of its own, as ADDRESSES[rank]."""
        try:
            if ctypes.CDLL(None, use_errno=True).unshare(NEW_NETWORK):
                raise OSError(ctypes.get_errno(), "unshare")
            device = os.open("/dev/net/tun", os.O_RDWR)
            request = struct.pack("16sH22x", DEVICE.encode(), TUN_WITHOUT_HEADER)
            fcntl.ioctl(device, TUNSETIFF, request)
            for command in (
                "link set lo up", f"address add {ADDRESSES[rank]}/24 dev {DEVICE}",
                f"link set {DEVICE} up mtu {MTU}",
            ):  # fmt: skip
                subprocess.run(["ip", *command.split()], check=True)
            for name, sizes in BUFFERS.items():
                Path("/proc/sys/net/ipv4", name).write_text(sizes)
        except (OSError, subprocess.CalledProcessError) as error:
            needs = "a delay needs Linux, /dev/net/tun, iproute2 and root, or `unshare -r` before"
            raise SystemExit(f"{needs} the command: {error}") from error
        self.devices.put((rank, reduction.DupFd(device)))

    def start(self) -> None:
        """Move packets, for as long as this process lives."""
        threading.Thread(target=self._forward, daemon=True).start()

    def _forward(self) -> None:
        found = dict(self.devices.get() for _ in ADDRESSES)
        devices = [found[rank].detach() for rank in range(2)]
        other = dict(zip(devices, devices[::-1], strict=True))
        waiting: deque[tuple[float, int, bytes]] = deque()
        while True:
            left = (
                max(0.0, waiting[0][0] - time.perf_counter() - SPIN)
                if waiting
                else None
            )
            for device in select.select(devices, [], [], left)[0]:
                packet = os.read(device, MTU + 100)
                due = time.perf_counter() + self.one_way.value
                waiting.append((due, other[device], packet))
            while waiting and waiting[0][0] <= time.perf_counter():
                _, device, packet = waiting.popleft()
                os.write(device, packet)

"""A link with a round trip of any length between two processes on one Linux machine.

    with Link(one_way=0.02) as link:
        link.places[0].command      # before a command: it runs in the first network namespace
        link.places[0].host         # its address there
        link.carried                # bytes so far, from the first and from the second
    link.bursts(0, least=200)   # how often the first sent, with pauses for the second between

Each end is a network namespace whose only device is a TUN. A thread moves every IP packet from one
device to the other, half a round trip after it was sent: data and TCP's acknowledgements alike, at
any bandwidth. (`tc netem` does the same inside the kernel, where the kernel has it.) The thread
itself adds some 0.1 ms, more on a busy machine.

It needs /dev/net/tun, `ip` of iproute2, `nsenter`, and root, for which `unshare -r` may serve.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from multiprocessing import get_context, reduction
from pathlib import Path
from typing import Any

import numpy as np

from fastbcd.private.running import Place

DEVICE, ADDRESSES = "tun0", ("10.77.0.1", "10.77.0.2")
MTU = 65_000  # bytes
SPIN = 3e-4  # seconds before a packet is due in which the thread does not sleep
# Buffers for a long link: with the usual 128 kB a message takes several round trips.
BUFFERS = {"tcp_rmem": "4096 8388608 16777216", "tcp_wmem": "4096 8388608 16777216"}
NEW_NETWORK, TUNSETIFF, TUN_WITHOUT_HEADER = 0x40000000, 0x400454CA, 0x1001  # of Linux


class Link:
    """Two namespaces and the thread between them, until the end of `with`."""

    def __init__(self, one_way: float = 0.0) -> None:
        self.one_way = one_way  # seconds; may change
        self.carried = [0, 0]
        self.sent: list[list[tuple[float, int]]] = [[], []]  # when, and bytes of TCP
        context = get_context("spawn")
        self.ends = []
        self.devices = []
        self.places = []
        if not shutil.which("nsenter") or not shutil.which("ip"):
            raise OSError("a delayed link needs ip of iproute2 and nsenter")
        for rank, address in enumerate(ADDRESSES):
            here, there = context.Pipe()
            end = context.Process(target=_end, args=(rank, there), daemon=True)
            end.start()
            self.ends.append(end)
            answer = here.recv()
            if isinstance(answer, str):
                self.__exit__()
                raise OSError(answer)
            self.devices.append(answer.detach())
            enter = ("nsenter", "-t", str(end.pid), "-n", "--preserve-credentials")
            device = ("env", f"GLOO_SOCKET_IFNAME={DEVICE}")
            self.places.append(Place(address, (*enter, *device)))

    def __enter__(self) -> Link:
        threading.Thread(target=self._forward, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        for end in self.ends:
            end.kill()
            end.join()

    def bursts(self, rank: int, least: int) -> int:
        """Runs of packets of more than `least` bytes, without a pause of 0.7 of the delay.

        Whoever needs the answer to a message pauses for a delay at least, so this is about the
        number of exchanges; a message longer than TCP's window counts more than once.
        """
        times = [moment for moment, size in self.sent[rank] if size > least]
        pauses = np.diff(times) > 0.7 * self.one_way
        return int(pauses.sum()) + bool(times)

    def _forward(self) -> None:
        first, second = self.devices
        waiting: deque[tuple[float, int, bytes]] = deque()
        while self.ends[0].is_alive():
            left = 0.5
            if waiting:
                left = max(0.0, waiting[0][0] - time.perf_counter() - SPIN)
            for device in select.select(self.devices, [], [], left)[0]:
                packet = os.read(device, MTU + 100)
                now = time.perf_counter()
                rank = self.devices.index(device)
                self.carried[rank] += len(packet)
                self.sent[rank].append((now, _payload(packet)))
                due = now + self.one_way
                waiting.append((due, second if device == first else first, packet))
            while waiting and waiting[0][0] <= time.perf_counter():
                _, device, packet = waiting.popleft()
                os.write(device, packet)


def _payload(packet: bytes) -> int:
    """The bytes that a TCP packet carries; 0 of an acknowledgement, or of another protocol."""
    version, protocol = packet[0] >> 4, packet[9]
    if version != 4 or protocol != 6:
        return 0
    ip_header = 4 * (packet[0] & 15)
    tcp_header = 4 * (packet[ip_header + 12] >> 4)
    return len(packet) - ip_header - tcp_header


def _end(rank: int, pipe: Any) -> None:
    """A process in a namespace of its own, as ADDRESSES[rank]; it sends its device and waits."""
    try:
        if ctypes.CDLL(None, use_errno=True).unshare(NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "unshare")
        device = os.open("/dev/net/tun", os.O_RDWR)
        request = struct.pack("16sH22x", DEVICE.encode(), TUN_WITHOUT_HEADER)
        fcntl.ioctl(device, TUNSETIFF, request)
        for words in (
            "link set lo up", f"address add {ADDRESSES[rank]}/24 dev {DEVICE}",
            f"link set {DEVICE} up mtu {MTU}",
        ):  # fmt: skip
            subprocess.run(["ip", *words.split()], check=True)
        for name, sizes in BUFFERS.items():
            Path("/proc/sys/net/ipv4", name).write_text(sizes)
    except (OSError, subprocess.CalledProcessError) as error:
        needs = "a delay needs Linux, /dev/net/tun, iproute2 and root, or `unshare -r` before"
        pipe.send(f"{needs} the command: {error}")
        sys.exit(1)
    pipe.send(reduction.DupFd(device))
    time.sleep(1e6)

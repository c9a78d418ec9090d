"""What this machine offers: the memory that values may take, and the CPU's cache."""

from __future__ import annotations

from pathlib import Path

import torch


def default_memory(device: torch.device, *, whole: bool = False) -> int:
    """Bytes that values may take: 70 % of a GPU's free memory, or half of a CPU's.

    whole: as if no memory was in use.

    >>> 0 < default_memory(torch.device("cpu")) <= default_memory(torch.device("cpu"), whole=True)
    True
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        if not whole:
            # Memory that torch reserved and does not use is free for its next tensors.
            total = free + torch.cuda.memory_reserved(device)
            total -= torch.cuda.memory_allocated(device)
        return int(0.7 * total)
    line = "MemTotal:" if whole else "MemAvailable:"
    try:
        words = Path("/proc/meminfo").read_text().split()
        return int(words[words.index(line) + 1]) * 1024 // 2
    except (OSError, ValueError):
        return 2**31


def cache_bytes() -> int:
    """The size of the CPU's largest cache.

    >>> cache_bytes() > 0
    True
    """
    units = {"K": 2**10, "M": 2**20}
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * units.get(text[-1], 1))
    return max(sizes, default=16 * 2**20)

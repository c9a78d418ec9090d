"""`fastbcd cost`: what the ReLUs that a run or a file of masks keeps take in private inference."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from fastbcd import private
from fastbcd.cli.kept import read_kept
from fastbcd.cli.options import one_line_errors

_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_TIMES = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}


def main(arguments: list[str] | None = None) -> int:
    """Print the cost by site and in all."""
    options = _parser().parse_args(arguments)
    return one_line_errors("cost", lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastbcd cost",
        description="Bytes, rounds and seconds of the ReLUs kept, for one image; where each figure "
        "comes from is printed with it.",
    )
    add = parser.add_argument
    add("source", type=Path, metavar="RUN|MASKS", help="a run directory or a file of masks")
    add("--protocol", nargs="+", choices=private.PROTOCOLS, default=["crypten"], metavar="NAME",
        help=f"some of {', '.join(private.PROTOCOLS)} (crypten)")  # fmt: skip
    add("--bandwidth", type=bits_a_second, default=1e9, help="as in 100Mbit or 40MB/s (1Gbit)")
    add("--rtt", type=seconds, default=1e-3, help="round trip, as in 40ms (1ms)")
    add("--json", action="store_true", help="a list with one object a protocol")
    return parser


def _run(options: argparse.Namespace) -> None:
    kept = read_kept(options.source)
    costs = [
        private.cost(kept.masks, name, bandwidth=options.bandwidth, rtt=options.rtt, poly=kept.poly)
        for name in options.protocol
    ]
    if options.json:
        print(json.dumps([cost.as_dict() for cost in costs], indent=2, ensure_ascii=False))
    else:
        print("\n\n".join(map(str, costs)))


def bits_a_second(text: str) -> float:
    """A bandwidth; without a unit bits a second.

    >>> bits_a_second("100Mbit"), bits_a_second("40 MB/s")
    (100000000.0, 320000000.0)
    """
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([kMGT]?)(bit|b|B)?(?:/s|ps)?", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no bandwidth; write 100Mbit or 40MB/s")
    value = float(match[1]) * _PREFIXES[match[2]] * (8 if match[3] == "B" else 1)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not more than 0")
    return value


def seconds(text: str) -> float:
    """A time; without a unit seconds.

    >>> seconds("40ms"), seconds("2")
    (0.04, 2.0)
    """
    match = re.fullmatch(r"([0-9.]+(?:e-?[0-9]+)?)\s*(s|ms|us|µs)?", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write 40ms")
    return float(match[1]) * _TIMES[match[2] or ""]

"""The command `fastbcd`."""

from __future__ import annotations

import argparse
import sys

from fastbcd import demo, info

COMMANDS = {
    "demo": (demo.main, "convert a small network and remove ReLUs from it"),
    "info": (info.main, "what runs here, and why not the rest; --check compares the kernels"),
}


def main(arguments: list[str] | None = None) -> int:
    """Hand the rest of the line to a command.

    >>> main(["info"])  # doctest: +SKIP
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="fastbcd",
        description="Remove ReLUs from trained networks by Block Coordinate Descent.",
        epilog="\n".join(f"  {name:<6} {text}" for name, (_, text) in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="command", help="one of those below")
    options = parser.parse_args(arguments[:1])
    return COMMANDS[options.command][0](arguments[1:])


if __name__ == "__main__":
    sys.exit(main())

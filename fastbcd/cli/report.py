"""`fastbcd report`: a page with figures of one or more runs, beside the published results."""

from __future__ import annotations

import argparse

from fastbcd import report
from fastbcd.cli.options import call


def work(options: argparse.Namespace) -> None:
    """Write the page and print its path."""
    page = call(report.write, options, out=options.out or options.runs[0] / "report")
    figures = len(list(page.parent.glob("*.png")))
    print(f"{page}: open it in a browser; its {figures} figures are beside it as PNG")

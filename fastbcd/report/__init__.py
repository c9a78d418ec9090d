"""A run as one HTML page, beside the published results.

fastbcd.report.write(["runs/15k"], "runs/15k/report")      # report.html, accuracy.png, …
"""

from fastbcd.report import published
from fastbcd.report.writer import write

__all__ = ["published", "write"]

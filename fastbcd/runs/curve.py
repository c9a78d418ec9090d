"""The accuracy of a run against the ReLUs kept, as HTML for notebooks; it needs no library."""

from __future__ import annotations

import html
from collections.abc import Sequence

from fastbcd.runs.step import Step

WIDTH = 420
HEIGHT = 160
MARGIN = 30


def as_html(title: str, history: Sequence[Step]) -> str:
    """A title, and below it the curve of the test accuracy, or else of the train accuracy.

    >>> step = Step(number=1, before=9, after=5, drc=4, base_accuracy=90.0, base_loss=0.1,
    ...             chosen_accuracy=88.0, chosen_loss=0.2, engine="stacked", sites=[5])
    >>> as_html("a run", [step]).count("<circle")
    1
    """
    points = [
        (step.after, step.test_accuracy)
        for step in history
        if step.test_accuracy is not None
    ]
    name = "test accuracy"
    if not points:
        points = [(step.after, step.chosen_accuracy) for step in history]
        name = "train accuracy after the removal"
    text = f"<p>{html.escape(title)}</p>"
    if not points:
        return text
    counts, values = zip(*points, strict=True)
    across = _scale(counts, MARGIN, WIDTH - MARGIN)
    down = _scale(values, HEIGHT - MARGIN, MARGIN)
    places = list(zip(across, down, strict=True))
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in places)
    unit = history[-1].unit
    labels = [
        (MARGIN, 14, "start", f"{name}, {min(values):.2f} to {max(values):.2f}{unit}"),
        (MARGIN, HEIGHT - 8, "start", f"{min(counts):,}"),
        (WIDTH - MARGIN, HEIGHT - 8, "end", f"{max(counts):,} ReLUs kept"),
    ]
    texts = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}">{label}</text>'
        for x, y, anchor, label in labels
    )
    return (
        f'{text}<svg width="{WIDTH}" height="{HEIGHT}" font-size="12" fill="currentColor">'
        f'<polyline points="{line}" fill="none" stroke="currentColor"/>{dots}{texts}</svg>'
    )


def _scale(values: Sequence[float], low: float, high: float) -> list[float]:
    """Values as positions from `low`, for the smallest, to `high`."""
    least = min(values)
    span = max(values) - least or 1.0
    return [low + (value - least) / span * (high - low) for value in values]

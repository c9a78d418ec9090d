"""The page: one HTML file that loads nothing and contains no script."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from string import Template
from typing import NamedTuple


class Card(NamedTuple):
    """A figure on the page; `name` is its file, without the suffix."""

    name: str
    title: str
    alt: str
    about: str  # what its axes and marks are
    png: bytes


def render(
    title: str,
    notices: Sequence[str],
    *,
    headlines: Mapping[str, Mapping[str, str]],
    cards: Sequence[Card],
    facts: Mapping[str, Mapping[str, str]],
    footer: str,
) -> str:
    """The HTML text; headlines and facts: texts by their names, for each run."""
    body = [f'<p class="open">{escape(text)}</p>' for text in notices]
    for run, values in headlines.items():
        tiles = [
            f"<div><b>{escape(v)}</b>{escape(name)}</div>" for name, v in values.items()
        ]
        heading = f"<h2>{escape(run)}</h2>" * (len(headlines) > 1)
        body.append(f'{heading}<div class="headline">{"".join(tiles)}</div>')
    body += ['<div class="cards">', *map(_figure, cards), _table(facts), "</div>"]
    here = resources.files("fastbcd.report")
    template = Template((here / "page.html").read_text("utf-8"))
    return template.substitute(
        title=escape(title),
        css=(here / "page.css").read_text("utf-8"),
        body="\n".join(body),
        footer=escape(footer),
    )


def _figure(card: Card) -> str:
    source = f"data:image/png;base64,{base64.b64encode(card.png).decode()}"
    image = f'<img alt="{escape(card.alt)}" src="{source}">'
    about = f'<p class="about">{escape(card.about)}</p>'
    return f"<section>\n<h2>{escape(card.title)}</h2>\n{image}\n{about}</section>"


def _table(facts: Mapping[str, Mapping[str, str]]) -> str:
    """One column per run; of several runs it takes both columns of the page."""
    rows = [_row("th", ["", *facts])]
    for name in dict.fromkeys(name for column in facts.values() for name in column):
        cells = [column.get(name, "–") for column in facts.values()]
        rows.append(_row("td", [name, *cells]))
    kind = "wide" * (len(facts) > 1)
    return "\n".join(
        [f'<section class="{kind}" tabindex="0"><table>', *rows, "</table></section>"]
    )


def _row(tag: str, cells: Sequence[str]) -> str:
    return (
        "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
    )

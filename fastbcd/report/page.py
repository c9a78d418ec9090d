"""The page: sections as one HTML file that loads nothing and contains no script."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any

from fastbcd.report.sections import Section, Table


def render(
    title: str,
    notices: Sequence[str],
    parts: Sequence[tuple[str, Sequence[Section]]],
    *,
    images: dict[str, bytes],
    footer: str,
) -> str:
    """The HTML text.

    notices: sentences above all sections. parts: a heading ("" for none) and its sections.
    images: PNG files by the names of their sections.
    """
    body = [f'<p class="open">{escape(text)}</p>' for text in notices]
    for heading, sections in parts:
        body += [f'<h2 class="run">{escape(heading)}</h2>'] if heading else []
        body += ['<div class="cards">', *(_section(s, images) for s in sections), "</div>"]
    here = resources.files("fastbcd.report")
    html, css = ((here / name).read_text("utf-8") for name in ("page.html", "page.css"))
    return Template(html).substitute(
        title=escape(title), css=css, body="\n".join(body), footer=escape(footer)
    )


def _section(section: Section, images: dict[str, bytes]) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>", f"<p>{escape(section.text)}</p>"]
    if section.figure is not None:
        data, alt = base64.b64encode(images[section.name]).decode(), escape(section.alt)
        parts.append(f'<img alt="{alt}" src="data:image/png;base64,{data}">')
    parts += [_table(table) for table in section.tables]
    kind = ' class="wide"' if section.wide else ""
    return f"<section{kind}>\n" + "\n".join(parts) + "\n</section>"


def _table(table: Table) -> str:
    """Columns of words are aligned to the left and may wrap."""
    rows = [[_text(cell) for cell in row] for row in table.rows]
    words = [any(len(cell) > 14 and " " in cell for cell in c) for c in zip(*rows, strict=True)]
    mark = [' class="text"' if w else "" for w in words or [False] * len(table.head)]

    def line(tag: str, cells: Sequence[str]) -> str:
        texts = (f"<{tag}{m}>{escape(c)}</{tag}>" for m, c in zip(mark, cells, strict=True))
        return f"<tr>{''.join(texts)}</tr>"

    caption = escape(table.caption)
    top = "" if table.folded or not caption else f"<caption>{caption}</caption>"
    body = "\n".join(line("td", row) for row in rows)
    box = f'<div class="scroll" tabindex="0"><table>{top}<thead>{line("th", table.head)}</thead>\n'
    box += f"<tbody>{body}</tbody></table></div>"
    return f"<details><summary>{caption}</summary>{box}</details>" if table.folded else box


def _text(value: Any) -> str:
    """
    >>> [_text(value) for value in (12_000, 93.456, None, True, "87.4 MB")]
    ['12,000', '93.46', '–', 'yes', '87.4 MB']
    """
    if value is None or isinstance(value, bool):
        return {None: "–", True: "yes", False: "no"}[value]
    return f"{value:,}" if isinstance(value, int) else format(value, ".2f" * (type(value) is float))

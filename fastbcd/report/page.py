"""The page: sections as one HTML file that loads nothing and contains no script."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

from fastbcd.report.sections import Section, Table

# One column on a phone, two on a wide screen; wide sections take both; tables scroll by themselves.
CSS = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #f5f5f2; color: #1a1a1a;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 1.2rem 1rem 3rem; }
h1 { font-size: 1.55rem; line-height: 1.25; margin: .4rem 0 .8rem; overflow-wrap: anywhere; }
h2 { font-size: 1.12rem; margin: 0 0 .3rem; }
h2.run { font-size: 1.3rem; margin: 2rem 0 .6rem; overflow-wrap: anywhere; }
p { margin: 0 0 .7rem; }
.open { border: 2px solid #1a1a1a; border-left-width: 10px; background: #fff; padding: .7rem 1rem;
  font-weight: 600; }
.cards { columns: 2 430px; column-gap: 1rem; }
section { background: #fff; border: 1px solid #d5d5d0; border-radius: 6px; padding: 1rem;
  margin-bottom: 1rem; break-inside: avoid; }
section.wide { column-span: all; }
section > p { color: #404040; font-size: .93rem; }
img { display: block; width: 100%; max-width: 640px; height: auto; margin: 0 auto; }
.scroll { overflow: auto; margin-top: .4rem; }
details .scroll { max-height: 26rem; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: #404040; padding-bottom: .3rem; }
th, td { padding: .22rem .7rem .22rem 0; border-bottom: 1px solid #e2e2de; text-align: right;
  vertical-align: top; white-space: nowrap; }
th { font-weight: 600; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
td.text { white-space: normal; min-width: 9rem; overflow-wrap: anywhere; }
td:first-child { font-weight: 600; }
summary { cursor: pointer; padding: .45rem 0; font-size: .9rem; }
footer { margin-top: 2rem; color: #505050; font-size: .85rem; }
@media print { body { background: #fff; } }
""".strip()
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


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
    images: PNG files by the names of the pictures.
    """
    body = [f"<h1>{escape(title)}</h1>"]
    body += [f'<p class="open">{escape(text)}</p>' for text in notices]
    for heading, sections in parts:
        body += [f'<h2 class="run">{escape(heading)}</h2>'] if heading else []
        body += ['<div class="cards">', *(_section(s, images) for s in sections), "</div>"]
    body.append(f"<footer>{escape(footer)}</footer>")
    head = [
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<link rel="icon" href="data:,">',
        f"<title>{escape(title)}</title>",
        f"<style>\n{CSS}\n</style>",
    ]
    lines = ["<!doctype html>", '<html lang="en">', "<head>", *head, "</head>", "<body>", "<main>",
             *body, "</main>", "</body>", "</html>"]  # fmt: skip
    return "\n".join(lines) + "\n"


def _section(section: Section, images: dict[str, bytes]) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>", f"<p>{escape(section.text)}</p>"]
    if section.picture is not None:
        data = base64.b64encode(images[section.picture.name]).decode()
        alt = escape(section.picture.alt, quote=True)
        parts.append(f'<img alt="{alt}" src="data:image/png;base64,{data}">')
    parts += [_table(table) for table in section.tables]
    kind = ' class="wide"' if section.wide else ""
    return f"<section{kind}>\n" + "\n".join(parts) + "\n</section>"


def _table(table: Table) -> str:
    """Columns of words are aligned to the left and may wrap."""
    words = [_is_text([row[i] for row in table.rows]) for i in range(len(table.head))]
    mark = [' class="text"' if w else "" for w in words]
    head = "".join(f"<th{m}>{escape(c)}</th>" for m, c in zip(mark, table.head, strict=True))
    rows = [
        "<tr>"
        + "".join(f"<td{m}>{escape(c)}</td>" for m, c in zip(mark, row, strict=True))
        + "</tr>"
        for row in table.rows
    ]
    caption = f"<caption>{escape(table.caption)}</caption>" if table.caption else ""
    inner = f"<table>{'' if table.folded else caption}<thead><tr>{head}</tr></thead>\n<tbody>"
    inner += "\n".join(rows) + "</tbody></table>"
    box = f'<div class="scroll" tabindex="0">{inner}</div>'
    if not table.folded:
        return box
    return f"<details><summary>{escape(table.caption)}</summary>{box}</details>"


def _is_text(cells: list[str]) -> bool:
    """
    >>> _is_text(["at most 12 ReLUs", "4"]), _is_text(["1,200", "87.4 MB"])
    (True, False)
    """
    return any(len(cell) > 14 and " " in cell for cell in cells)

"""Shared by the tests of reports: a parsed page."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

PNG = b"\x89PNG\r\n\x1a\n"


class Page(HTMLParser):
    """The text, the tables, the images and every address in a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self.images: list[dict[str, Any]] = []
        self.addresses: list[str] = []
        self.tags: set[str] = set()
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.add(tag)
        self.addresses += [v or "" for k, v in attrs if k in ("src", "href", "srcset", "action")]
        if tag == "img":
            self.images.append(attributes)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self.lasttag in ("td", "th") and self.rows and data.strip():
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def row(self, first: str) -> list[str]:
        return next(row for row in self.rows if row and row[0] == first)

"""What mkdocs cannot do by itself: a page from benchmarks/, links out of docs/, the reference."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import fastbcd

RESULTS = Path(__file__).parent.parent / "benchmarks/RESULTS.md"
NAMESPACES = ("models", "private", "ops", "report")


def on_files(files: Files, config: Any) -> Files:
    """Add benchmarks/RESULTS.md, whose links to docs/ lead into the site."""
    text = RESULTS.read_text().replace("../docs/", "")
    text = re.sub(r'<img src="(.*?)".*? alt="(.*?)">', r"![\2](\1)", text)
    files.append(File.generated(config, "RESULTS.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to other files of the repository become their text."""
    if page.file.src_path == "api.md":
        return markdown + reference()
    markdown = markdown.replace("../benchmarks/RESULTS.md", "RESULTS.md")
    return re.sub(r"\[([^\]]*)\]\(\.\./[^)]*\)", r"\1", markdown)


def reference() -> str:
    """All public names, each with its signature and its docstring."""
    parts = ["", "## fastbcd"]
    parts += [
        entry("fastbcd", name) for name in fastbcd.__all__ if name not in NAMESPACES
    ]
    for namespace in NAMESPACES:
        names = getattr(fastbcd, namespace).__all__
        parts += ["", f"## fastbcd.{namespace}"]
        parts += [entry(f"fastbcd.{namespace}", name) for name in names]
    return "\n\n".join(parts)


def entry(module: str, name: str) -> str:
    """One name: heading, signature, docstring; a class with its own public methods."""
    value = getattr(importlib.import_module(module), name)
    parts = [f"### {name}", *described(f"{module}.{name}", value)]
    if inspect.isclass(value):
        for attribute, member in vars(value).items():
            if attribute[0] != "_" and inspect.isfunction(member) and member.__doc__:
                parts += [f"#### {name}.{attribute}", *described(attribute, member)]
    return "\n\n".join(parts)


def described(title: str, value: Any) -> list[str]:
    """The signature as code, and the docstring as Markdown."""
    parts = []
    if callable(value):
        parts.append(f"```python\n{signature(title, value)}\n```")
    for block in (inspect.getdoc(value) or "").split("\n\n"):
        if block.lstrip().startswith(">>>"):
            parts.append(f"```pycon\n{block}\n```")
        elif block.startswith(("Args:", "Settings:")):
            parts.append(arguments(block))
        else:
            parts.append(block.replace("<", "&lt;").replace("*", "\\*"))
    return parts


def signature(title: str, value: Any) -> str:
    """title(...), with one parameter per line if one line is too short."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except ValueError:
        return title
    texts = []
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in texts:
            texts.append("*")
        texts.append(re.sub(r": '([^']*)'", r": \1", str(parameter)))
    line = f"{title}({', '.join(texts)})"
    if len(line) <= 80:
        return line
    return f"{title}(\n    " + ",\n    ".join(texts) + ",\n)"


def arguments(block: str) -> str:
    """A list of the arguments, of lines such as `    name: what it is`."""
    texts = []
    for line in inspect.cleandoc(block.partition("\n")[2]).splitlines():
        if line[0] == " ":
            texts[-1] += f" {line.strip()}"
        else:
            names, _, text = line.partition(": ")
            texts.append(f"- `{names}`: {text}")
    return "\n".join(texts)

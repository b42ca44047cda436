"""Links from the documentation to files of the repository outside `docs`: each linked file becomes a part of the site.

A Markdown file becomes a page, a source file a page that shows it, a folder a list of its files, and any other file is
copied. So the site is whole without a network and without a host for the repository.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

DOCS: Final = "docs/"
PREFIX: Final = "repository/"  # of the site, for files outside docs
SHOWN: Final = {".py": "python", ".toml": "toml", ".yml": "yaml", ".cff": "yaml"}  # as a page with the text in it
FENCE: Final = re.compile(r"(^[ ]*```.*?^[ ]*```[^\n]*$)", flags=re.DOTALL | re.MULTILINE)
LINK: Final = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
ELSEWHERE: Final = re.compile(r"^(?:[a-z]+:|/)")


@final
@dataclass(frozen=True)
class Part:
    """A part of the site that comes from outside `docs`: a page's Markdown, or a file to copy."""

    uri: str
    markdown: str | None
    source: Path | None


def links(markdown: str) -> Iterator[str]:
    """The relative links of a page, without their anchors; those in code are none."""
    for piece in FENCE.split(markdown)[::2]:
        for found in LINK.finditer(piece):
            if not ELSEWHERE.match(found[2]):
                yield found[2]


def uri_of(path: str, root: Path) -> str:
    """Where a file of the repository stands in the site, among the sources of its pages."""
    if path.startswith(DOCS):
        return path.removeprefix(DOCS)
    file = root / path
    if file.is_dir():
        return f"{PREFIX}{path}/{'README.md' if (file / 'README.md').is_file() else 'index.md'}"
    return f"{PREFIX}{path}.md" if file.suffix in SHOWN else f"{PREFIX}{path}"


def rewritten(markdown: str, page: str, root: Path) -> str:
    """The page's Markdown with links that work in the site. `page` is its path in the repository."""

    def link(found: re.Match[str]) -> str:
        if ELSEWHERE.match(found[2]):
            return found[0]
        target = _target(page, found[2])
        if page.startswith(DOCS) and target.startswith(DOCS):
            return found[0]
        here = posixpath.dirname(uri_of(page, root))
        return f"{found[1]}{posixpath.relpath(uri_of(target, root), here or '.')}{found[3]}"

    pieces = FENCE.split(markdown)
    pieces[::2] = [LINK.sub(link, piece) for piece in pieces[::2]]
    return "".join(pieces)


def linked_parts(pages: Mapping[str, str], root: Path, also: tuple[str, ...] = ()) -> list[Part]:
    """All that `pages` (path in the repository to Markdown) link outside `docs`, and what that links in turn."""
    waiting = [*also, *(_target(page, link) for page, text in pages.items() for link in links(text))]
    found: dict[str, Part] = {}
    while waiting:
        path = waiting.pop()
        if path.startswith(DOCS) or path in found or not (root / path).exists():
            continue  # a link that leads nowhere stays as it is, and fails the build
        file, uri = root / path, uri_of(path, root)
        if file.is_dir() and (file / "README.md").is_file():
            waiting.append(f"{path}/README.md")
        elif file.is_dir():
            names = sorted(one.name for one in file.iterdir() if one.is_file())
            waiting += [f"{path}/{name}" for name in names]
            listed = "\n".join(f"- [{name}]({name})" for name in names)
            found[path] = Part(uri, rewritten(f"# {path}\n\n{listed}\n", f"{path}/index.md", root), None)
        elif file.suffix == ".md":
            text = file.read_text(encoding="utf-8")
            waiting += [_target(path, link) for link in links(text)]
            found[path] = Part(uri, rewritten(text, path, root), None)
        elif file.suffix in SHOWN:
            text = file.read_text(encoding="utf-8")
            found[path] = Part(uri, f"# {path}\n\n````{SHOWN[file.suffix]}\n{text}````\n", None)
        else:
            found[path] = Part(uri, None, file)
    return list(found.values())


def _target(page: str, link: str) -> str:
    """The path in the repository that a link of a page means."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))

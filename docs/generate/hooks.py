"""mkdocs calls these functions while it builds the site: they add pages and blocks that are made from the sources."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, Final

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))

import command_line  # noqa: E402
import notebooks  # noqa: E402
import offline  # noqa: E402
import repository  # noqa: E402
import run_folder  # noqa: E402

BLOCKS: Final = {"command line": command_line.markdown, "run folder": run_folder.markdown}
BLOCK: Final = re.compile(r"<!-- generated: ([\w ]+) -->")
ALWAYS: Final = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")  # in the nav, whether or not a page links them


def on_files(files: Any, config: Any) -> Any:
    """Add the notebooks as pages, and what pages link outside `docs`."""
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            page = file.src_uri.removesuffix(".ipynb") + ".md"
            text = notebooks.as_markdown(Path(file.abs_src_path))
            files.append(File.generated(config, page, content=text))
    pages = {f"{repository.DOCS}{file.src_uri}": file.content_string for file in files.documentation_pages()}
    for part in repository.linked_parts(pages, ROOT, ALWAYS):
        how = {"content": part.markdown} if part.markdown is not None else {"abs_src_path": str(part.source)}
        files.append(File.generated(config, part.uri, **how))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fill the blocks that are generated, and make links to files outside `docs` work."""
    uri = page.file.src_uri
    markdown = BLOCK.sub(lambda found: BLOCKS[found[1]](), markdown)
    if uri.startswith(repository.PREFIX):
        return markdown  # rewritten when it was added
    return repository.rewritten(markdown, f"{repository.DOCS}{uri}", ROOT)


def on_post_build(config: Any) -> None:
    """Refuse a site that loads something from another host: readers may be offline."""
    site = Path(config["site_dir"])
    for file in [*site.rglob("*.html"), *site.rglob("*.css")]:
        if found := offline.fetched_from_elsewhere(file.read_text(encoding="utf-8")):
            raise PluginError(f"{file.relative_to(site)} loads from another host: {found}; keep the file in docs")

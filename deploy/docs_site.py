"""A hook of MkDocs: on the site, a link that leaves docs/ leads to the repository.

Pages name files by their path beside the page, so that they can be read where they lie; a site has only the pages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

REPO = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]+)")


class File(Protocol):
    """What MkDocs says of a page's file."""

    abs_src_path: str


class Page(Protocol):
    """What MkDocs says of a page."""

    file: File


def on_page_markdown(markdown: str, page: Page, config: Mapping[str, str], **_: object) -> str:
    """The page's text with such links replaced; one that leads to no file stays, and fails the build."""
    folder = Path(page.file.abs_src_path).parent

    def replaced(found: re.Match[str]) -> str:
        target = (folder / found[1]).resolve()
        if target.is_relative_to(config["docs_dir"]) or not target.is_relative_to(REPO) or not target.exists():
            return found[1]
        return f"{config['repo_url']}/blob/main/{target.relative_to(REPO)}"

    return LINK.sub(replaced, markdown)

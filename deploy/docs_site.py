"""A hook of MkDocs: gives links and tables of a page the same meaning on the site as in the repository.

Pages name files by their path beside the page. A site has only the pages, so a link that leaves docs/ leads to the
repository. A pipe in the code of a table needs a backslash on GitHub, and Python-Markdown would show it. The first page
of the site begins with README's top.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

REPO = Path(__file__).resolve().parents[1]
CODE = re.compile(r"`[^`\n]+`")
README_TOP = "<!-- README.md to its first heading -->"
LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]+)")


class File(Protocol):
    """A page's file in MkDocs."""

    abs_src_path: str


class Page(Protocol):
    """A page in MkDocs."""

    file: File


def readme_top() -> str:
    """Return README from its title to its first heading, with links as docs/index.md has them."""
    text = (REPO / "README.md").read_text(encoding="utf-8")
    top = text.partition("\n## ")[0].partition("\n")[2]
    return re.sub(r"(?<=\]\()(?!https?://)([^)]+)", lambda at: f"../{at[1]}".replace("../docs/", ""), top)


def on_page_markdown(markdown: str, page: Page, config: Mapping[str, str], **_: object) -> str:
    """Return the page's text for the site. A link that leads to no file stays, and fails the build."""
    folder = Path(page.file.abs_src_path).parent
    if README_TOP in markdown:
        markdown = markdown.replace(README_TOP, readme_top())

    def replaced(found: re.Match[str]) -> str:
        target = (folder / found[1]).resolve()
        if target.is_relative_to(config["docs_dir"]) or not target.is_relative_to(REPO) or not target.exists():
            return found[1]
        return f"{config['repo_url']}/blob/main/{target.relative_to(REPO)}"

    return LINK.sub(replaced, CODE.sub(lambda code: code[0].replace("\\|", "|"), markdown))

"""`python -m deploy.runbook`: the runbook as the router serves it, from docs/operate/runbook.md.

The router includes it, because the internet may be the outage at three in the morning. It is rendered here and not
while serving, so that the router needs no library for it. Links to other documents become text: they are not served.
"""

from __future__ import annotations

import re
from pathlib import Path

import markdown

from deploy.docs_site import CODE

REPO = Path(__file__).resolve().parents[1]
SOURCE, PAGE = REPO / "docs/operate/runbook.md", REPO / "router/admin/runbook/runbook.html"
FRAME = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>warmroute: runbook</title>
<link rel="stylesheet" href="runbook.css">
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def rendered(text: str) -> str:
    """Return the page of this text: HTML without scripts, its own styles or links to other pages."""
    text = re.sub(r"\[([^]]+)\]\((?!#)[^)]+\)", r"\1", text)
    text = CODE.sub(lambda code: code[0].replace("\\|", "|"), text)  # GitHub needs a backslash there
    toc = {"toc": {"slugify": lambda title, _: anchor(title)}}
    body = markdown.markdown(text, extensions=["tables", "fenced_code", "toc"], extension_configs=toc)
    return FRAME.format(body=body)


def anchor(title: str) -> str:
    """Return a heading's anchor, as GitHub makes it and as alerts link to it."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


if __name__ == "__main__":
    PAGE.write_text(rendered(SOURCE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(REPO)}")

"""Signs of trouble that a person sees: rows of the dashboard's attention list, and lines of `warmroute top --once`.

The page's rows are made by the dashboard's own modules, in a process of node. Lines of `top` are made by its own
functions.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

import router.admin.dashboard
from router.cli.top import plain
from router.cli.top.command import PageUnavailable, fetch_page
from router.cli.top.screen import Grid, Line, screen

SCRIPT = Path(__file__).with_name("attention.mjs")
DASHBOARD = Path(router.admin.dashboard.__file__).parent
WRONG = ("red", "yellow")  # styles of `top` for what is wrong
REASONS = "Why computed"  # its colours stand for reasons of misses


@dataclass(slots=True)
class Rows:
    """Rows of one surface at one moment."""

    all: list[str] = field(default_factory=list)
    signs: list[str] = field(default_factory=list)
    """The rows that say that something is wrong."""


class Page:
    """The dashboard's attention list of one router."""

    def __init__(self, node: asyncio.subprocess.Process) -> None:
        self._node = node

    async def read(self) -> Rows:
        """Return the rows now; none if the router does not answer."""
        if self._node.stdin is None or self._node.stdout is None:
            return Rows()
        self._node.stdin.write(b"\n")
        rows = json.loads(await self._node.stdout.readline() or b"[]")
        return Rows([row["words"] for row in rows], [row["words"] for row in rows if row["kind"] != "good"])


@asynccontextmanager
async def open_page(admin_url: str, folder: Path) -> AsyncIterator[Page | None]:
    """Run the dashboard's modules, copied into `folder`; yields None without node."""
    node = shutil.which("node")
    if node is None:
        yield None
        return
    modules = folder / "dashboard"
    shutil.copytree(DASHBOARD, modules, ignore=shutil.ignore_patterns("__pycache__"))
    (modules / "package.json").write_text('{"type": "module"}')
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(node, SCRIPT, modules, admin_url, stdin=pipe, stdout=pipe)
    try:
        yield Page(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def read_top(session: aiohttp.ClientSession, admin_url: str) -> Rows:
    """Return the lines of `top --once` now; none if the router does not answer."""
    try:
        parts = screen(await fetch_page(session, admin_url))
    except PageUnavailable:
        return Rows()
    return Rows(plain.render(parts).splitlines(), [sign for part in parts for sign in _signs(part)])


def _signs(part: Line | Grid) -> list[str]:
    """Return the texts that `top` draws as wrong."""
    if isinstance(part, Line):
        return [cell.text.strip() for cell in part.cells if cell.style.endswith(WRONG)]
    if part.columns and part.columns[0].name == REASONS:
        return []
    wrong = (row for row in part.rows if any(cell.style.endswith(WRONG) for cell in row))
    return ["  ".join(cell.text for cell in row) for row in wrong]

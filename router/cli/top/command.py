"""Requests only `/admin/observatory`, and shows it once or until q is pressed."""

from __future__ import annotations

import asyncio
import importlib.util
import ssl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from router.cli.optional_deps import describe_missing_extra
from router.cli.top import plain
from router.cli.top.screen import printable, screen
from router.config import secrets
from router.engines import http_client

ANSWER_S = 5.0
PAGE_BYTES_MAX = 16 << 20
INTERVAL_MIN_S = 0.2
QUIT = b"qQ\x03\x04"  # keys that end it, in addition to the signal of Ctrl-C


class PageUnavailable(Exception):
    """Raised if the router's page cannot be read; the message gives the reason, and a possible remedy."""


def main(url: str, token_file: Path | None, *, interval_s: float, once: bool) -> int:
    """Run the command. Returns the exit status."""
    try:
        token = secrets.read("", str(token_file)) if token_file else ""
    except (OSError, UnicodeDecodeError) as error:
        return _complain(f"{token_file}: {getattr(error, 'strerror', None) or 'is no text'}")
    coloured = importlib.util.find_spec("rich") is not None
    once = once or not sys.stdout.isatty()
    if not once and not coloured:
        print(
            f"warmroute: {describe_missing_extra('top', 'rich', 'top')}; --once shows one page without it",
            file=sys.stderr,
        )
        return 2
    try:
        if once:
            asyncio.run(_print_once(url, token, coloured=coloured))
        else:
            asyncio.run(_watch(url, token, max(interval_s, INTERVAL_MIN_S)))
    except PageUnavailable as error:
        return _complain(str(error))
    except KeyboardInterrupt:
        return 0
    return 0


def _complain(problem: str) -> int:
    print(f"warmroute: {problem}", file=sys.stderr)
    return 1


async def _print_once(url: str, token: str, *, coloured: bool) -> None:
    async with http_client.session(token, ANSWER_S) as session:
        parts = screen(await fetch_page(session, url))
    if coloured:
        from rich.console import Console

        from router.cli.top.terminal import render

        Console().print(render(parts))
    else:
        print(plain.render(parts))


async def _watch(url: str, token: str, interval_s: float) -> None:
    """Show the page until q is pressed. A router that never answered is an error; if it stops answering later, the
    command waits for it."""
    from rich.console import Console
    from rich.live import Live

    from router.cli.top.terminal import render

    console, foot = Console(), f"q quits   every {interval_s:g} s   {url}"
    async with http_client.session(token, ANSWER_S) as session:
        page, gone = await fetch_page(session, url), ""
        with quit_key() as quit_, Live(console=console, screen=True, auto_refresh=False) as shown:
            while not quit_.is_set():
                parts = screen(page, height=console.size.height, gone=gone, foot=foot)
                shown.update(render(parts, width=console.size.width), refresh=True)
                try:
                    await asyncio.wait_for(quit_.wait(), interval_s)
                except TimeoutError:
                    gone = ""
                    try:
                        page = await fetch_page(session, url)
                    except PageUnavailable as error:
                        gone = str(error)


@contextmanager
def quit_key() -> Iterator[asyncio.Event]:
    """Yield an event that is set when a key that ends the command is pressed. In the meantime the terminal delivers
    keys without waiting for the end of a line; its mode is restored at the end. If standard input is no terminal, keys
    are not read."""
    quit_, keys = asyncio.Event(), sys.stdin
    if keys is None or not keys.isatty():
        yield quit_
        return
    import os
    import termios
    import tty

    loop, number = asyncio.get_running_loop(), keys.fileno()
    before = termios.tcgetattr(number)

    def heard() -> None:
        said = os.read(number, 64)
        if not said or set(said) & set(QUIT):  # empty: the terminal is gone
            quit_.set()

    tty.setcbreak(number)
    loop.add_reader(number, heard)
    try:
        yield quit_
    finally:
        loop.remove_reader(number)
        termios.tcsetattr(number, termios.TCSADRAIN, before)


async def fetch_page(session: aiohttp.ClientSession, url: str) -> Any:  # noqa: ANN401 - JSON
    """Return the observatory's page. Raises PageUnavailable."""
    try:
        async with session.get(f"{url.rstrip('/')}/admin/observatory", allow_redirects=False) as response:
            body = await http_client.read_body(response, PAGE_BYTES_MAX)
    except aiohttp.InvalidURL as error:
        raise PageUnavailable(f"{printable(url)} is not a URL such as http://127.0.0.1:8001") from error
    except (aiohttp.ClientError, OSError, ssl.SSLError) as error:  # TimeoutError is an OSError
        raise PageUnavailable(
            f"cannot reach {url}: {http_client.describe_error(error)}; "
            "check that this is the address of the admin listener"
        ) from error
    if response.status == 401:
        raise PageUnavailable(f"{url} requires the admin token: set --token-file to a file with the valid token")
    if response.status == 404:
        raise PageUnavailable(f"{url} has no observatory: it is not an admin listener, or insights.enabled is false")
    if response.status != 200:
        raise PageUnavailable(f"{url} answered {response.status}")
    try:
        page = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise PageUnavailable(
            f"{url} did not answer with JSON: check that this is the address of the admin listener"
        ) from error
    if not isinstance(page, dict) or "totals" not in page:
        raise PageUnavailable(f"{url} answered without the page of the observatory")
    return page

"""`warmroute top` against a real server that answers as a router's admin listener does, or does not."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from router.commands.main import main
from tests.support.observatory_page import empty, observatory

NOW_S = 1_800_000_000.0
TOKEN = "an-admin-token-of-tests"


@asynccontextmanager
async def serving(page: Any = None, *, status: int = 200, text: str | None = None) -> AsyncIterator[str]:
    """The URL of somebody who answers `/admin/observatory` so, to whoever has the token."""

    async def answer(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.Response(status=401)
        return web.Response(status=status, text=text) if text is not None else web.json_response(page, status=status)

    app = web.Application()
    app.router.add_get("/admin/observatory", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def top(*arguments: str) -> tuple[int, str, str]:
    """The command, as people run it, with its output to a file: exit status, output, errors."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", "top", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={"COLUMNS": "160", "PATH": ""},
    )  # fmt: skip
    try:
        out, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    return process.returncode, out.decode(), errors.decode()


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    """A file with the token, and a newline as editors leave it."""
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    return str(file)


async def test_one_page(token_file: str) -> None:
    """Where there is no terminal one page is printed: figures, reasons, advice, replicas, prefixes."""
    page = observatory(NOW_S)
    async with serving(page) as url:
        status, out, errors = await top("--url", url, "--token-file", token_file)
    assert (status, errors) == (0, "")
    points = page["timeline"]["points"]
    hit, prompt = (sum(point[name] for point in points) for name in ("hit_tokens", "prompt_tokens"))
    assert f"hit rate {100 * hit / prompt:.1f} %" in out
    for words in ("p50 187 ms", "diversity 0.91", "diverged", "replica lost", page["advice"][0]["text"], "prod/vllm-3",
                  "not ready", "connection refused", "You are a coding agent", "nobody"):  # fmt: skip
        assert words in out, words
    assert "unsupported" not in out, "a reason that nothing has"
    assert "\x1b" not in out, "colours are for terminals"


async def test_a_router_that_has_just_begun(token_file: str) -> None:
    """Nothing known is shown as such."""
    async with serving(empty(NOW_S)) as url:
        status, out, _ = await top("--url", url, "--token-file", token_file, "--once")
    assert status == 0
    assert "hit rate - (genuine -, replay -)" in out


async def test_clients_words_stay_words(token_file: str) -> None:
    """A label moves no cursor and is no markup."""
    hostile = "\x1b[2J\x1b]0;owned\x07 [bold red]not red[/bold red] [/nothing] \x9b31m \u202e"
    async with serving(observatory(NOW_S, label=hostile)) as url:
        status, out, _ = await top("--url", url, "--token-file", token_file, "--once")
    assert status == 0
    assert "[bold red]not red[/bold red] [/nothing]" in out
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(out)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"status": 404, "text": "not found"}, "has no observatory"),
        ({"text": "<html>"}, "no JSON"),
        ({"page": {"hello": 1}}, "something else"),
        ({"page": []}, "something else"),
        ({"status": 503, "text": ""}, "answered 503"),
    ],
)
async def test_wrong_pages(token_file: str, answer: dict[str, Any], said: str) -> None:
    """What is no observatory's page is named as what it is, on one line, with exit status 1."""
    async with serving(**answer) as url:
        status, out, errors = await top("--url", url, "--token-file", token_file)
    assert (status, out) == (1, "")
    assert said in errors
    assert len(errors.splitlines()) == 1


async def test_nobody_there_and_no_token(tmp_path: Path) -> None:
    """A refused connection, a missing token, a missing file and a URL that is none: each says what to do."""
    async with serving(observatory(NOW_S)) as url:
        status, _, errors = await top("--url", url)
        assert (status, "--token-file" in errors) == (1, True)
    for arguments, said in (
        (["--url", url], "cannot reach"),
        (["--url", "nonsense"], "is no URL"),
        (["--token-file", str(tmp_path / "none")], "No such file"),
    ):
        status, _, errors = await top(*arguments)
        assert (status, said in errors) == (1, True), errors
        assert len(errors.splitlines()) == 1


async def test_on_a_terminal(token_file: str) -> None:
    """It looks again and again, says when the router is gone and keeps the last figures, and ends with Ctrl-C."""
    screen, terminal = pty.openpty()
    seen: list[str] = []
    loop, news = asyncio.get_running_loop(), asyncio.Event()

    def read() -> None:
        seen.append(os.read(screen, 1 << 16).decode(errors="replace"))
        news.set()

    async def until(words: str) -> None:
        while words not in "".join(seen):
            news.clear()
            await news.wait()

    loop.add_reader(screen, read)
    try:
        async with serving(observatory(NOW_S)) as url:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "router", "top", "--url", url, "--token-file", token_file, "--interval-s", "0.2",
                stdin=terminal, stdout=terminal, stderr=terminal,
                env={"COLUMNS": "120", "LINES": "60", "PATH": "", "TERM": "xterm-256color"},
                preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # ignored in the background
            )  # fmt: skip
            await until("You are a coding agent")
        await until("cannot reach")
        seen[:] = ["".join(seen).partition("cannot reach")[2]]
        await until("You are a coding agent")
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0
        assert "Traceback" not in "".join(seen)
    finally:
        if process.returncode is None:
            process.kill()
        loop.remove_reader(screen)
        os.close(screen)
        os.close(terminal)


def test_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the extra is not installed, it says what to install."""
    monkeypatch.delitem(sys.modules, "router.commands.top", raising=False)
    for name in [name for name in sys.modules if name == "rich" or name.startswith("rich.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["top"]) == 2
    said = capsys.readouterr().err
    assert "top needs 'rich" in said
    assert "pip install '.[demo]'" in said

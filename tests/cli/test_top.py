"""`warmroute top` against a real server that answers as a router's admin listener does, or does not."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import itertools
import os
import pty
import signal
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from router.cli.main import main
from router.cli.top import plain
from router.cli.top.screen import TEMPLATES_MAX, Grid, screen
from router.cli.top.terminal import render
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


@pytest.mark.promise(
    "Text from clients runs nothing on the dashboard and moves no cursor in `warmroute top`.", "records"
)
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
        ({"text": "<html>"}, "did not answer with JSON"),
        ({"page": {"hello": 1}}, "answered without the page"),
        ({"page": []}, "answered without the page"),
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
        (["--url", "nonsense"], "is not a URL"),
        (["--token-file", str(tmp_path / "none")], "No such file"),
    ):
        status, _, errors = await top(*arguments)
        assert (status, said in errors) == (1, True), errors
        assert len(errors.splitlines()) == 1


@pytest.mark.parametrize("ends", ["q", "Ctrl-C"])
async def test_on_a_terminal(token_file: str, ends: str) -> None:
    """It looks again and again, says when the router is gone and keeps the last figures, and ends with q or Ctrl-C."""
    keyboard, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)[3]
    seen: list[str] = []
    loop, news = asyncio.get_running_loop(), asyncio.Event()

    def read() -> None:
        seen.append(os.read(keyboard, 1 << 16).decode(errors="replace"))
        news.set()

    async def until(words: str) -> None:
        while words not in "".join(seen):
            news.clear()
            await news.wait()

    loop.add_reader(keyboard, read)
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
        await until("q quits")
        if ends == "q":
            os.write(keyboard, b"q")
        else:
            process.send_signal(signal.SIGINT)
        assert await process.wait() == 0
        assert termios.tcgetattr(terminal)[3] == before, "the terminal is as it was"
        assert "Traceback" not in "".join(seen)
    finally:
        if process.returncode is None:
            process.kill()
        loop.remove_reader(keyboard)
        os.close(keyboard)
        os.close(terminal)


@pytest.fixture
def without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the extra is not installed: rich is not found, and cannot be imported."""
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name == "rich" else find(name, *more))
    for name in [name for name in sys.modules if name == "rich" or name.startswith(("rich.", "router.cli.top"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)


@pytest.mark.usefixtures("without_rich")
async def test_one_page_without_rich(token_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the extra one page is shown as plain text, with nothing left out and numbers in columns."""
    page = observatory(NOW_S)
    async with serving(page) as url:
        assert await asyncio.to_thread(main, ["top", "--url", url, "--token-file", token_file, "--once"]) == 0
    out = capsys.readouterr().out
    for words in ("p50 187 ms", "diverged", page["advice"][0]["text"], "not ready: connection refused", "nobody"):
        assert words in out, words
    rows = [line for line in out.splitlines() if line.startswith("prod/vllm-")]
    (head,) = (line for line in out.splitlines() if line.startswith("Replica"))
    assert len(rows) == 4
    assert len({line.find(" ms", head.index("waiting")) for line in rows}) == 1


@pytest.mark.usefixtures("without_rich")
def test_a_live_page_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a terminal it says what to install, in a clone and beside a wheel, and what works without."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["top"]) == 2
    said = capsys.readouterr().err
    assert "top needs 'rich': pip install '.[top]' in a clone, or pip install rich" in said
    assert "--once" in said


def shown(page: Any, width: int, height: int, *, gone: str = "") -> list[str]:
    """The lines of a terminal of this size."""
    console = Console(width=width, height=height, record=True, file=io.StringIO())
    console.print(render(screen(page, height=height, foot="q quits", gone=gone), width=width))
    return console.export_text().splitlines()


@pytest.mark.parametrize("gone", ["", "cannot reach http://127.0.0.1:8001: connection refused; " + "is it " * 20])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (200, 60)])
def test_it_fits_on_a_screen(width: int, height: int, gone: str) -> None:
    """No line is folded and none is lost: the key that quits is on the last one, every table has rows, and the head of
    a table that is cut says so."""
    page = observatory(NOW_S)
    lines = shown(page, width, height, gone=gone)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert lines[-1].strip() == "q quits"
    heads = [n for n, line in enumerate(lines) if line.startswith(("Why computed", "#", "Replica", "Shared prefix"))]
    assert len(heads) == 4
    assert min(b - a for a, b in itertools.pairwise([*heads, len(lines) - 1])) >= 3, "two rows of each table"
    listed = min(TEMPLATES_MAX, len(page["map"]))
    assert any(line.startswith("Shared prefix ") and f"/{listed} " in line for line in lines) == (height < 40)
    assert not any("…" in line for line in lines[bool(gone) : 4]), "figures are whole"


def test_errors_are_told_of_each_replica() -> None:
    """The head counts what failed among the last requests, and each replica's row the attempts that failed there."""
    page = observatory(NOW_S)
    broken = {**page["decisions"][0], "status": 200, "ending": "failed", "replica": "http://10.0.0.1:8000"}
    tried = {**broken, "ending": "ok", "retries": [{"kind": "connect", "replica": "http://10.0.0.4:8000"}]}
    page["decisions"] = [broken, broken, tried, {**broken, "status": 404, "ending": "refused"}]
    text = plain.render(screen(page))
    assert "errors 2 of the last 4" in text
    (head,) = (line for line in text.splitlines() if line.startswith("Replica"))
    until = head.index("errors") + len("errors")
    errors = {line.split()[0]: line[:until].split()[-1] for line in text.splitlines() if "prod/vllm-" in line[:10]}
    assert errors["prod/vllm-0"] == "2"
    assert errors["prod/vllm-1"] == "0"
    assert text.index("prod/vllm-3") < text.index("prod/vllm-0"), "whoever takes no requests stands first"


def test_what_engines_told_is_apart_from_what_was_predicted() -> None:
    """The rate is of all tokens; what engines told, and what was predicted of the same tokens, stand beside it."""
    page = observatory(NOW_S)
    for point in page["timeline"]["points"]:
        point |= {"verified_tokens": 0, "verified_hit_tokens": 0, "verified_predicted_tokens": 0}
    assert "verified: no engine reported" in plain.render(screen(page))
    for point in page["timeline"]["points"]:
        point |= {"verified_tokens": point["prompt_tokens"] // 2}
        point |= {
            "verified_hit_tokens": point["prompt_tokens"] // 4,
            "verified_predicted_tokens": point["hit_tokens"] // 2,
        }
    page["totals"] |= {"counted_tokens": 1_000, "counted_hit_tokens": 700}
    text = plain.render(screen(page))
    assert "verified 50.0 %: actual 50.0 %, predicted" in text
    assert "engines count 70.0 %" in text


@pytest.mark.parametrize(("width", "minor"), [(80, False), (200, True)])
def test_each_replica_has_its_traffic(width: int, minor: bool) -> None:
    """Requests a second and times to first token at any width; a narrow terminal leaves out other columns, so that
    names stay readable."""
    page = observatory(NOW_S)
    page["replicas"][1] |= {"slow": "prefill takes 2.9 times as long as on its peers"}
    lines = shown(page, width, 60)
    (head,) = (line for line in lines if line.startswith("Replica"))
    assert ("share" in head and "ahead" in head) is minor
    rows = {line.split()[0]: line for line in lines if line.startswith("prod/vllm-")}
    assert set(rows) == {f"prod/vllm-{n}" for n in range(4)}
    end = head.index("p90") + len("p90")
    assert rows["prod/vllm-1"][:end].split()[-4:] == ["190", "ms", "920", "ms"]
    assert "3.2" in rows["prod/vllm-1"]
    assert ("ready: prefill takes 2.9 times" in rows["prod/vllm-1"]) is minor
    assert any("3 of 4 take requests" in line for line in lines)
    assert "no requests to prod/vllm-3 (connection refused)" in [line.rstrip() for line in lines]


def test_a_replica_with_a_flapping_cache_state_is_named() -> None:
    """Three falls in ten minutes stand beside "ready" with their reason; two do not."""
    page = observatory(NOW_S)
    page["replicas"][1] |= {"grade_falls": 3, "grade_why": "gap: 1 batch is missing"}
    assert "ready: cache state fell 3 times: gap: 1 batch is missing" in plain.render(screen(page))
    page["replicas"][1]["grade_falls"] = 2
    assert "cache state fell" not in plain.render(screen(page))


def test_routers_that_share_nothing_are_named() -> None:
    """The reason is in the head, and only while the condition holds."""
    why = "other senders account for 40% of the replicas' prompt tokens"
    page = observatory(NOW_S)
    page["router"] = {"name": "a:1", "peers": [], "unshared": ""}
    assert "share no state" not in plain.render(screen(page))
    page["router"]["unshared"] = why
    assert f"routers share no state: {why}" in plain.render(screen(page))


def test_tenants_with_open_requests_are_listed() -> None:
    """Those with the most requests in flight first, a few of them. A router without names of tenants has no table."""
    page = observatory(NOW_S)
    lines = plain.render(screen(page)).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("Tenant"))
    assert lines[at].split("  ")[0] == "Tenant"
    assert [line.split() for line in lines[at + 1 : at + 3]] == [
        ["bank", "34", "3", "3.6", "37.4", "%", "45.0", "%"],
        ["acme", "21", "0", "6.1", "62.6", "%", "55.0", "%"],
    ]
    (row, _) = page["tenants"]
    page["tenants"] = [{**row, "tenant": f"t{number}", "in_flight": number} for number in range(20)]
    text = plain.render(screen(page))
    assert [name in text for name in ("t19 ", "t15 ", "t14 ")] == [True, True, False]
    page["tenants"] = [{**row, "tenant": "none"}]
    assert "Tenant" not in plain.render(screen(page))


def test_advice_names_tenants_and_its_last_case() -> None:
    """A row without a case in the last minute says so, and is grey; times to first token name their window."""
    page = observatory(NOW_S)
    page["advice"][1] |= {"recent": False, "tenants": ["bank", "acme"]}
    page["advice"][2] |= {"tenants": [f"t{number}" for number in range(20)]}
    parts = screen(page)
    text = plain.render(parts)
    assert "tenants: bank, acme; no case in the last minute)" in text
    assert "tenants: t0, t1, t2 and 17 more)" in text
    assert text.count("no case in the last minute") == 1
    (advice,) = (part for part in parts if isinstance(part, Grid) and part.columns[0].name == "#")
    assert [{cell.style for cell in row} for row in advice.rows] == [{""}, {"bright_black"}, {""}]
    assert "TTFT of 10 min" in text
    assert "TTFT 2 min p50" in text

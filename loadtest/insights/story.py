"""`python -m loadtest story`: a fall of the hit rate, and the search for the line of the prompt that caused it.

Simulated replicas, a router, and agents at work (agents.py). After a while a release of one of them puts the time of
day at the top of its system prompt: nothing fails, but every prompt is computed from its beginning. The router's advice
on this is printed. With `--mend` the next release moves the time to the end of the newest message.

A row of the result covers the requests that were sent in the last two thirds of its phase: the first third still finds
the caches of the phase before. Hits are the replicas' counts in their answers; times are simulated seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvloop
from rich.console import Console

from loadtest.common import flags
from loadtest.common.client import Answer, Client, ReplayError, open_unlimited_session
from loadtest.common.processes import ProcessError, engines, router, run_until_signal
from loadtest.common.report import Row, percentile, print_report, quantiles, write_json
from loadtest.fake_engine.calibration import CALIBRATION
from loadtest.insights.agents import Conversation, ReleaseClock

MODEL = "qwen3-32b"
PHASE_S_MAX = 55.0  # three of them stay under three minutes
THINK_S = (0.5, 3.0)
SETTLING = 1 / 3  # the first part of a phase, which is not judged
TIMEOUT_S = 120.0
BAR_CELLS = 30
PICTURE = (1280, 800)  # pixels; its height ends above the table of replicas
SETTLED_S = 4.0  # the page polls every two seconds
END_OF_MAP = "return Math.ceil(document.querySelector('#map').closest('section').getBoundingClientRect().bottom) + 16"
PHASES = {"before": ReleaseClock.NOWHERE, "broken": ReleaseClock.TOP, "fixed": ReleaseClock.END}


@dataclass(frozen=True, slots=True, kw_only=True)
class StorySettings:
    """Settings of a run. Seconds are simulated ones."""

    replicas: int = 4
    sessions: int = 24
    """Concurrent conversations; one that ends is followed by another."""
    phase_s: float = 50.0
    point_s: float = 10.0
    """Width of a point of the timeline."""
    requests_max: int = 5_000
    time_scale: float = 1.0
    kv_tokens: int = 307_328
    answer_tokens: int = 40
    mend: bool = False
    seed: int = 1


@dataclass(frozen=True, slots=True)
class StoryRequest:
    """One request and its answer; times are since the beginning."""

    phase: str
    sent_s: float
    ended_s: float
    answer: Answer
    replay: bool
    """True if the same prompt, byte for byte, was sent earlier."""


class Story:
    """One run against one router."""

    def __init__(self, settings: StorySettings, console: Console) -> None:
        self.sent: list[StoryRequest] = []
        self._settings = settings
        self._console = console
        self._phase = "before"
        self._began = time.perf_counter()
        self._budget = settings.requests_max
        self._prompts: set[bytes] = set()

    async def run(self, session: aiohttp.ClientSession, url: str) -> None:
        """Run all phases, one after the other, and print their timeline."""
        settings = self._settings
        wall_s = TIMEOUT_S / settings.time_scale
        client = Client(session, url, model=MODEL, endpoint="chat", timeout_wall_s=wall_s)
        async with asyncio.TaskGroup() as tasks:
            agents = [tasks.create_task(self._agent(client, number)) for number in range(settings.sessions)]
            for phase in self.phases():
                self._phase = phase
                await self._points(phase)
            for agent in agents:
                agent.cancel()

    def phases(self) -> list[str]:
        """Return the names of the phases, in order."""
        return [phase for phase in PHASES if phase != "fixed" or self._settings.mend]

    def rows(self) -> list[Row]:
        """Return one row for each phase."""
        return [self._row(number, phase) for number, phase in enumerate(self.phases())]

    async def _points(self, phase: str) -> None:
        settings = self._settings
        ends_s = self._now_s() + settings.phase_s
        while (left_s := ends_s - self._now_s()) > 0:
            begin_s = self._now_s()
            await asyncio.sleep(min(settings.point_s, left_s) / settings.time_scale)
            ended = [each for each in self.sent if each.ended_s >= begin_s]
            self._console.print(
                _point(phase, self._now_s(), ended, settings.time_scale), highlight=False, soft_wrap=True
            )

    def _now_s(self) -> float:
        return (time.perf_counter() - self._began) * self._settings.time_scale

    async def _agent(self, client: Client, number: int) -> None:
        """Run conversations one after the other, until the run is over or its requests are used up."""
        settings = self._settings
        rng = random.Random(settings.seed * 1_000 + number)
        while True:
            conversation = Conversation.start_random(rng, MODEL, settings.answer_tokens)
            for _ in range(conversation.turns()):
                await asyncio.sleep(rng.uniform(*THINK_S) / settings.time_scale)
                if self._budget <= 0:
                    return
                self._budget -= 1
                await self._send(client, conversation)

    async def _send(self, client: Client, conversation: Conversation) -> None:
        phase, sent_s = self._phase, self._now_s()
        body, step = conversation.next_body(PHASES[phase])
        replay = body in self._prompts
        self._prompts.add(body)
        headers = {"Content-Type": "application/json", "x-warmroute-step": step}
        answer = await client.send(body, time.perf_counter(), headers)
        self.sent.append(StoryRequest(phase, sent_s, self._now_s(), answer, replay))

    def _row(self, number: int, phase: str) -> Row:
        settings = self._settings
        from_s = (number + SETTLING) * settings.phase_s
        sent = [each for each in self.sent if each.phase == phase and each.sent_s >= from_s]
        answers = [each.answer for each in sent]
        hit, replayed = _rate(sent), _rate(sent, replays_only=True)
        ttfts = [TIMEOUT_S if a.ttft_s is None else a.ttft_s * settings.time_scale for a in answers]
        return Row(
            workload=phase,
            policy="warm",
            router="warmroute",
            replicas=settings.replicas,
            load=settings.sessions,
            load_unit="sessions",
            seed=settings.seed,
            requests=len(sent),
            errors=sum(bool(a.failure) and not a.rejected for a in answers),
            rejected=sum(a.rejected for a in answers),
            **quantiles("ttft", ttfts),
            token_hit_rate=hit,
            genuine_hit_rate=None if hit is None or replayed is None else hit - replayed,
            replay_hit_rate=replayed,
            hit_rate_source="usage",
        )


def _rate(sent: Sequence[StoryRequest], *, replays_only: bool = False) -> float | None:
    """Return the share of prompt tokens that were found cached; None without requests."""
    tokens = sum(each.answer.prompt_tokens for each in sent)
    found = sum(each.answer.cached_tokens or 0 for each in sent if each.replay or not replays_only)
    return found / tokens if tokens else None


def _point(phase: str, at_s: float, sent: Sequence[StoryRequest], time_scale: float) -> str:
    """Return a line of the timeline."""
    rate = _rate(sent)
    ttfts = [each.answer.ttft_s * time_scale for each in sent if each.answer.ttft_s is not None]
    bar = "█" * round(BAR_CELLS * (rate or 0.0))
    shown = "     -" if rate is None else f"{100 * rate:4.1f} %"
    return f"{at_s:5.0f} s  {phase}  {bar:·<{BAR_CELLS}} {shown}  TTFT p50 {_s(ttfts, 50)}  p90 {_s(ttfts, 90)}"


def _s(values: Sequence[float], percent: float) -> str:
    value = percentile(values, percent)
    return "-" if value is None else f"{value:.2f} s"


# Advice of the router


async def fetch_advice(session: aiohttp.ClientSession, admin_url: str) -> list[dict[str, Any]]:
    """Return the router's advice, the highest cost first. Raises ReplayError."""
    async with session.get(f"{admin_url}/admin/advice") as response:
        if response.status != 200:
            raise ReplayError(f"{admin_url}/admin/advice answered {response.status}")
        rows: list[dict[str, Any]] = msgspec.json.decode(await response.read())["advice"]
        return rows


def found_it(advice: Sequence[dict[str, Any]]) -> bool:
    """Return True if the first piece of advice names the change of the release."""
    return bool(advice) and (advice[0]["change"], advice[0]["message"]) == ("timestamp", 0)


def print_advice(console: Console, advice: Sequence[dict[str, Any]]) -> None:
    """Print the first row in a readable form."""
    if not advice:
        console.print("\nThe router has no advice.")
        return
    row = advice[0]
    gpu = "" if row["gpu_s_per_h"] is None else f", {row['gpu_s_per_h']:,.0f} GPU-seconds an hour"
    lines = [f"Advice 1 of {len(advice)}, which costs {row['cost']}{gpu}:", f"  {row['text']}"]
    lines += [f"  template {row['template']}: {row['label']}"] if row["template"] else []
    lines += [f"  {row['path']}, byte {row['at_bytes']}"] if row["path"] else []
    lines += [f"  {name}: {row[name]}" for name in ("before", "after") if row[name]]
    console.print("\n" + "\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def browser() -> Any:  # noqa: ANN401 - Selenium is needed for pictures only
    """Return a chromium that can be controlled. Raises ReplayError if it is missing."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    try:
        from selenium import webdriver
        from selenium.common.exceptions import WebDriverException
        from selenium.webdriver.chrome.service import Service
    except ImportError as error:
        raise ReplayError("a screenshot needs Selenium: pip install '.[browser]'") from error
    if chromium is None or driver is None:  # Selenium would look for them on the net
        raise ReplayError("a screenshot needs chromium and chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    try:
        return webdriver.Chrome(options=options, service=Service(driver))
    except WebDriverException as error:
        raise ReplayError(f"chromium did not start: {error.msg}") from error


def picture(driver: Any, url: str, file: Path) -> None:  # noqa: ANN401 - see `browser`
    """Save a picture of the current page."""
    width, height = PICTURE
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.get(url)
    time.sleep(SETTLED_S)
    size["height"] = driver.execute_script(END_OF_MAP)
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    time.sleep(SETTLED_S)
    driver.save_screenshot(str(file))


# The command


async def story(options: argparse.Namespace, command: str, driver: Any = None) -> int:  # noqa: ANN401 - see `browser`
    """Run all of it, and print its timeline, the advice, and the table; `driver` takes a picture."""
    console, settings = Console(), _settings(options)
    async with (
        run_cluster(settings, options.port, options.admin_port) as (url, admin_url),
        open_unlimited_session() as session,
    ):
        page = f"{admin_url}/dashboard"
        console.print(f"dashboard: {page}", highlight=False, soft_wrap=True)
        told = Story(settings, console)
        await told.run(session, url)
        advice, rows = await fetch_advice(session, admin_url), told.rows()
        print_advice(console, advice)
        print_report(console, rows)
        if options.json:
            write_json(options.json, command, rows)
        if driver is not None:
            await asyncio.to_thread(picture, driver, page, options.screenshot)
        if options.keep:
            console.print(f"\n{page} remains available until Ctrl-C.", highlight=False, soft_wrap=True)
            await asyncio.get_running_loop().create_future()
    return 1 if any(row.errors for row in rows) or not found_it(advice) else 0


@asynccontextmanager
async def run_cluster(settings: StorySettings, port: int, admin_port: int) -> AsyncIterator[tuple[str, str]]:
    """Run replicas and a router that may quote prompts; yields its URL and its admin URL."""
    async with (
        engines(settings.replicas, MODEL, CALIBRATION, settings.kv_tokens, settings.time_scale) as urls,
        router(urls, policy="warm", port=port, admin_port=admin_port, settings=("insights.excerpts=true",)) as both,
    ):
        yield both


async def _run_story(options: argparse.Namespace, command: str) -> int:
    """Run all of it, with a browser if a picture is requested. With `keep`, an end by a signal counts as success."""
    driver = browser() if options.screenshot else None
    try:
        status = await run_until_signal(story(options, command, driver))
        return 0 if options.keep and status > 128 else status
    finally:
        if driver is not None:
            driver.quit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 if all requests were answered and the first advice names the time at the top."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    try:
        return uvloop.run(_run_story(options, " ".join(["story", *arguments])))
    except (ProcessError, ReplayError, OSError) as error:
        print(f"story: {error}", file=sys.stderr)
        return 2


def _settings(options: argparse.Namespace) -> StorySettings:
    names = ("replicas", "sessions", "phase_s", "requests_max", "time_scale", "kv_tokens", "mend", "seed")
    return StorySettings(**{name: getattr(options, name) for name in names})


def _parser() -> argparse.ArgumentParser:
    defaults = StorySettings()
    parser = argparse.ArgumentParser(
        prog="python -m loadtest story",
        description="Agents on simulated replicas; "
        "a release of one agent adds the time to the beginning of its system prompt.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--replicas", type=flags.integer(1, 64), default=defaults.replicas)
    add("--sessions", type=flags.integer(1, 1_000), default=defaults.sessions, help="concurrent conversations")
    phase_help = f"simulated seconds of each phase; at most {PHASE_S_MAX:g}"
    add("--phase-s", type=flags.positive(PHASE_S_MAX), default=defaults.phase_s, help=phase_help)
    add(
        "--requests-max",
        type=flags.integer(1, 1 << 20),
        default=defaults.requests_max,
        help="maximum number of requests in all phases together",
    )
    add(
        "--kv-tokens",
        type=flags.integer(1, 1 << 30),
        default=defaults.kv_tokens,
        help="tokens of a replica's KV cache",
    )
    add("--time-scale", type=flags.positive(), default=defaults.time_scale, help="simulated seconds per wall second")
    add("--seed", type=int, default=defaults.seed)
    add("--mend", action="store_true", help="add a third phase with the time at the end of the prompt")
    add("--keep", action="store_true", help="keep router and replicas running after the last phase")
    add("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    add("--screenshot", type=Path, metavar="FILE", help="write a screenshot of the dashboard (PNG, by chromium)")
    add("--port", type=int, default=0, help="port of the router; 0: a free port")
    add("--admin-port", type=int, default=0, help="port of the admin listener; 0: a free port")
    return parser

"""The file of the history: what is in it after a restart, and how the router does without it."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.admin.history import file as files
from router.admin.history import writer as keeping
from router.admin.history.file import APPLICATION_ID, DAY_S
from router.admin.history.query_filters import DecisionFilter
from router.admin.history.request_history import RouterHistory
from tests.admin.history.records import BYTES_MAX, HISTORY, Clock, kept_in, record, until

ALL = DecisionFilter()
NOT_KEPT, AGAIN = "the history cannot be written", "the history is written again"


async def ids(history: RouterHistory, wanted: DecisionFilter = ALL, limit: int = 500) -> list[str]:
    """Ids of the decisions found, newest first."""
    found = await history.find(wanted, limit=limit)
    return [msgspec.json.decode(row)["id"] for row in found.rows]


def told(caplog: pytest.LogCaptureFixture, words: str) -> list[dict[str, Any]]:
    """Fields of the log's lines that begin with these words."""
    return [each.fields for each in caplog.records if each.getMessage().startswith(words)]  # type: ignore[attr-defined]


def observed(history: RouterHistory, clock: Clock, count: int, first: int = 0) -> list[str]:
    """So many requests end, a tenth of a second apart. Returns their ids, newest first."""
    for n in range(first, first + count):
        clock.now_s += 0.1
        history.observe(record(n, at_s=clock.now_s))
    return [f"id-{n}" for n in reversed(range(first, first + count))]


async def test_decisions_outlive_the_process(tmp_path: Path) -> None:
    """Every decision is found once, newest first, by whatever process: what is in memory, what is in the file, and
    what is in both."""
    clock = Clock()
    one = kept_in(tmp_path / HISTORY, clock)
    first = observed(one, clock, 50)
    assert await ids(one) == first
    await one.close()
    two = kept_in(tmp_path / HISTORY, clock)
    assert await ids(two) == first
    second = observed(two, clock, 20, 50)
    assert await ids(two) == second + first
    assert await ids(two, DecisionFilter(ids=("id-3",))) == ["id-3"]
    pages, before = list[str](), 1 << 60
    while True:
        found = await two.find(ALL, limit=7, before=before)
        pages += [msgspec.json.decode(row)["id"] for row in found.rows]
        if found.next_before is None:
            break
        before = found.next_before
    assert pages == second + first
    await two.close()


async def test_intervals_outlive_the_process(tmp_path: Path) -> None:
    """What requests added up to is the same before and after a restart, in steps of five seconds and of a minute, and
    a time in which nobody counted is not told as one without requests."""
    clock = Clock(2_000_040.0)  # a full minute
    one = kept_in(tmp_path / HISTORY, clock)
    for n in range(600):
        clock.now_s += 0.5
        one.observe(record(n))
        one.tick()
    before = {step_s: await _counted(one, 1_999_980, 2_000_400, step_s) for step_s in (5, 60)}
    assert sum(before[5].values()) == sum(before[60].values()) == 600
    await one.close()
    clock.now_s += 600
    two = kept_in(tmp_path / HISTORY, clock)
    await until(lambda: two.status().intervals_since_s is not None)  # type: ignore[union-attr]
    for step_s, counted in before.items():
        assert await _counted(two, 1_999_980, 2_000_400, step_s) == counted
    later = await _counted(two, 2_000_040, 2_001_000, 60)
    assert 2_000_640 not in later
    assert sum(later.values()) == 600
    await two.close()


async def _counted(history: RouterHistory, from_s: int, to_s: int, step_s: int) -> dict[int, float]:
    steps = await history.downsample(from_s, to_s, step_s)
    return {at_s: sums["requests"] for at_s, sums in steps.items() if "requests" in sums}


async def test_the_file_is_bounded_in_bytes_and_days(tmp_path: Path) -> None:
    """The file with its journal never takes more than the limit; the oldest decisions go first, those beyond the days
    in any case, and the newest are there."""
    clock, path, count = Clock(), tmp_path / HISTORY, 9_000
    bytes_max = 4 << 20  # less than a setting allows, so that the test is short
    history = kept_in(path, clock, bytes_max=bytes_max)
    keeper = history._keeper
    assert keeper is not None
    for n in range(0, count, 300):
        observed(history, clock, 300, n)
        while keeper.status.written < n + 300:
            assert _disk_bytes(tmp_path) <= bytes_max
            await asyncio.sleep(0.005)
    assert keeper.status.bytes > bytes_max / 2
    assert await ids(history) == [f"id-{n}" for n in reversed(range(count - 500, count))]
    assert await ids(history, DecisionFilter(ids=("id-0",))) == []
    assert history.count_dropped() == 0
    await history.close()
    clock.now_s += 15 * DAY_S
    later = kept_in(path, clock, bytes_max=bytes_max)
    await until(lambda: later.retention()["bytes"])
    assert await ids(later) == []
    await later.close()


def _disk_bytes(folder: Path) -> int:
    total = 0
    for each in folder.iterdir():
        with suppress(FileNotFoundError):  # the journal is removed at the end of each transaction
            total += each.stat().st_size
    return total


@pytest.fixture
def caplog_all(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The log, from information on."""
    caplog.set_level(logging.INFO)
    return caplog


async def test_a_locked_file_is_waited_for(tmp_path: Path, caplog_all: pytest.LogCaptureFixture) -> None:
    """A second router that is given the path of a running one says so once, serves from memory, and takes over with all
    that it has seen when the first one ends."""
    clock = Clock()
    one = kept_in(tmp_path / HISTORY, clock)
    first = observed(one, clock, 5)
    await until(lambda: one.status().written == 5)  # type: ignore[union-attr]
    two = kept_in(tmp_path / HISTORY, clock)
    await until(lambda: two.status().failing)  # type: ignore[union-attr]
    second = observed(two, clock, 30, 5)
    found = await two.find(ALL, limit=500)
    assert len(found.rows) == 8  # as many as memory holds
    assert found.why_not_all == two.retention()["why"] == "another process has it open"
    await one.close()
    await until(lambda: not two.status().failing)  # type: ignore[union-attr]
    assert await ids(two) == second + first
    await two.close()
    assert [each["why"] for each in told(caplog_all, NOT_KEPT)] == ["another process has it open"]
    assert len(told(caplog_all, AGAIN)) == 1


@pytest.mark.parametrize("kind", ["folder", "foreign", "foreign database", "no folder", "other layout"])
async def test_what_is_not_ours_is_left_alone(tmp_path: Path, caplog_all: pytest.LogCaptureFixture, kind: str) -> None:
    """Something else at the path is never written to nor moved. The log says so once, and when it is gone the history
    is kept from what had waited."""
    path, clock = tmp_path / "in" / HISTORY, Clock()
    if kind != "no folder":
        path.parent.mkdir()
    if kind == "folder":
        path.mkdir()
    elif kind == "foreign":
        path.write_text("tenants: []\n" * 100, encoding="utf-8")
    elif kind == "foreign database":
        _database(path, "CREATE TABLE decisions (mine)")
    elif kind == "other layout":
        _database(path, f"PRAGMA application_id={APPLICATION_ID}; PRAGMA user_version=9")
    was = path.read_bytes() if path.is_file() else b""
    history = kept_in(path, clock)
    await until(lambda: history.status().failing)  # type: ignore[union-attr]
    seen = observed(history, clock, 20)
    assert await ids(history) == seen[:8]
    assert (path.read_bytes() if path.is_file() else b"") == was
    if kind == "no folder":
        path.parent.mkdir()
    else:
        path.rename(tmp_path / "moved")
    await until(lambda: not history.status().failing)  # type: ignore[union-attr]
    await until(lambda: history.status().written == 20)  # type: ignore[union-attr]
    assert await ids(history) == seen
    await history.close()
    assert len(told(caplog_all, NOT_KEPT)) == len(told(caplog_all, AGAIN)) == 1


def _database(path: Path, statements: str) -> None:
    with sqlite3.connect(path) as database:
        database.executescript(statements)
    database.close()


async def test_a_damaged_file_is_set_aside(tmp_path: Path, caplog_all: pytest.LogCaptureFixture) -> None:
    """A history whose pages are rubbish is moved away and told; a new one takes what comes."""
    path, clock = tmp_path / HISTORY, Clock()
    one = kept_in(path, clock)
    observed(one, clock, 500)
    await one.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:4_096] + b"\xff" * (len(whole) - 4_096))
    two = kept_in(path, clock)
    await until(lambda: told(caplog_all, "the history file was damaged"))
    seen = observed(two, clock, 20, 500)
    await until(lambda: two.status().written >= 20)  # type: ignore[union-attr]
    assert await ids(two) == seen
    await two.close()
    assert (tmp_path / f"{HISTORY}.damaged").exists()


async def test_a_full_disk_is_waited_for(
    tmp_path: Path, caplog_all: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite's own error of a full disk, which a limit of pages brings about: told once, nothing that was kept is lost,
    what cannot be kept is counted when too much waits, and writing goes on when there is room."""
    monkeypatch.setattr(files.HistoryFile, "forget", lambda *_: None)  # nothing makes room
    monkeypatch.setattr(keeping, "QUEUE_DECISIONS_MAX", 64)
    clock, path = Clock(), tmp_path / HISTORY
    history = kept_in(path, clock, bytes_max=200 << 10)
    history._keeper._decisions = keeping.deque(maxlen=64)  # type: ignore[union-attr]
    n = 0
    while not history.status().failing:  # type: ignore[union-attr]
        observed(history, clock, 10, n)
        n += 10
        await until(lambda: not history._keeper._decisions or history.status().failing)  # type: ignore[union-attr]
    assert history.retention()["why"] == "the disk is full"
    observed(history, clock, 500, n)
    # The thread may try again meanwhile and take a batch out of the queue, of which nothing is lost either.
    assert history.count_dropped() >= 500 - 64 - keeping.BATCH_DECISIONS
    history._keeper._bytes_max = BYTES_MAX  # type: ignore[union-attr]
    await until(lambda: not history.status().failing)  # type: ignore[union-attr]
    await until(lambda: not history._keeper._decisions)  # type: ignore[union-attr]
    found = await ids(history)
    assert found[0] == f"id-{n + 499}"
    assert await ids(history, DecisionFilter(ids=("id-0",))) == ["id-0"]
    await history.close()
    assert [each["why"] for each in told(caplog_all, NOT_KEPT)] == ["the disk is full"]
    (again,) = told(caplog_all, AGAIN)
    assert again["dropped"] == history.count_dropped()


async def test_an_interval_that_cannot_be_kept_is_lost_alone(tmp_path: Path) -> None:
    """A sum that no file can hold does not end the history: what comes later is kept."""
    clock = Clock()
    history = kept_in(tmp_path / HISTORY, clock)
    keeper = history._keeper
    assert keeper is not None
    keeper.take_interval(1, {"completion_tokens": 10**30})
    await until(lambda: keeper.status.failing)
    observed(history, clock, 3)
    clock.now_s += 10
    history.tick()
    await until(lambda: keeper.status.written == 3 and keeper.status.intervals_since_s is not None)
    assert not keeper.status.failing
    await history.close()


async def test_decisions_are_written_between_searches(tmp_path: Path) -> None:
    """Searches that wait for one another do not keep decisions waiting, and are all answered, at the end too."""
    clock = Clock()
    history = kept_in(tmp_path / HISTORY, clock)
    keeper = history._keeper
    assert keeper is not None
    written = list[int]()

    def search(_: object) -> None:
        written.append(keeper.status.written)
        history.observe(record(len(written), at_s=clock.now_s))

    await asyncio.gather(*(keeper.search(search) for _ in range(keeping.SEARCHES_MAX)))
    assert written == list(range(keeping.SEARCHES_MAX))
    await history.close()

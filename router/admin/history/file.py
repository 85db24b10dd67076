"""File of past decisions and intervals: SQLite, in one table to search and one to read from, bounded in bytes.

Theory. Decisions are searched in narrow rows, which can be read without an index a thousand times a second; only ids
have an index. The content that a page shows of a decision is a compressed text in a second table. Intervals are kept
twice, as they were and added up by the minute, so that weeks are read from few rows. Deletions free pages, and new rows
use these pages again, so that the file keeps its size once it is full. `max_page_count` limits the size even if that
fails.

The journal is written ahead (WAL), and only this process uses the file (`locking_mode=EXCLUSIVE`). A second router with
the same path gets an error that it is locked, and network file systems need no shared memory. Commits are not synced
(`synchronous=NORMAL`): a power failure may lose the last ones, and does no other harm.

Every method may be called in one thread only, the one that opened the file, and raises sqlite3.Error.
"""

from __future__ import annotations

import os
import sqlite3
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from router.admin.history.former_values import with_current_names, with_current_row
from router.admin.history.intervals import STEP_S, Sums, merge
from router.admin.history.query_filters import DecisionFilter

# "wrmh", in the file's header: a file of another program is neither written to nor moved away
APPLICATION_ID = 0x77726D68
LAYOUT = 1  # `user_version`; a file of another layout is not touched
PAGE_BYTES = 4_096
PAGES_PART = 0.8  # part of the limit in bytes that the file may take; the rest is for its journal
JOURNAL_PAGES = 64, 1_024  # fewest and most pages in the journal before they are written into the file
FULL_PART = 0.9  # part of the pages above which the oldest rows are deleted
DELETED_AT_ONCE = 500  # rows deleted in one transaction
COARSE_S = 60  # longer intervals, kept for the same time as decisions
FINE_DAYS = 1  # days that intervals of STEP_S are kept
READ_S = 2.0  # longest time that a search may take
LOCKED_S = 0.2  # wait for another process's lock
DAY_S = 86_400

Read = tuple[int, bytes]  # number of a decision, and its row as JSON

_TABLES = """
CREATE TABLE IF NOT EXISTS decisions (
    number INTEGER PRIMARY KEY, at_s REAL, id TEXT, session TEXT, conversation TEXT, model TEXT, tenant TEXT,
    replica TEXT, status INTEGER, reason TEXT, misses TEXT
);
CREATE INDEX IF NOT EXISTS decisions_by_id ON decisions (id);
CREATE TABLE IF NOT EXISTS texts (number INTEGER PRIMARY KEY, json BLOB);
CREATE TABLE IF NOT EXISTS intervals (
    step_s INTEGER, at_s INTEGER, run INTEGER, sums BLOB, PRIMARY KEY (step_s, at_s, run)
) WITHOUT ROWID;
"""


class ForeignDatabase(Exception):
    """Raised for a file of another program or of another layout at the path. The file is not changed."""


class HistoryFile:
    """An open file. Its construction raises ForeignDatabase, OSError and sqlite3.Error."""

    def __init__(self, path: str, *, bytes_max: int, run: int) -> None:
        """`run` is the unique number of this run of the router. It distinguishes this run's intervals from those of
        other runs."""
        self._path, self._run = path, run
        self._pages_max = int(bytes_max * PAGES_PART) // PAGE_BYTES
        _check(path)
        # the requests of clients must not be readable for every user
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._db = sqlite3.connect(path, timeout=LOCKED_S, isolation_level=None)
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        run, journal_pages = self._db.execute, min(max(self._pages_max // 20, JOURNAL_PAGES[0]), JOURNAL_PAGES[1])
        # the application id comes before the journal: it is the first thing written into the file itself
        for pragma in (
            f"page_size={PAGE_BYTES}", "auto_vacuum=INCREMENTAL", "locking_mode=EXCLUSIVE",
            f"application_id={APPLICATION_ID}", "journal_mode=WAL", "synchronous=NORMAL",
            f"wal_autocheckpoint={journal_pages}", f"journal_size_limit={journal_pages * PAGE_BYTES}",
            f"max_page_count={self._pages_max}", "temp_store=MEMORY", "cache_size=-4096",
        ):  # fmt: skip
            run(f"PRAGMA {pragma}").fetchall()
        self._db.executescript(f"BEGIN IMMEDIATE; {_TABLES} COMMIT;")
        run(f"PRAGMA user_version={LAYOUT}")

    def close(self) -> None:
        """Close the file; the journal is written into it and removed."""
        with suppress(sqlite3.Error):
            self._db.close()

    # -- writing -------------------------------------------------------------------------------------------------

    def write(self, decisions: Iterable[dict[str, Any]], intervals: Iterable[tuple[int, Sums]]) -> None:
        """Store rows of decisions and intervals that are over, all or none of them. Another thread gets a turn after
        each row, because SQLite works without the interpreter's lock."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for row in decisions:
                self._decision(row)
            for number, sums in intervals:
                self._interval(number * STEP_S, sums)
            self._db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise

    def _decision(self, row: dict[str, Any]) -> None:
        misses = f" {' '.join(row['miss'])} " if row["miss"] else ""
        columns = [row[name] for name in ("number", "at_s", "id", "session", "conversation", "model", "tenant")]
        columns += [row["replica"], row["status"], row["reason"], misses]
        text = zlib.compress(msgspec.json.encode(row), 6)
        self._db.execute("INSERT OR IGNORE INTO decisions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", columns)
        self._db.execute("INSERT OR IGNORE INTO texts VALUES (?, ?)", (row["number"], text))

    def _interval(self, at_s: int, sums: Sums) -> None:
        """Store the interval, and add it to the minute that it is in."""
        for step_s in (STEP_S, COARSE_S):
            key = (step_s, at_s // step_s * step_s, self._run)
            query = "SELECT sums FROM intervals WHERE step_s = ? AND at_s = ? AND run = ?"
            known = self._db.execute(query, key).fetchone()
            whole = merge(_sums(known[0]), sums) if known else sums
            packed = msgspec.msgpack.encode(whole)
            self._db.execute("INSERT OR REPLACE INTO intervals VALUES (?, ?, ?, ?)", (*key, packed))

    def forget(self, now_s: float, days_max: int) -> None:
        """Delete rows that are too old, and then the oldest rows if the file is nearly full."""
        oldest = int((now_s - days_max * DAY_S) * 1e6)
        while self._delete("number < ?", oldest):
            pass
        for step_s, days in ((STEP_S, min(FINE_DAYS, days_max)), (COARSE_S, days_max)):
            was = (step_s, now_s - days * DAY_S)
            self._db.execute("DELETE FROM intervals WHERE step_s = ? AND at_s < ?", was)
        while self._pages() > self._pages_max * FULL_PART:
            if not (self._delete("1") or self._delete_intervals()):
                return

    def _delete(self, condition: str, *values: int) -> int:
        """Delete some of the oldest decisions that meet the condition. Returns their number."""
        found = self._db.execute(
            f"SELECT number FROM decisions WHERE {condition} ORDER BY number LIMIT {DELETED_AT_ONCE}",  # noqa: S608 - ours
            values,
        ).fetchall()
        if found:
            last = found[-1]
            self._db.executescript("BEGIN IMMEDIATE")
            self._db.execute("DELETE FROM decisions WHERE number <= ?", last)
            self._db.execute("DELETE FROM texts WHERE number <= ?", last)
            self._db.execute("COMMIT")
        return len(found)

    def _delete_intervals(self) -> int:
        oldest = "SELECT at_s FROM intervals WHERE step_s = ? ORDER BY at_s LIMIT 1 OFFSET 1000"
        return self._db.execute(
            f"DELETE FROM intervals WHERE step_s = ? AND at_s < coalesce(({oldest}), 0)",  # noqa: S608 - ours
            (STEP_S, STEP_S),
        ).rowcount

    # -- reading -------------------------------------------------------------------------------------------------

    def find(self, wanted: DecisionFilter, *, before: int, limit: int, bytes_max: int) -> tuple[list[Read], bool]:
        """Return matching decisions with a number below `before`, newest first: at most `limit`, and together at most
        `bytes_max` bytes except for the first. The second value is True if there are more. Raises
        sqlite3.OperationalError after READ_S."""
        condition, values = wanted.to_sql()
        query = f"SELECT number FROM decisions WHERE number < ? AND {condition} ORDER BY number DESC LIMIT ?"  # noqa: S608 - ours
        until_s, found, size = time.monotonic() + READ_S, list[Read](), 0
        self._db.set_progress_handler(lambda: time.monotonic() > until_s, 20_000)
        try:
            for (number,) in self._db.execute(query, (before, *values, limit + 1)).fetchall():
                text = self._db.execute("SELECT json FROM texts WHERE number = ?", (number,)).fetchone()
                row = with_current_row(zlib.decompress(text[0])) if text else b"null"
                size += len(row)
                if len(found) >= limit or (size > bytes_max and found):
                    return found, True
                found.append((number, row))
        finally:
            self._db.set_progress_handler(None, 0)
        return found, False

    def intervals(self, step_s: int, from_s: float, to_s: float, *, own: bool) -> Iterator[tuple[float, Sums]]:
        """Yield intervals of STEP_S or COARSE_S seconds that begin in that time, each with its beginning. With `own`
        they are those of this run of the router, otherwise those of all other runs, of which several may overlap in
        time. Another thread gets a turn at each row, as when rows are written."""
        rows = self._db.execute(
            "SELECT at_s, sums FROM intervals WHERE step_s = ? AND at_s >= ? AND at_s < ? AND (run = ?) = ?",
            (step_s, from_s, to_s, self._run, own),
        )
        for at_s, packed in rows:
            yield at_s, _sums(packed)

    def oldest_s(self) -> tuple[float | None, float | None]:
        """Return the arrival time of the oldest decision in the file, and the beginning of the oldest interval; Unix
        times."""
        decision = self._db.execute("SELECT at_s FROM decisions ORDER BY number LIMIT 1").fetchone()
        steps = [
            self._db.execute("SELECT at_s FROM intervals WHERE step_s = ? ORDER BY at_s LIMIT 1", (step_s,)).fetchone()
            for step_s in (STEP_S, COARSE_S)
        ]
        return decision and decision[0], min((float(step[0]) for step in steps if step), default=None)

    def bytes(self) -> int:
        """Return the bytes on disk, the journal included."""
        total = 0
        for name in (self._path, f"{self._path}-wal"):
            with suppress(OSError):
                total += Path(name).stat().st_size
        return total

    def _pages(self) -> int:
        """Return the number of pages in use."""
        total, free = (self._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count"))
        return int(total) - int(free)


def _sums(packed: bytes) -> Sums:
    return with_current_names(msgspec.msgpack.decode(packed, type=dict[str, float]))


def _check(path: str) -> None:
    """Raise ForeignDatabase for a file that is neither empty nor a history, and OSError for a file that cannot be
    read."""
    try:
        with Path(path).open("rb") as file:
            head = file.read(100)
    except FileNotFoundError:
        return
    if head and (head[:16] != b"SQLite format 3\0" or int.from_bytes(head[68:72], "big") != APPLICATION_ID):
        raise ForeignDatabase("the file is not a history of warmroute")
    layout = int.from_bytes(head[60:64], "big")
    if layout not in (0, LAYOUT):
        raise ForeignDatabase(f"the file has layout {layout}, this version of warmroute uses layout {LAYOUT}")


def quarantine(path: str) -> str:
    """Move a damaged file out of the way, in place of an earlier one. Returns its new name. Raises OSError."""
    new = f"{path}.damaged"
    Path(path).replace(new)
    for journal in ("-wal", "-shm"):
        Path(path + journal).unlink(missing_ok=True)
    return new


def describe_error(error: Exception) -> str:
    """Return the reason that the file cannot be used, for people."""
    if isinstance(error, sqlite3.Error):
        name = str(getattr(error, "sqlite_errorname", ""))
        known = next((text for start, text in _WORDS.items() if name.startswith(start)), "")
        return known or str(error)
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error)


_WORDS = {
    "SQLITE_FULL": "the disk is full",
    "SQLITE_BUSY": "another process has it open",
    "SQLITE_LOCKED": "another process has it open",
    "SQLITE_READONLY": "it cannot be written to",
    "SQLITE_CANTOPEN": "it cannot be opened or created",
    "SQLITE_CORRUPT": "it is damaged",
    "SQLITE_NOTADB": "it is damaged",
    "SQLITE_IOERR": "the disk cannot be written to or read",
    "SQLITE_INTERRUPT": f"the search took more than {READ_S:g} s; narrow it by from_s and to_s",
}
DAMAGED = ("SQLITE_CORRUPT", "SQLITE_NOTADB")

"""Drives attacks: over seeds and their mutations, by counts or until a time, and writes down what was found."""

from __future__ import annotations

import hashlib
import random
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from tests.attack.mutate import mutated
from tests.attack.target import Target

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / ".attack"  # findings, and what a fuzzer has learned; not kept in the repository
METERED_EVERY = 64  # of so many mutations, one has its cost judged: that takes ten times as long
SHRINKS_MAX = 2_000  # attempts to make a finding smaller


@dataclass(frozen=True)
class Finding:
    """An input that broke its target, and the error."""

    target: Target
    data: bytes
    error: BaseException

    def told(self) -> str:
        """The error, the file that the input was written to, and how to replay it. Writes the file."""
        folder = FOLDER / "findings"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{self.target.name}-{hashlib.sha256(self.data).hexdigest()[:12]}"
        file.write_bytes(self.data)
        lines = "".join(traceback.format_exception(self.error)).rstrip()
        where = f"{len(self.data)} bytes in {file.relative_to(ROOT)}"
        keep = f"tests/attack/seeds/{self.target.name}/"
        return f"{lines}\n{where}: {self.data[:200]!r}\n{replay_line(file)}\nonce mended, keep the file in {keep}"


def replay_line(file: Path) -> str:
    """The command that runs one input again."""
    return f"replay: .venv/bin/python -m tests.attack --replay {file.relative_to(ROOT)}"


def broken(target: Target, data: bytes, *, metered: bool) -> BaseException | None:
    """What one attack raises; None if the parser holds."""
    try:
        (target.try_metered if metered else target.try_once)(data)
    except Exception as error:
        return error
    return None


def attacks(target: Target, seed: int) -> Iterator[tuple[bytes, bool]]:
    """Inputs, and whether their cost is to be judged: all seeds, then mutations of them without end."""
    choose, pool = random.Random(seed), list(target.seeds().values())
    for data in pool:
        yield data, True
    for number in count(1):
        yield mutated(choose, pool, target.words, target.bytes_max), number % METERED_EVERY == 0


def drive(target: Target, seed: int, more: Callable[[int], bool]) -> tuple[int, Finding | None]:
    """Attack while `more` says so of the number of attacks made; the number, and what broke the target."""
    for number, (data, metered) in enumerate(attacks(target, seed)):
        if not more(number):
            return number, None
        error = broken(target, data, metered=metered)
        if error is not None:
            return number + 1, shrunk(Finding(target, data, error), metered=metered)
    raise AssertionError("mutations have no end")


def for_seconds(seconds: float) -> Callable[[int], bool]:
    """More attacks until so many seconds are over."""
    until_s = time.monotonic() + seconds
    return lambda _: time.monotonic() < until_s


def shrunk(finding: Finding, *, metered: bool) -> Finding:
    """The same finding with as little input as is easily found: the same kind of error at the same line."""
    tries = SHRINKS_MAX
    size = len(finding.data) // 2
    while size and tries > 0:
        at = 0
        while at < len(finding.data) and tries > 0:
            tries -= 1
            data = finding.data[:at] + finding.data[at + size :]
            error = broken(finding.target, data, metered=metered)
            if error is not None and _place(error) == _place(finding.error):
                finding = Finding(finding.target, data, error)
            else:
                at += size
        size //= 2
    return finding


def _place(error: BaseException) -> tuple[type[BaseException], str, int | None]:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return type(error), last.filename, last.lineno

"""A target: one parser of foreign bytes, what it may cost, and one attack on it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tests.attack.meter import metered

SEEDS = Path(__file__).parent / "seeds"
HANGS_S = 60  # CPU seconds of one attack after which it hangs


class TooCostly(AssertionError):
    """An attack cost more than its target allows for input of that length."""


class Hangs(AssertionError):
    """An attack did not end."""


@dataclass(frozen=True)
class Target:
    """`attack` takes any bytes. It returns where the parser gave a value or the error that it documents, and raises
    for anything else, also for a broken property: AssertionError says which."""

    attack: Callable[[bytes], object]
    words: Sequence[bytes] = ()  # dictionary of the format
    bytes_max: int = 4_096  # length of an input
    steps: tuple[int, int] = (20_000, 200)  # lines of Python that an attack may cost: always, and for each byte
    held_bytes: tuple[int, int] = (1 << 20, 400)  # bytes that it may hold at once: always, and for each byte

    @property
    def name(self) -> str:
        """The name on the command line, and of the folder of seeds."""
        return self.attack.__name__

    def seeds(self) -> dict[str, bytes]:
        """The kept inputs by file name: examples of what is valid, and what was once found."""
        return {file.name: file.read_bytes() for file in sorted((SEEDS / self.name).iterdir())}

    def try_metered(self, data: bytes) -> None:
        """One attack, whose cost is judged."""
        with limited():
            cost = metered(lambda: self.attack(data))
        size = len(data)
        if cost.steps > self.steps[0] + self.steps[1] * size:
            raise TooCostly(f"{cost.steps} lines of Python for {size} bytes")
        if cost.held_bytes > self.held_bytes[0] + self.held_bytes[1] * size:
            raise TooCostly(f"{cost.held_bytes} bytes held for {size} bytes")

    def try_once(self, data: bytes) -> None:
        """One attack, whose cost is not judged."""
        with limited():
            self.attack(data)


@contextmanager
def limited() -> Iterator[None]:
    """Raise Hangs in what takes HANGS_S of CPU time."""

    def hangs(_: int, __: FrameType | None) -> None:
        raise Hangs(f"no end within {HANGS_S} s of CPU time")

    before = signal.signal(signal.SIGVTALRM, hangs)
    signal.setitimer(signal.ITIMER_VIRTUAL, HANGS_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)

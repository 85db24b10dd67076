"""One target under Atheris, which is libFuzzer: inputs that reach new code are kept and changed further.

Run in a process of its own, since libFuzzer ends its process: `python -m tests.attack.guided NAME SECONDS`.
"""

from __future__ import annotations

import logging
import sys
from itertools import count
from pathlib import Path

RSS_MB_MAX = 2_048  # libFuzzer's limit of the whole process
INSTRUMENTED = ["router", "tests.attack.targets"]


def arguments(name: str, seconds: int, bytes_max: int, words: Path, folders: tuple[Path, Path, Path]) -> list[str]:
    """libFuzzer's own arguments. The folders are what it has learned, the seeds, and where findings go."""
    learned, seeds, findings = folders
    return [
        "attack",
        f"-max_total_time={seconds}",
        f"-max_len={bytes_max}",
        f"-rss_limit_mb={RSS_MB_MAX}",
        "-timeout=60",
        f"-dict={words}",
        f"-artifact_prefix={findings}/{name}-",
        "-print_final_stats=1",
        "-verbosity=0",
        "-reload=0",
        str(learned),
        str(seeds),
    ]


def entry(word: bytes) -> str:
    """A word as a line of libFuzzer's dictionary."""
    return '"' + "".join(rf"\x{byte:02x}" for byte in word) + '"\n'


def main(name: str, seconds: int) -> None:
    """Does not return."""
    import atheris

    logging.disable()
    with atheris.instrument_imports(include=INSTRUMENTED, enable_loader_override=False):
        from tests.attack.targets import TARGETS
    from tests.attack.drive import FOLDER, METERED_EVERY, Finding, broken, shrunk
    from tests.attack.target import SEEDS

    target, numbers = TARGETS[name], count(1)

    def attack(data: bytes) -> None:
        metered = next(numbers) % METERED_EVERY == 0
        error = broken(target, data, metered=metered)
        if error is not None:
            print(shrunk(Finding(target, data, error), metered=metered).told(), flush=True)
            raise error

    learned, findings, words = FOLDER / "learned" / name, FOLDER / "findings", FOLDER / f"{name}.dict"
    for folder in (learned, findings):
        folder.mkdir(parents=True, exist_ok=True)
    words.write_text("".join(map(entry, filter(None, target.words))))
    atheris.Setup(
        arguments(name, seconds, target.bytes_max, words, (learned, SEEDS / name, findings)),
        attack,
        enable_python_coverage=True,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

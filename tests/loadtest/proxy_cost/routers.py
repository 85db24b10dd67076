"""Measured figures and routers for tests of the overhead bench."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from loadtest.proxy_cost import command as overhead
from loadtest.proxy_cost import failover as overhead_continuing
from loadtest.proxy_cost import observatory as overhead_observatory
from loadtest.proxy_cost.load import CpuSample


def asked(off_us: float, on_us: float, errors: int = 0) -> tuple[CpuSample, CpuSample]:
    """Windows of 100 requests, without the observatory and with it, these µs each."""
    failed = Counter({"closed": errors} if errors else {})
    return CpuSample(100, Counter(), 1.0, off_us * 100 / 1e6), CpuSample(100, failed, 1.0, on_us * 100 / 1e6)


@asynccontextmanager
async def warmroute(flags: Sequence[str], asked_: list[str], on_us: Iterator[float]) -> AsyncIterator[Any]:
    """One that takes 100 µs without the observatory, and these with it; who is asked is written down."""
    on = flags in (overhead_observatory.ON, overhead_continuing.ON)

    async def measure(case: str) -> CpuSample:
        asked_.append(f"{case} {'on' if on else 'off'}")
        return asked(100.0, next(on_us) if on and case == "mid" else 100.0)[on]

    yield measure


def run(arguments: list[str], tmp_path: Path) -> tuple[int, list[dict[str, object]]]:
    """Exit status and rows of a run that takes no time."""
    file = tmp_path / "overhead.json"
    sizes = ["--rounds", "1", "--seconds", "0.2", "--replicas", "2", "--rivals", str(tmp_path)]
    files = ["--json", str(file), "--chart", str(tmp_path / "chart.svg")]
    status = overhead.main([*arguments, *sizes, *files])
    return status, json.loads(file.read_text())["rows"] if file.exists() else []

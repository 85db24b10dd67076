"""The hostile tenant of the matrix of faults does what its way says, and its rows judge what others saw."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from loadtest.common import rivals
from loadtest.faults import hostile
from loadtest.faults.bench import Bench, FaultAnswer, Scale
from loadtest.faults.rows import tenants
from tests.support.fakes import FakeEngine, running
from tests.support.keyring import Keyring

EXPECTED: dict[str, set[int]] = {
    "bytes": {200},
    "parts": {200, 400},
    "connections": {200},
    "sessions": {200},
    "slow bodies": set(),
    "many models": {404},
    "tools": {200},
    "a used-up rate": {429},
}


@pytest.mark.parametrize("way", hostile.WAYS)
async def test_each_way_is_what_it_says(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests are answered as such requests are, others' too, and it ends by itself."""
    small = {"CONNECTIONS": 20, "SLOW_BODIES": 10, "BODY_BYTES": 1 << 20, "PARTS_FEW": 1_000, "PARTS_MANY": 70_000}
    for name, value in (small | {"TINY_TOOLS": 20_000}).items():
        monkeypatch.setattr(hostile, name, value)
    rate: dict[str, Any] = {"requests_per_min": 1} if way == "a used-up rate" else {}
    ring = Keyring(tmp_path, bad=rate, good={})
    async with FakeEngine(models=("fault-model",)) as engine, running(engine, **ring.settings) as app:
        port = int(app.url.rsplit(":", 1)[1])
        if rate:
            assert 200 in await hostile.run("sessions", port, ring.keys["bad"], 0.2)
        became = await hostile.run(way, port, ring.keys["bad"], 0.5)
        assert set(became) == EXPECTED[way]
        assert set(await hostile.run("sessions", port, ring.keys["good"], 0.1)) == {200}


def answer(ttft_s: float, status: int = 200) -> FaultAnswer:
    """An answer that took so long to begin."""
    return FaultAnswer("1", status=status, began_s=1.0, first_s=1.0 + ttft_s)


def test_what_others_saw_is_judged(tmp_path: Path) -> None:
    """Times above 1.2 of what they were alone, errors, breakers, memory, and answers beyond a rate are missed, each in
    a row of its own; with `--counts` times and memory are not judged."""
    bench = Bench(rivals.ours(), Scale(), tmp_path)
    alone, log = [answer(0.010)] * 10, '{"event":"replica_up"}'

    def missed(
        bench: Bench, beside: list[FaultAnswer], grown_mb: float, log: str, became: dict[int, int]
    ) -> list[bool]:
        found = tenants._judged(bench, tenants.RATED, alone, beside, grown_mb, log, became)
        return [row.ok is False for row in found]

    assert missed(bench, [answer(0.0119)] * 10, 200.0, log, {429: 9}) == [False] * 5
    assert missed(bench, [answer(0.013)] * 10, 200.0, log, {429: 9}) == [True, False, False, False, False]
    bad = [answer(0.010)] * 9 + [answer(0.010, 502)]
    broken = log + '{"event":"breaker_open"}'
    assert missed(bench, bad, 300.0, broken, {429: 9, 200: 1}) == [False, True, True, True, True]
    counts = Bench(rivals.ours(), Scale(counts=True, slack=math.inf), tmp_path)
    assert missed(counts, [answer(1.0)] * 10, 900.0, log, {429: 9}) == [False] * 4

"""Goal 12: SIGTERM while streams run."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from loadtest.common.report import Row
from loadtest.faults.bench import Bench, Run, failures, row

STREAMS, STREAM_S, TOKEN_S = 8, 6.0, 0.1
LAME_DUCK_S, FULL_LAME_DUCK_S = 3.0, 20.0
BEFORE_CLOSING_S = 0.3  # no new connects within this time before the listener closes
READY_MAX_MS, EXIT_MAX_S, EXIT_TIMEOUT_S = 100.0, 1.0, 30.0
PER_S = 500


async def terminated(bench: Bench) -> list[Row]:
    """Goal 12: unready at once, a listener through the lame duck, streams until their end, exit status 0."""
    lame_s = FULL_LAME_DUCK_S if bench.scale.full else LAME_DUCK_S
    async with bench.run_cluster(2, ("--set", f"listen.lame_duck_s={lame_s:g}")) as run:
        tokens = int(max(STREAM_S, lame_s + 1) / TOKEN_S)
        streams = [asyncio.create_task(run.ask(tokens=tokens, token_s=TOKEN_S, timeout_s=60.0)) for _ in range(STREAMS)]
        await asyncio.sleep(0.5)
        run.process.terminate()
        term_s = time.monotonic()
        ended = asyncio.create_task(run.process.wait_for_exit())
        lame_end_s = term_s + lame_s
        unready = asyncio.create_task(_unready_ms(run, "/readyz" if bench.ours else "/health", lame_end_s))
        connects, refused = await _connects(run, lame_end_s - BEFORE_CLOSING_S, lame_end_s)
        unready_ms = await unready
        asked = await asyncio.gather(*streams)
        code, took_s = None, None
        with suppress(TimeoutError):
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                code = await ended
            took_s = max(0.0, time.monotonic() - max([lame_end_s, *(a.ended_s for a in asked)]))
        ended.cancel()
    slack = bench.scale.slack
    return [
        row(12, "SIGTERM: ms until /readyz returns 503", READY_MAX_MS, unready_ms, slack=slack),
        row(12, f"... of {connects} connects in {lame_s - BEFORE_CLOSING_S:g} s refused", 0, refused),
        failures(12, f"... of {STREAMS} streams not whole", asked),
        row(12, "... exit status", 0, code, ok=code == 0),
        row(12, "... seconds to the exit after the last stream", EXIT_MAX_S, took_s, slack=slack),
    ]


async def _unready_ms(run: Run, path: str, until_s: float) -> float | None:
    """Return the milliseconds until readiness is denied; None if it never was."""
    began_s = time.monotonic()
    while time.monotonic() < until_s:
        status, _ = await run.page(path, timeout_s=1.0)
        if status not in (0, 200):
            return 1e3 * (time.monotonic() - began_s)
        await asyncio.sleep(0.005)
    return None


async def _connects(run: Run, until_s: float, lame_end_s: float) -> tuple[int, int]:
    """Return the number of connects, and of those refused before the end of the lame duck."""
    tries = refused = 0
    due_s = time.monotonic()
    while time.monotonic() < until_s:
        tries += 1
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", run.port)
            writer.close()
        except OSError:
            refused += time.monotonic() < lame_end_s
        due_s += 1 / PER_S
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
    return tries, refused

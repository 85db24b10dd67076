"""Records of requests as the control plane receives them, for tests of what is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from router.admin.history.request_history import RouterHistory
from router.admin.history.writer import HistoryWriter
from router.core.types.cache_misses import MissReason, PromptAnalysis, TokenBreakdown
from router.core.types.placements import Candidate, Confidence, EndReason, PlacementReason, Receipt, Usage
from router.telemetry.request_record import RequestRecord, session_key
from tests.support.request_records import make_record, put

REPLICAS = ("http://10.0.0.1:8000", "http://10.0.0.2:8000")
BYTES_MAX = 16 << 20
HISTORY = "history.db"


def record(count: int, **fields: Any) -> RequestRecord:
    """A request of its own id, placed and answered; some missed, some failed, of several models and tenants."""
    replica, miss = REPLICAS[count % 2], (MissReason.DIVERGED, MissReason.NEW, MissReason.EVICTED)[count % 3]
    candidates = tuple(Candidate(id_, 100 * n, 400, 1.0, 2.0, 0.0, 0.0, 1) for n, id_ in enumerate(REPLICAS))
    receipt = Receipt(
        replica,
        "warm",
        (PlacementReason.WARM, PlacementReason.COLD)[count % 2],
        Confidence.ESTIMATED,
        500,
        100,
        candidates,
    )
    made = make_record(
        f"id-{count}", "/v1/chat/completions", 1_000.0 + count, model=f"m{count % 2}", status=200, ending=EndReason.OK,
        duration_s=0.5, ttft_s=0.1, inter_token_s=0.01, receipt=receipt, usage=Usage(500, 20, 90),
        tenant=("acme", "other", "")[count % 3], session=session_key(f"session {count % 4}".encode()),
        analysis=PromptAnalysis(conversation=7 + count % 5),
        miss=TokenBreakdown(500, 90, {miss: 400, MissReason.TAIL: 10}),
    )  # fmt: skip
    put(made, **fields)
    return made


class Clock:
    """A clock that a test sets."""

    def __init__(self, now_s: float = 2_000_000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        """Unix time."""
        return self.now_s


def kept_in(path: Any, clock: Callable[[], float], *, decisions_max: int = 8, **more: Any) -> RouterHistory:
    """A history with a file, which is looked after every few milliseconds."""
    limits = {"bytes_max": BYTES_MAX, "days_max": 14, "batch_s": 0.01, "retry_s": 0.01, "wall_clock": clock} | more
    history = RouterHistory(
        decisions_max=decisions_max, keeper=HistoryWriter(str(path), **limits), load=lambda: (3, 1), wall_clock=clock
    )
    history.start()
    return history


async def until(true: Callable[[], object], within_s: float = 60.0) -> None:
    """Return when it is true."""
    async with asyncio.timeout(within_s):
        while not true():
            await asyncio.sleep(0.005)

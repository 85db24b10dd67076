"""Comparison of a prompt with the texts of earlier prompts, before placement. It runs in the process that reads bodies.

A quick look at a prompt takes microseconds, and is enough for most. A suspect prompt is compared with an earlier one,
which may take milliseconds. Short texts are compared on the event loop, long ones in the thread that reads long bodies.
All comparisons share a budget of time. Only one long comparison waits or runs at a time, so that no request waits for
another's. A prompt that cannot be compared gets the last finding again, and counts as unexplained. After any error in
this module the request is still served.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from concurrent.futures import Executor

from router.config.schema import InsightsSettings
from router.core.insights.difference.compare import Compared, compare
from router.core.insights.prompt_memory.diff_candidate import DiffCandidate
from router.core.insights.prompt_memory.prompt_tracker import PromptTracker
from router.core.prompts.block_keys import Chain
from router.core.types.cache_misses import PromptAnalysis, Template
from router.core.types.requests import Prompt, RequestSpec
from router.http.request import Request

# Largest size of either text, and of the body, for a comparison on the event loop. The body counts because all of it
# must be decoded to name a place in it.
INLINE_BYTES_MAX = 16 << 10

PARTS = 1 << 16  # finest step of the sampled part of all conversations: 1 / 65,536
LOOK_BLOCKS = 64  # blocks (32 KB of a prompt) that add as much time to a look as the shortest look takes
BURST = 2  # looks of one second, in multiples of the limit

log = logging.getLogger(__name__)


class PromptObserver:
    """Observes the prompts of one process that serves clients."""

    def __init__(self, settings: InsightsSettings) -> None:
        self._watch = SamplingRate(settings.inspections_per_s_max)
        self._watcher = PromptTracker(
            settings.memory_bytes_max,
            settings.prompt_bytes_max,
            settings.templates_max,
            excerpts=settings.excerpts,
            seed=secrets.randbits(64),
        )
        self._excerpts = settings.excerpts
        self._budget = TimeBudget(settings.diff_budget_ms_per_s / 1_000, time.monotonic())
        self._failed = False
        self._comparing = 0  # comparisons that wait or run in the thread
        self.unexplained = 0  # prompts that were not looked at, or were suspect and not compared

    def templates(self) -> list[Template]:
        """Return templates that changed since the last call."""
        return self._watcher.templates()

    def inspect(
        self,
        ask: RequestSpec,
        chain: Chain | None,
        request: Request,
        *,
        sure: bool = False,
        always: bool = False,
        tenant: str = "",
    ) -> PromptAnalysis | DiffCandidate | None:
        """Take a quick look at a prompt. Returns a PromptAnalysis, or a DiffCandidate that `settle` must complete; None
        if the prompt cannot be read.

        - `sure`: no assumption is made about the prompt.
        - `always`: the prompt is looked at under any load.
        - `tenant`: the prompt is compared with prompts of that tenant only.
        """
        if chain is None or ask.prompt is None:
            return None
        now_s = time.monotonic()
        if chain.keys and not self._watch.takes(chain.first_user_key, len(chain.keys), now_s) and not always:
            self.unexplained += 1
            return PromptAnalysis()
        try:
            return self._look(ask, chain, request, None, sure=sure or self._budget.ample(now_s), tenant=tenant)
        except Exception:
            self._fail()
            return None

    async def compare(
        self,
        look: DiffCandidate,
        ask: RequestSpec,
        chain: Chain,
        request: Request,
        thread: Executor,
        *,
        aside: bool,
        sure: bool = False,
        rejects: bool = False,
        tenant: str = "",
    ) -> PromptAnalysis | None:
        """Complete a look that was not enough.

        - `thread`: reads long bodies.
        - `aside`: `thread` has read this body.
        - `sure`: no assumption is made about the prompt.
        - `rejects`: a prompt that changes its conversation's history is not remembered. It will be refused, and must
          not count as known when it is sent again.
        """
        try:
            if look.lacks and ask.prompt is not None and ask.prompt.joint is not None:
                # The reader knew its beginning, and the observer has forgotten it (core/prompts/incremental_parse.py).
                read = ask.prompt.joint.whole
                whole = await asyncio.get_running_loop().run_in_executor(thread, read) if aside else read()
                if whole is not None:
                    seen = self._look(ask, chain, request, whole, sure=sure, tenant=tenant)
                    if not isinstance(seen, DiffCandidate):
                        return seen
                    look = seen
            if look.comparable:
                await self._compare(look, thread, sure=sure, rejects=rejects)
        except Exception:  # a bug in the observatory must not fail the request
            self._fail()
            return None
        return look.sighting

    def _look(
        self, ask: RequestSpec, chain: Chain, request: Request, whole: Prompt | None, *, sure: bool, tenant: str
    ) -> PromptAnalysis | DiffCandidate:
        session = request.fields.get(b"x-session-id")
        name = session.decode("latin-1") if session else ""
        return self._watcher.classify(
            ask, chain, session=name, path=request.path, body=request.body, whole=whole, sure=sure, tenant=tenant
        )

    def _fail(self) -> None:
        if not self._failed:
            log.exception("A prompt could not be observed; further failures are not logged", extra={"event": "bug"})
        self._failed = True

    async def _compare(self, look: DiffCandidate, thread: Executor, *, sure: bool, rejects: bool) -> None:
        """Complete the result for a suspect prompt, by a comparison if there is time for one."""
        inline = look.bytes_max <= INLINE_BYTES_MAX
        if not self._budget.has(time.monotonic()) or (self._comparing and not inline and not sure):
            self.unexplained += 1
            if sure:
                look.assumed = None
            self._watcher.record_diff(look, None)
            return
        look.read()
        if inline:
            compared, spent_s = _compare_timed(look, self._excerpts)
        else:
            compared, spent_s = await self._compare_in_thread(look, thread)
        self._budget.spend(spent_s)
        self._watcher.record_diff(look, compared, rejects=rejects)

    async def _compare_in_thread(self, look: DiffCandidate, thread: Executor) -> tuple[Compared, float]:
        """Compare in the thread."""
        self._comparing += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, _compare_timed, look, self._excerpts)
        finally:
            self._comparing -= 1


class SamplingRate:
    """Chooses the conversations that are looked at, for at most `looks_per_s_max` prompts a second. It samples whole
    conversations, because a prompt is compared with an earlier one of the same conversation.

    The sampled part is set from last second's traffic. If that was too small a sample, sampling stops early, after
    BURST x the limit. A long prompt counts as several (LOOK_BLOCKS).
    """

    def __init__(self, looks_per_s_max: float) -> None:
        self._looks_max = looks_per_s_max
        self._until_s, self._asked, self._left = 0.0, 0.0, 0.0
        self._parts = PARTS  # the sampled part of all conversations, in PARTS

    def takes(self, name: int, blocks: int, now_s: float) -> bool:
        """True if a prompt with `blocks` blocks, of the conversation `name`, must be looked at."""
        if now_s >= self._until_s:
            self._parts = PARTS if self._asked <= self._looks_max else int(PARTS * self._looks_max / self._asked)
            self._until_s, self._asked, self._left = now_s + 1.0, 0.0, BURST * self._looks_max
        cost = 1 + blocks / LOOK_BLOCKS
        self._asked += cost
        if name % PARTS >= self._parts or self._left <= 0:
            return False
        self._left -= cost
        return True


class TimeBudget:
    """A budget of time: a share of the time that passes, saved for at most a second."""

    def __init__(self, share: float, now_s: float) -> None:
        self._share = self._left_s = share
        self._at_s = now_s

    def has(self, now_s: float) -> bool:
        """True if any time is left. Work may overdraw the budget; the next work then waits until it is balanced."""
        self._left_s = min(self._share, self._left_s + (now_s - self._at_s) * self._share)
        self._at_s = now_s
        return self._left_s > 0

    def ample(self, now_s: float) -> bool:
        """True if more than half of the budget is left, so that no look must be skipped."""
        return self.has(now_s) and self._left_s > self._share / 2

    def spend(self, seconds: float) -> None:
        """Take used time out of the budget."""
        self._left_s -= seconds


def _compare_timed(look: DiffCandidate, excerpts: bool) -> tuple[Compared, float]:
    """Compare, and measure the CPU seconds of this thread."""
    began_s = time.thread_time()
    compared = compare(
        look.before, look.after, from_bytes=look.from_bytes, body=look.body, path=look.path, excerpts=excerpts
    )
    return compared, time.thread_time() - began_s

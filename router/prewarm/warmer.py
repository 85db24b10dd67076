"""Choice of replicas to warm, the time of warming, and the traffic that waits for it.

A replica is due when it joins and when its cache is gone. It is warmed once it is healthy. Prompts are sent one at a
time, and replicas are warmed one after another. Replicas without traffic until they are warm
(`prewarm.block_readiness`) are an exception: they do not wait for others, because the fleet lacks them. Such a replica
receives traffic when it is warm, when warming failed, and at the latest `timeout_s` after warming began. The Fleet
ensures that other replicas serve in the meantime. Replicas that were present when the router started are not deferred,
because only the router is new.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from router.config.schema import PrewarmSettings
from router.core.fleet.registry import Fleet
from router.core.types.cache_misses import Template
from router.prewarm.jobs import JobState, WarmupJob, WarmupReason
from router.prewarm.prefixes import PrefixesError, WarmupPrompt, read
from router.prewarm.sender import PromptSender, SendFailed, WarmupSkipped

log = logging.getLogger(__name__)

FAILURES_MAX = 3  # failures in a row after which the job ends
PAUSE_S = 0.05  # pause between two checks of a full replica
CALLS_MAX = 8  # calls that may wait, each with its prompts
LAST_MAX = 64  # ended jobs that are still shown
LIVES_MAX, LIVES_S = 6, 600.0  # one replica is prewarmed at most 6 times in 600 s, except on request


class Busy(Exception):
    """Raised if too many calls wait already."""


class Warmer:
    """Warms replicas; one per router, in the control plane's process."""

    def __init__(
        self,
        fleet: Fleet,
        sender: PromptSender,
        settings: PrewarmSettings,
        *,
        clock: Callable[[], float],
        hottest: Callable[[int], Sequence[Template]],
        counted: Callable[[str, int], None] = lambda *_: None,
        released: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`hottest(n)`: the n most used learned templates. `counted(result, prompt_tokens)`: called for each prompt.
        `released(replica)`: called when a deferred replica may receive requests."""
        self._fleet = fleet
        self._sender = sender
        self.settings = settings
        self._clock = clock
        self._hottest = hottest
        self._counted = counted
        self._released = released
        self._due: dict[str, WarmupReason] = {}
        self._lives: dict[str, deque[float]] = {}  # times when the replica became due, by replica
        self._jobs: dict[asyncio.Task[None], WarmupJob] = {}  # jobs that have not ended
        self._unasked: set[str] = set()  # replicas with a job that no call requested
        self._running: set[str] = set()  # replicas with a running job
        self._last: deque[WarmupJob] = deque(maxlen=LAST_MAX)
        self._turn = asyncio.Lock()  # held by the running job, among those with a replica that is not deferred
        self._turns: dict[str, asyncio.Lock] = {}  # one lock per replica
        self._calls = 0

    def configure(self, settings: PrewarmSettings) -> None:
        """Apply new settings, and release replicas that the new settings do not defer."""
        self.settings = settings
        if not self._automatic:
            self._due.clear()
        if not (self._automatic and settings.block_readiness):
            for member in list(self._fleet.members.values()):
                self._let_go(member.id, "according to the settings")

    @property
    def _automatic(self) -> bool:
        return bool(self.settings.prefixes_file or self.settings.templates)

    async def close(self) -> None:
        """End all jobs."""
        tasks = list(self._jobs)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._sender.close()

    # -- events of replicas ----------------------------------------------------------------------------------------

    def on_replica_added(self, replica: str, *, new: bool) -> None:
        """Handle a replica that joined. `new`: True if it joined after the router started."""
        self._expect(replica, WarmupReason.JOINED, hold=new)

    def on_cache_cleared(self, replica: str) -> None:
        """Handle the loss of the replica's cache."""
        self._expect(replica, WarmupReason.RESTARTED, hold=True)

    def on_connection_refused(self, replica: str) -> None:
        """Handle a refused connection: no process listens at the replica. The engine that starts there is new, even if
        the router has seen none before."""
        if replica in self._due:
            self._hold(replica)

    def ready(self, replica: str) -> None:
        """Begin warming the replica if it is due and healthy."""
        member = self._fleet.member(replica)
        if member is None or not (member.health.fit and member.replica.ready) or replica not in self._due:
            return
        if replica in self._unasked:
            return  # `_ended` calls this again
        s = self.settings
        self._start(WarmupJob(replica, self._due.pop(replica), s.tokens_max, s.templates, s.prefixes_file))

    def on_replica_removed(self, replica: str) -> None:
        """Handle a replica that left."""
        self._due.pop(replica, None)
        self._lives.pop(replica, None)
        self._turns.pop(replica, None)
        self._unasked.discard(replica)
        for task, job in self._jobs.items():
            if job.replica == replica:
                job.state = JobState.FAILED
                job.record_error("it left")
                task.cancel()

    def is_warming(self, replica: str) -> bool:
        """True if the replica's cache is being filled, or its traffic is deferred until then."""
        return replica in self._running or self._fleet.is_warming_up(replica)

    # -- requests of callers ---------------------------------------------------------------------------------------

    def request(
        self, replicas: Iterable[str], prefixes: Sequence[WarmupPrompt], templates: int, *, file: str, tokens_max: int
    ) -> tuple[list[WarmupJob], list[asyncio.Task[None]]]:
        """Warm these replicas, one after another. Raises Busy."""
        if len({job.call for job in self._jobs.values() if job.call}) >= CALLS_MAX:
            raise Busy
        self._calls += 1
        jobs = [
            WarmupJob(id_, WarmupReason.ASKED, tokens_max, templates, file, tuple(prefixes), self._calls)
            for id_ in replicas
        ]
        return jobs, [self._start(job) for job in jobs]

    def state(self) -> dict[str, Any]:
        """Return the running jobs, the waiting jobs, and the last results, newest first."""
        jobs = list(self._jobs.values())
        return {
            "running": [job.row() for job in jobs if job.state is not JobState.WAITING],
            "queue": [job.row() for job in jobs if job.state is JobState.WAITING],
            "last": [job.row() for job in reversed(self._last)],
        }

    # -- internals -------------------------------------------------------------------------------------------------

    def _expect(self, replica: str, why: WarmupReason, *, hold: bool) -> None:
        if not self._automatic:
            return
        if replica not in self._due:
            lives, now_s = self._lives.setdefault(replica, deque(maxlen=LIVES_MAX)), self._clock()
            if len(lives) == LIVES_MAX and now_s - lives[0] < LIVES_S:
                log.warning(
                    "replica is not prewarmed again: it restarts too often",
                    extra={"event": "warming_skipped", "fields": {"replica": replica}},
                )
                return
            lives.append(now_s)
            self._due[replica] = why
        if hold:
            self._hold(replica)
        self.ready(replica)

    def _hold(self, replica: str) -> None:
        if self.settings.block_readiness:
            self._fleet.warm_up(replica, True)

    def _release(self, replica: str, why: str) -> None:
        """Release the replica, unless it has restarted and is due again."""
        if replica not in self._due:
            self._let_go(replica, why)

    def _let_go(self, replica: str, why: str) -> None:
        if self._fleet.warm_up(replica, False):
            log.info(
                "replica receives traffic",
                extra={"event": "replica_serving", "fields": {"replica": replica, "why": why}},
            )
            self._released(replica)

    def _start(self, job: WarmupJob) -> asyncio.Task[None]:
        task = asyncio.create_task(self._run(job))
        self._jobs[task] = job
        if job.why is not WarmupReason.ASKED:
            self._unasked.add(job.replica)
        task.add_done_callback(self._on_job_done)
        return task

    def _on_job_done(self, task: asyncio.Task[None]) -> None:
        job = self._jobs.pop(task)
        job.prefixes = ()
        self._last.append(job)
        if task.cancelled():
            return
        if task.exception() is not None:
            job.state = JobState.FAILED
            log.error("bug: prewarming failed", exc_info=task.exception(), extra={"event": "bug"})
        if job.why is not WarmupReason.ASKED:
            self._unasked.discard(job.replica)
            self._release(job.replica, "it is prewarmed" if job.state is JobState.DONE else "prewarming failed")
            self.ready(job.replica)

    async def _run(self, job: WarmupJob) -> None:
        held = self._fleet.is_to_warm_up(job.replica) and job.why is not WarmupReason.ASKED
        late = None
        if held:  # the limit includes the time for which the job waits
            why = "prewarming took too long"
            late = asyncio.get_running_loop().call_later(self.settings.timeout_s, self._release, job.replica, why)
        try:
            async with AsyncExitStack() as turns:
                if not held:
                    await turns.enter_async_context(self._turn)
                await turns.enter_async_context(self._turns.setdefault(job.replica, asyncio.Lock()))
                await self._run_with_timeout(job)
        finally:
            if late is not None:
                late.cancel()

    async def _run_with_timeout(self, job: WarmupJob) -> None:
        """Run a job within `timeout_s`, with a log line before and after."""
        fields = {"replica": job.replica, "why": job.why}
        log.info("prewarming of a replica started", extra={"event": "replica_warming", "fields": fields})
        job.state, began_s = JobState.RUNNING, self._clock()
        self._running.add(job.replica)
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                await self._warm(job)
        except TimeoutError:
            job.state = JobState.FAILED
            job.record_error("prewarming took longer than prewarm.timeout_s")
        finally:
            job.seconds = self._clock() - began_s
            self._running.discard(job.replica)
        if job.state is JobState.RUNNING:
            job.state = JobState.FAILED if job.failed else JobState.DONE
        failed = job.state is JobState.FAILED
        text = "prewarming of a replica was incomplete" if failed else "replica is prewarmed"
        event = {"event": "warming_failed" if failed else "replica_warm", "fields": job.row()}
        log.log(logging.WARNING if failed else logging.INFO, text, extra=event)

    async def _warm(self, job: WarmupJob) -> None:
        failures, budget = 0, self._budget(job)
        for prefix in await self._prefixes(job):
            while self._sender.is_at_capacity(job.replica):  # noqa: ASYNC110 - clients first; rare
                await asyncio.sleep(PAUSE_S)
            try:
                usage = await self._sender.send(job.replica, prefix, budget - job.prompt_tokens)
            except WarmupSkipped as skipped:
                job.skipped += 1
                job.record_error(str(skipped))
                self._counted("skipped", 0)
            except SendFailed as failed:
                job.failed += 1
                failures += 1
                job.record_error(str(failed))
                self._counted("failed", 0)
                if failed.gone or failures >= FAILURES_MAX:
                    return
            else:
                failures = 0
                job.record_prompt(usage)
                self._counted("ok", usage.prompt_tokens)

    def _budget(self, job: WarmupJob) -> int:
        """Return the number of tokens to send, limited to the size of the cache. Otherwise the last prompts would evict
        the first."""
        member = self._fleet.member(job.replica)
        capacity = member.load.kv_tokens_max if member is not None else None
        return min(job.tokens_max, capacity) if capacity else job.tokens_max

    async def _prefixes(self, job: WarmupJob) -> list[WarmupPrompt]:
        """Return all prompts of the job. The file is read anew, because it may be long and is not kept in memory."""
        prefixes: list[WarmupPrompt] = []
        if job.file:
            try:
                prefixes += await asyncio.get_running_loop().run_in_executor(None, read, Path(job.file))
            except PrefixesError as error:
                job.failed += 1
                for problem in error.problems:
                    job.record_error(problem)
        prefixes += job.prefixes
        if job.templates:
            prefixes += [
                WarmupPrompt(each.path, each.body, each.key, each.messages)
                for each in self._hottest(job.templates)
                if each.key and each.body
            ]
        return prefixes

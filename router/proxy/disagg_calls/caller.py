"""Disaggregated prefill: a request is prefilled at one replica and decoded at the replica of its lease.

    NIXL       the prefill stage is awaited, since its answer locates the blocks; the decode stage follows
    others     both stages run at once, and either engine waits for the other one for up to minutes

No engine may be left waiting alone. A stage that fails therefore ends the other one at once, by closing its connection,
which makes the engine abort. If both run at once, a stream has limited time to begin after its prefill, because the
prefill replica may be gone before the blocks have arrived. If it is known to be gone, the router stops waiting at once,
since vLLM's decode engines are not notified and wait for up to 540 s. The failure is attributed to the replica of the
stage that failed first, and the request may be retried (attempts.py). Once the decode stage has begun, the prefill
stage runs to its end, since SGLang breaks a `bootstrap_room` when its prefill is closed. After the end of the decode
stage it has `linger_s` left.

A prefill stage may yield no blocks to fetch: the prompt is shorter than a block, the engine has no connector, or it
refuses the body that the router made. The cost is only that stage, and the decode replica computes the prompt alone.
The same happens if an answer of NIXL names a host that is not the prefill replica's own: the decode engine is not sent
there, and the prefill counts as failed. Only SGLang's refusal is forwarded to the client. Its engines accept no request
without a `bootstrap_room`, and both stages have the same body.

If a client leaves between the stages of NIXL, the prefill engine keeps unused blocks for 30 s. The same happens if the
decode request is sent on a connection that its engine has closed as idle. The decode engine frees the blocks when it
receives the request and sees it aborted (vLLM 0.32, nixl/pull_scheduler.py `request_finished`), so the router does
this.

Mooncake's decode engine reserves memory for requested blocks until they have arrived, or for 480 s, even if the request
is aborted. An aborted prefill sends no blocks (vLLM 0.32, mooncake_connector.py `record_send_reqs`). If a client
leaves, a decode stage that was sent is therefore closed, and its prefill stage runs to its end. For the same reason a
prefill stage on a connection that its engine has closed as idle is sent again in place, with the same transfer id.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from router.core.dialects.rank_field import for_rank
from router.core.disagg.bodies import decode_body, kv_transfer_params, prefill_body
from router.core.disagg.prefill_hosts import ForeignHost
from router.core.types.disagg_types import PrefillStage
from router.core.types.placements import EndReason, Outcome
from router.core.types.replicas import Replica
from router.http.engine_errors import EngineFailed, TransferFailed
from router.http.exchange import UpstreamResponse
from router.http.failures import (
    ClosedBeforeResponse,
    ConnectFailed,
    ForeignHostNamed,
    NoDescriptor,
    PrefillFailed,
    StaleConnection,
    TimedOut,
    TransferFirstByteTimeout,
    TransferTimeout,
    UpstreamError,
)
from router.http.upstream import Upstream
from router.ingress.proxied_request import ProxiedRequest
from router.ingress.token_estimate import validate_usage
from router.placement_api import LEFT, LeaseHandle, PlacementService
from router.proxy.disagg_calls.host_check import ForeignHosts
from router.proxy.disagg_calls.request_state import (
    DisaggRequest,
    await_transfer,
    has_answer,
    raise_if_failed,
    with_retry_id,
)

ID_BITS = 63  # an id that is an integer is signed and has 64 bits
LOOK_S = 0.25  # interval of the check for the end of a decode stage
RELEASES_MAX = 64  # concurrent stages that only free blocks; beyond that, engines free these when their lease expires
RELEASE_S = 1.0  # time that such a request has to reach its engine


class DisaggCaller:
    """Calls both replicas of disaggregated requests. `linger_s`, which may be replaced: seconds for which a prefill
    stage may continue after the end of its decode stage."""

    def __init__(
        self,
        placer: PlacementService,
        upstream: Upstream,
        *,
        clock: Callable[[], float],
        linger_s: float = 2.0,
        hosts: Sequence[str] = (),
    ) -> None:
        """`hosts`: hosts that prefill replicas may name in addition to their own (`disagg.hosts`)."""
        self.linger_s = linger_s
        self._placer = placer
        self._upstream = upstream
        self._clock = clock
        # prefill stages that continue, and requests that only free blocks
        self._detached: set[asyncio.Task[None]] = set()
        self._releases = 0  # number of stages in flight that only free blocks
        self._ids: set[str] = set()  # integer ids of open requests
        # Base URL of a server with a finished prefill -> futures of decode stages that have not begun, resolved if it
        # is gone.
        self.awaited: dict[str, set[asyncio.Future[None]]] = {}
        upstream.on_lost = self._on_replica_unreachable
        self._hosts = ForeignHosts(clock, hosts)

    async def close(self) -> None:
        """Cancel the tasks that outlived their request."""
        tasks = list(self._detached)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def open(self) -> int:
        """Number of prefill stages that continue, and of requests that only free blocks."""
        return len(self._detached)

    async def call(
        self,
        question: ProxiedRequest,
        lease: LeaseHandle,
        leg: PrefillStage,
        lines: Sequence[bytes],
        *,
        blocks_within_s: float | None = None,
        fresh: bool = False,
    ) -> UpstreamResponse:
        """Return when the answer of the decode stage has begun. Raises UpstreamError, which is PrefillFailed if the
        prefill replica is at fault.

        - `blocks_within_s`: if both stages run at once, the time that a stream has to begin after the end of the
          prefill stage. None: the same time as any answer.
        - `fresh`: both requests are sent on new connections.
        """
        split = DisaggRequest(question, lease, leg, lines, self._new_id(leg), fresh=fresh)
        if not leg.traits.concurrent:
            return await self._prefill_then_decode(split)
        return await self._prefill_and_decode(split, blocks_within_s)

    def _new_id(self, leg: PrefillStage) -> str:
        if not leg.traits.integer_ids:
            return secrets.token_hex(16)
        while (id_ := str(secrets.randbits(ID_BITS))) in self._ids:
            pass
        self._ids.add(id_)
        return id_

    # -- NIXL ----------------------------------------------------------------------------------------------------

    async def _prefill_then_decode(self, split: DisaggRequest) -> UpstreamResponse:
        came = await self._prefill(split)
        if isinstance(came, UpstreamError):
            self._conclude(split, came)
            raise PrefillFailed(split.leg.replica, came) from came
        params = kv_transfer_params(split.leg.connector, came.head) if came.status == 200 and came.whole else None
        if params is not None:
            try:
                params = self._hosts.check_transfer_params(split.leg, params, came.peer)
            except ForeignHost as error:
                return await self._reject_foreign_host(split, came, error)
        self._conclude(split, came, alone=params is None)
        if params is None:
            return await self._decode_only(split, split.lines)
        body = decode_body(split.question.body, split.leg.connector, "", "", None, params)
        sent: list[bool] = []
        try:
            answer = await self._decode(split, body, split.lines, lambda: sent.append(True))
        except BaseException:  # the client left
            if not sent:
                self._release(split, params)
            raise
        if isinstance(answer, StaleConnection):  # the engine closed the connection, and has not read the request
            self._release(split, params)
        return raise_if_failed(answer)

    async def _reject_foreign_host(
        self, split: DisaggRequest, came: UpstreamResponse, error: ForeignHost
    ) -> UpstreamResponse:
        """Return the answer of the decode replica alone, because the prefill replica names a foreign host."""
        prefill, failure = split.leg.replica, ForeignHostNamed(str(error))
        self._done(came)
        self._conclude(split, failure, alone=True)
        self._placer.count_attempt_failure(prefill, PrefillFailed(prefill, failure).kind)
        self._placer.report_pair_failure(prefill, split.lease.replica)
        self._hosts.report_foreign_host(prefill, str(error))
        return await self._decode_only(split, split.lines)

    def _release(self, split: DisaggRequest, params: bytes) -> None:
        """Send a request that makes the engine free blocks that no decode stage will fetch."""
        if self._releases >= RELEASES_MAX:
            return
        self._releases += 1
        path, asked = split.question.request.path, split.question.body
        one_token = prefill_body(path, asked, split.leg.connector, "", "", None)
        body = decode_body(one_token, split.leg.connector, "", "", None, params)
        self._go_on(self._free_blocks(split, body))

    async def _free_blocks(self, split: DisaggRequest, body: bytes) -> None:
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(RELEASE_S):  # the timeout closes the connection, which aborts the request
                    came = await self._decode(split, body, with_retry_id(split.lines))
                    self._done(came)
        finally:
            self._releases -= 1

    # -- both at once --------------------------------------------------------------------------------------------

    async def _prefill_and_decode(self, split: DisaggRequest, blocks_within_s: float | None) -> UpstreamResponse:
        leg = split.leg
        body = decode_body(split.question.body, leg.connector, split.id, leg.address, split.rank, b"")
        sent: list[bool] = []
        prefill = asyncio.create_task(self._prefill(split))
        decode = asyncio.create_task(self._decode(split, body, split.lines, lambda: sent.append(True)))
        begun: UpstreamResponse | None = None
        taken = False
        try:
            await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
            if prefill.done() and not has_answer(decode):
                came = prefill.result()
                if isinstance(came, UpstreamError):
                    taken = decode.done()
                    raise self._attribute_failure(split, came, decode.result() if taken else None)
                refused = came.status >= 400 and leg.traits.single_stage_engines
                alone = not refused and (came.status != 200 or kv_transfer_params(leg.connector, came.head) is None)
                self._conclude(split, came, alone=alone)
                if refused:
                    return came
                if alone:
                    self._abandon(decode)
                    return await self._decode_only(split, with_retry_id(split.lines))
                await self._blocks(split, decode, blocks_within_s)
            taken = True
            came = decode.result()
            if isinstance(came, TimedOut):
                if not prefill.done() and not leg.traits.answers_after_transfer:
                    raise PrefillFailed(leg.replica, came)  # the decode replica has waited for it
                raise TransferFirstByteTimeout(str(came))
            answer = raise_if_failed(came)
            begun = answer if answer.status < 400 else None
            return answer
        finally:
            if not taken:
                self._abandon(decode)
            asked = sent and not taken and not prefill.done()  # the decode replica may have requested the blocks
            if asked and leg.traits.reserves_until_sent and self._releases < RELEASES_MAX:
                self._outlast(split, prefill)
            else:
                self._leave(split, prefill, begun)

    async def _blocks(
        self, split: DisaggRequest, decode: asyncio.Task[UpstreamResponse | UpstreamError], within_s: float | None
    ) -> None:
        """Return when the decode stage has begun or failed, after the end of its prefill stage. Raises
        TransferTimeout."""
        server = Replica(split.leg.replica).url
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not split.leg.traits.answers_after_transfer:
            self.awaited.setdefault(server, set()).add(gone)
        try:
            await asyncio.wait((decode, gone), timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            others = self.awaited.get(server, set())
            others.discard(gone)
            if not others:
                self.awaited.pop(server, None)
        if decode.done():
            return
        if gone.done():
            raise TransferTimeout("its answer has not started, and the prefill replica was removed")
        if split.question.wanted.ask.stream:
            raise TransferTimeout("its answer has not started long after the prefill")
        await asyncio.wait((decode,))

    def _on_replica_unreachable(self, replica: str) -> None:
        """Fail the decode stages that wait for blocks of this replica, because its server is gone."""
        for gone in self.awaited.get(Replica(replica).url, ()):
            if not gone.done():
                gone.set_result(None)

    def _attribute_failure(
        self, split: DisaggRequest, came: UpstreamError, decode: UpstreamResponse | UpstreamError | None
    ) -> UpstreamError:
        """Return the failure of a request after its prefill stage failed. Its decode stage has not begun, or has failed
        too. A lost connection of one engine makes the other engine's stage fail, and not the reverse. SGLang answers a
        prefill when its blocks were taken, so its silence may be caused by the decode engine."""
        if isinstance(decode, (ClosedBeforeResponse, ConnectFailed)) and not isinstance(
            came, (ClosedBeforeResponse, ConnectFailed)
        ):
            self._conclude(split, None)
            return decode
        self._done(decode)
        if isinstance(came, TimedOut) and split.leg.traits.answers_after_transfer:
            self._conclude(split, None)
            return TransferFirstByteTimeout(str(came))
        self._conclude(split, came)
        return PrefillFailed(split.leg.replica, came)

    def _leave(
        self,
        split: DisaggRequest,
        prefill: asyncio.Task[UpstreamResponse | UpstreamError],
        begun: UpstreamResponse | None,
    ) -> None:
        """Let the prefill stage run to its end if the decode stage has begun; otherwise end it."""
        if begun is not None and not prefill.done():
            self._go_on(self._drain(split, prefill, begun))
            return
        self._end_prefill(split, prefill)

    def _outlast(self, split: DisaggRequest, prefill: asyncio.Task[UpstreamResponse | UpstreamError]) -> None:
        """Let the prefill stage run to its end although the decode stage is abandoned. Its blocks are sent then, which
        frees the memory reserved for them."""
        self._releases += 1
        self._go_on(self._await_prefill(split, prefill))

    async def _await_prefill(
        self, split: DisaggRequest, prefill: asyncio.Task[UpstreamResponse | UpstreamError]
    ) -> None:
        try:
            await asyncio.wait((prefill,))
        finally:
            self._releases -= 1
            self._end_prefill(split, prefill)

    async def _drain(
        self, split: DisaggRequest, prefill: asyncio.Task[UpstreamResponse | UpstreamError], begun: UpstreamResponse
    ) -> None:
        over_s: float | None = None
        try:
            while not prefill.done():
                await asyncio.wait((prefill,), timeout=LOOK_S)
                if begun.is_detached:
                    over_s = self._clock() if over_s is None else over_s
                    if self._clock() - over_s >= self.linger_s:
                        break
        finally:
            self._end_prefill(split, prefill)

    def _end_prefill(self, split: DisaggRequest, prefill: asyncio.Task[UpstreamResponse | UpstreamError]) -> None:
        """End the prefill stage if it has not ended yet, and report its outcome."""
        self._ids.discard(split.id)
        if not prefill.done():
            prefill.cancel()
            self._conclude(split, None)
            return
        came = None if prefill.cancelled() else prefill.result()
        if not split.concluded and isinstance(came, UpstreamError):
            mine = isinstance(came, NoDescriptor)  # a failure of the router itself
            self._placer.count_attempt_failure(
                "" if mine else split.leg.replica, PrefillFailed(split.leg.replica, came).kind
            )
            if isinstance(came, ConnectFailed) and came.refused:
                self._upstream.fail_silent_calls(split.leg.replica)
                self._placer.report_connection_refused(split.leg.replica)
        self._conclude(split, came)

    def _abandon(self, decode: asyncio.Task[UpstreamResponse | UpstreamError]) -> None:
        """Drop the decode stage, so that its engine aborts."""
        if not decode.done():
            decode.cancel()
        elif not decode.cancelled():
            self._done(decode.result())

    def _go_on(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._detached.add(task)
        task.add_done_callback(self._detached.discard)

    # -- either stage --------------------------------------------------------------------------------------------

    async def _prefill(self, split: DisaggRequest) -> UpstreamResponse | UpstreamError:
        """Return the whole answer of the prefill stage, or its failure."""
        question, leg = split.question, split.leg
        body = prefill_body(question.request.path, question.body, leg.connector, split.id, leg.address, split.rank)
        lines = [
            line for line in split.lines if line[:16].lower() != b"accept-encoding:"
        ]  # the router reads the answer
        came = await self._call_upstream(leg.replica, question, lines, body, whole=True, fresh=split.fresh)
        if isinstance(came, StaleConnection) and leg.traits.reserves_until_sent:
            # This engine has not read the request, but the decode engine may have reserved memory for its blocks.
            came = await self._call_upstream(leg.replica, question, lines, body, whole=True, fresh=True)
        if isinstance(came, UpstreamResponse) and came.status >= 500:
            return EngineFailed(came)
        return came

    async def _decode(
        self, split: DisaggRequest, body: bytes, lines: Sequence[bytes], sent: Callable[[], None] | None = None
    ) -> UpstreamResponse | UpstreamError:
        """Return the answer of the decode stage once it has begun, or its failure."""
        came = await self._call_upstream(split.lease.replica, split.question, lines, body, sent=sent, fresh=split.fresh)
        if isinstance(came, UpstreamResponse) and came.status >= 500:
            return TransferFailed(came)
        if isinstance(came, UpstreamResponse) and came.streams:
            return await await_transfer(came, split.question.request.path, split.question.dialect, self._upstream)
        return came

    async def _decode_only(self, split: DisaggRequest, lines: Sequence[bytes]) -> UpstreamResponse:
        """Return the answer of the decode replica when it computes the prompt too."""
        question = split.question
        return raise_if_failed(
            await self._call_upstream(split.lease.replica, question, lines, question.body, fresh=split.fresh)
        )

    async def _call_upstream(
        self,
        replica: str,
        question: ProxiedRequest,
        lines: Sequence[bytes],
        body: bytes,
        *,
        whole: bool = False,
        sent: Callable[[], None] | None = None,
        fresh: bool,
    ) -> UpstreamResponse | UpstreamError:
        request = question.request
        if "#" in replica and (rank := Replica(replica).rank) is not None:
            lines, body = for_rank(rank, request.path, lines, body)
        try:
            return await self._upstream.call(
                replica, request.method, request.target, lines, body, whole=whole, sent=sent, fresh=fresh
            )
        except UpstreamError as failure:
            return failure

    def _conclude(
        self, split: DisaggRequest, came: UpstreamResponse | UpstreamError | None, *, alone: bool = False
    ) -> None:
        """Report the end of the prefill stage to the placer, once. `came` None: the router ended it. `alone`: it yields
        no blocks, so there is no transfer to learn from."""
        if split.concluded:
            return
        split.concluded, split.leg.alone = True, alone
        self._done(came)
        outcome = LEFT
        if isinstance(came, UpstreamError):
            outcome = Outcome(came.ending)
        elif alone:
            outcome = Outcome(EndReason.REFUSED_BY_ENGINE)
        elif came is not None:
            outcome = self._outcome(split, came)
        self._placer.finish_prefill(split.lease, outcome, self._clock())

    def _outcome(self, split: DisaggRequest, answer: UpstreamResponse) -> Outcome:
        if answer.status >= 400:
            return Outcome(EndReason.REFUSED_BY_ENGINE)
        if not answer.whole:
            return Outcome(EndReason.OK)
        context_tokens = self._placer.context_tokens(split.question.wanted.model)
        usage = split.question.dialect.usage(answer.head)
        usage = validate_usage(usage, split.body_bytes, len(answer.head), context_tokens)
        if usage is not None:
            split.leg.found_tokens = usage.cached_tokens
        return Outcome(EndReason.OK, usage)

    def _done(self, came: UpstreamResponse | UpstreamError | None) -> None:
        """Return the connection to the pool, if there is one."""
        if isinstance(came, EngineFailed):
            self._upstream.done(came.answer)
        elif isinstance(came, UpstreamResponse):
            self._upstream.done(came)

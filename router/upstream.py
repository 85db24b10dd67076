"""Call one engine, and say of each failure what a retry may do.

Engines send status and headers before they prefill, so an answer only counts as begun with the first bytes of its
body: `call` returns then, and everything before is a failure that another replica may make good. Generation has no
side effects; what a retry costs is GPU time, which is why timeouts are not retried by default.

One watchdog for all calls replaces timers per call and per chunk. It ends calls that are silent for too long, and
those still silent on a replica that is known to be lost (vLLM 0.32 on SIGTERM closes its listener and leaves
requests in flight without a byte or a close).
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from router.core.dialects.sglang import with_rank
from router.core.facts import Replica

WATCH_INTERVAL_S = 0.5
SHUTTING_DOWN = (b"after shutdown", b"EngineCore encountered an issue", b"EngineDeadError")  # vLLM 0.32
STATUS_RETRIED = (502, 503)
LOST_SILENCE_S = 2.0  # a begun answer this silent, on a replica where nobody listens, will not go on
LINE_BYTES_MAX = 16 << 10  # of a status line or a header
ERROR_BEGINS = (b'data: {"error"', b'data:{"error"', b"event: error")
ERROR_BYTES_MAX = 64 << 10
# vLLM 0.32 (entrypoints/generate/base/serving.py) and SGLang 0.5.23 (entrypoints/openai/serving_base.py) read it.
RANK_HEADER = "X-data-parallel-rank"
READ_BYTES_MAX = 256 << 10  # aiohttp pauses the engine's socket when twice this is unread


class Failure(Exception):
    """An attempt that failed before its answer began. `kind` is a metric label; `retry` whether another may try."""

    kind = "failed"
    retry = True


class ConnectFailed(Failure):
    """Nothing was sent. `refused`: nobody listens there, which is proof that the engine is gone."""

    kind = "connect"

    def __init__(self, message: str, *, refused: bool) -> None:
        super().__init__(message)
        self.refused = refused


class BrokeEarly(Failure):
    """The connection broke, or the body ended, before it had begun (or was whole, for held answers)."""

    kind = "broke_early"


class ReplicaLost(Failure):
    """The request was silent, and its replica now refuses connections."""

    kind = "lost"


class TimedOut(Failure):
    """No byte of the body in time."""

    kind = "timeout"
    retry = False


class EngineFailed(Failure):
    """The engine answered that it cannot serve. `answer` is what it said, for when nobody else can either."""

    kind = "engine"

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"status {answer.status}")
        self.answer = answer


class BrokeMidway(Exception):
    """The answer broke off after its beginning; nothing can be retried."""


@dataclass(eq=False, slots=True)
class _Call:
    """What the watchdog knows of a call."""

    replica: str
    since_s: float
    timer: asyncio.Timeout | None = None
    response: aiohttp.ClientResponse | None = None
    cause: type[Failure] | None = None
    begun: bool = False
    reading: bool = True

    def end(self, cause: type[Failure]) -> None:
        """Wake the call up with a failure."""
        if self.cause is not None:
            return
        self.cause = cause
        if self.timer is not None:
            self.timer.reschedule(0)
        elif self.response is not None:
            self.response.close()


@dataclass(eq=False, slots=True)
class Answer:
    """An engine's answer that has begun."""

    status: int
    headers: CIMultiDictProxy[str]
    head: bytes  # first bytes of the body, or all of it
    whole: bool  # `head` is all
    _call: _Call | None = None
    _response: aiohttp.ClientResponse | None = None
    _calls: set[_Call] = field(default_factory=set)
    _clock: Callable[[], float] = lambda: 0.0

    async def pieces(self) -> AsyncIterator[bytes]:
        """The rest of the body as it comes. Raises BrokeMidway."""
        call, response = self._call, self._response
        if self.whole or call is None or response is None:
            return
        read = response.content.readany
        try:
            while True:
                call.since_s, call.reading = self._clock(), True
                piece = await read()
                call.reading = False
                if not piece:
                    return
                yield piece
        except (aiohttp.ClientError, OSError) as error:
            raise BrokeMidway("no byte in time" if call.cause is TimedOut else _say(error)) from error

    def close(self) -> None:
        """Give the connection back if the body was read to its end; otherwise break it, which cancels the engine's
        work (vLLM and SGLang abort a request whose client is gone)."""
        if self._call is not None:
            self._calls.discard(self._call)
        if self._response is not None:
            self._response.close()


class Upstream:
    """Connections to all engines."""

    def __init__(
        self,
        *,
        connect_timeout_s: float,
        first_byte_timeout_s: float,
        idle_timeout_s: float,
        keepalive_s: float,
        held_bytes_max: int,
    ) -> None:
        self._first_byte_timeout_s = first_byte_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._held_bytes_max = held_bytes_max
        self._calls: set[_Call] = set()
        self._loop = asyncio.get_running_loop()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=keepalive_s, ttl_dns_cache=10),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            read_bufsize=READ_BYTES_MAX,
            max_line_size=LINE_BYTES_MAX,
            max_field_size=LINE_BYTES_MAX,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def watch(self) -> None:
        """The watchdog: runs until cancelled."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            now_s = self._loop.time()
            for call in list(self._calls):
                limit_s = self._idle_timeout_s if call.begun else self._first_byte_timeout_s
                if call.reading and now_s - call.since_s > limit_s:
                    call.end(TimedOut)

    def lost(self, replica: str) -> None:
        """The replica refuses connections: its silent requests will never be answered, nor those of any other rank
        of its server."""
        server, silent_since_s = Replica(replica).url, self._loop.time() - LOST_SILENCE_S
        for call in list(self._calls):
            if Replica(call.replica).url == server and (
                not call.begun or (call.reading and call.since_s < silent_since_s)
            ):
                call.end(ReplicaLost)

    async def call(
        self,
        replica: str,
        method: str,
        path: str,
        headers: Mapping[str, str] | CIMultiDict[str],
        body: bytes,
        *,
        hold: bool,
    ) -> Answer:
        """Send a request, and return when its answer has begun; with `hold`, when it is whole or too long to hold.

        `path` includes the query, as the client encoded it. Raises a Failure.
        """
        call = _Call(replica, self._loop.time())
        self._calls.add(call)
        answer: Answer | None = None
        try:
            async with asyncio.timeout(None) as call.timer:
                answer = await self._begin(call, replica, method, path, headers, body, hold=hold)
        except aiohttp.ConnectionTimeoutError as error:  # is a TimeoutError too, so it comes first
            raise ConnectFailed(_say(error), refused=False) from error
        except TimeoutError as error:
            raise (call.cause or TimedOut)("no answer in time") from error
        except aiohttp.ClientConnectorError as error:
            refused = getattr(error.os_error, "errno", None) == errno.ECONNREFUSED
            raise ConnectFailed(_say(error), refused=refused) from error
        except (aiohttp.ClientError, OSError) as error:
            raise BrokeEarly(_say(error)) from error
        finally:
            call.timer = None
            if answer is None:
                self._calls.discard(call)
                if call.response is not None:
                    call.response.close()
        call.begun, call.since_s = True, self._loop.time()
        dying = answer.status == 500 and any(mark in answer.head for mark in SHUTTING_DOWN)
        if dying or answer.status in STATUS_RETRIED:
            raise EngineFailed(answer)
        return answer

    async def _begin(
        self,
        call: _Call,
        replica: str,
        method: str,
        path: str,
        headers: Mapping[str, str] | CIMultiDict[str],
        body: bytes,
        *,
        hold: bool,
    ) -> Answer:
        server, rank = Replica(replica).url, Replica(replica).rank
        if rank is not None:
            headers, body = _for_rank(rank, path, headers, body)
        url = URL(server + path, encoded=True)
        response = await self._session.request(method, url, data=body or None, headers=headers, allow_redirects=False)
        call.response = response
        if response.status < 200:
            raise BrokeEarly(f"status {response.status}")  # an upgrade that nobody asked for
        streams = response.content_type == "text/event-stream"
        head, whole = await self._head(call, response, hold=hold or not streams)
        if streams and not head:
            raise BrokeEarly("the stream ended before its first event")
        return Answer(response.status, response.headers, head, whole, call, response, self._calls, self._loop.time)

    async def _head(self, call: _Call, response: aiohttp.ClientResponse, *, hold: bool) -> tuple[bytes, bool]:
        """First bytes of the body, and whether they are all of it."""
        content = response.content
        if not hold:
            head = await content.readany()
            # An error as first event may be retried, so it is read whole before it counts.
            while head.startswith(ERROR_BEGINS) and b"\n\n" not in head and len(head) < ERROR_BYTES_MAX:
                piece = await content.readany()
                if not piece:
                    break
                head += piece
            return head, False
        pieces: list[bytes] = []
        size = 0
        while size <= self._held_bytes_max:
            piece = await content.readany()
            if not piece:
                return b"".join(pieces), True
            pieces.append(piece)
            size += len(piece)
            call.since_s = self._loop.time()  # bytes flow: the time to the first one starts afresh
        return b"".join(pieces), False


def _for_rank(
    rank: int, path: str, headers: Mapping[str, str] | CIMultiDict[str], body: bytes
) -> tuple[CIMultiDict[str], bytes]:
    """Headers and body that reach one rank of a server; a client's own wish gives way to the placement."""
    headers = CIMultiDict(headers)
    headers[RANK_HEADER] = str(rank)
    is_generate = path.partition("?")[0] == "/generate" and body
    return headers, with_rank(body, rank) if is_generate else body


def _say(error: BaseException) -> str:
    """One line without addresses, which are the operator's business and not the client's."""
    cause = getattr(error, "os_error", None) or error
    return getattr(cause, "strerror", None) or type(cause).__name__

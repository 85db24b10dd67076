"""HTTP client of a replay: requests with their streamed answers, and the engines' counters.

A request is cheap on purpose, because the client shares its machine with the measured processes. The body is encoded
once, before the request is due, and a stream is never parsed event by event. Only two parts of the stream matter:

- the first event with content, which gives the time to first token
- the usage in the last event before `[DONE]`
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any, Literal

import aiohttp
import msgspec

from loadtest.common.traces import Request

Endpoint = Literal["chat", "completions"]
PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
REJECTED_STATUSES = frozenset({429, 503})
HEAD_BYTES_MAX = 65_536
TAIL_BYTES = 4_096
"""Enough for the usage event, `[DONE]` and anything that a server may put between them."""
FIRST_CONTENT = re.compile(rb'"(?:content|text|reasoning|reasoning_content|arguments)":\s*"[^"]')
ERROR_EVENT = re.compile(rb'(?:^|\n)data:\s*\{"error"')
SET_UP_TIMEOUT_S = 10.0
READ_BUFFER_BYTES = 1 << 18

COUNTERS = (("vllm:prefix_cache_queries", "vllm:prefix_cache_hits"), ("sglang:prompt_tokens", "sglang:cached_tokens"))
"""Names of two counters per engine: prompt tokens looked up in its prefix cache, and prompt tokens found there."""


class ReplayError(Exception):
    """The run could not start or be measured; the message names the reason."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Outcome of one request. Times are wall-clock seconds from the moment it was due."""

    ttft_s: float | None
    e2e_s: float
    failure: str = ""
    """Empty, or the reason of the failure: `timeout`, `connect`, `broken`, `cut`, `error_event`, `http_500` ..."""
    rejected: bool = False
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    completion_tokens: int = 0
    replica: str | None = None
    """The replica that answered, if the router reports it."""
    engine_ttft_s: float | None = None
    """Simulated seconds to the first token as the engine reports them, if it does."""
    waited_s: float = 0.0
    """Time for which the router deferred the request before its placement, as the router reports it."""


class PromptDetails(msgspec.Struct):
    """An engine's figures for the prompt; vLLM fills it with `--enable-prompt-tokens-details`."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """The part of OpenAI's usage object that is measured."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None
    ttft_s: float | None = None


class UsageEvent(msgspec.Struct):
    """A streamed event, of which only the usage is read."""

    usage: Usage | None = None


class StreamScan:
    """Keeps the first and the last bytes of a stream of server-sent events, and the time of its first content."""

    def __init__(self) -> None:
        self.first_content_at: float | None = None
        self.first_byte_at: float | None = None
        self._head = b""
        self._tail = b""

    def feed(self, chunk: bytes, now: float) -> None:
        """Process the next bytes, which arrived at `now`."""
        if self.first_content_at is None:
            self.first_byte_at = self.first_byte_at or now
            self._head += chunk
            if FIRST_CONTENT.search(self._head) or len(self._head) > HEAD_BYTES_MAX:
                self.first_content_at = now
        self._tail = chunk[-TAIL_BYTES:] if len(chunk) >= TAIL_BYTES else (self._tail + chunk)[-TAIL_BYTES:]

    @property
    def failure(self) -> str:
        """`error_event` or `cut` if the stream did not end well, otherwise empty."""
        if ERROR_EVENT.search(self._tail):
            return "error_event"
        return "" if b"data: [DONE]" in self._tail[-64:] else "cut"

    def usage(self) -> Usage:
        """Return the last usage reported, or zeros without one."""
        for line in reversed(self._tail.split(b"\n")):
            if line.startswith(b"data:") and b'"usage"' in line:
                try:
                    usage = msgspec.json.decode(line[5:], type=UsageEvent).usage
                except msgspec.DecodeError:
                    continue
                if usage is not None:
                    return usage
        return Usage()


def body_of(
    request: Request, model: str, endpoint: Endpoint, tokens: int, limit: int | None, *, ignore_eos: bool = False
) -> bytes:
    """Return the request's JSON.

    `limit` is its `max_tokens`, as a client sends it; None for no limit. `tokens` is the length of the answer and
    becomes `min_tokens`: a simulated engine ends the answer there, as a model does at its end-of-sequence token.
    Routers relay this field of vLLM and SGLang, and none places by it. A real engine ends an answer of a known length
    only at its limit. So with `ignore_eos` the limit must be the length, and `min_tokens` is left out.
    """
    body: dict[str, Any] = {"model": model}
    if endpoint == "chat":
        body["messages"] = [{"role": "user", "content": text} for text in request.messages()]
    else:
        body["prompt"] = request.text()
    if limit is not None:
        body["max_tokens"] = limit
    body |= {"ignore_eos": True} if ignore_eos else {"min_tokens": tokens}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    return msgspec.json.encode(body)


class Client:
    """Sends requests to OpenAI-compatible URLs in rotation, over a session that the caller owns."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *urls: str,
        model: str,
        endpoint: Endpoint,
        timeout_wall_s: float,
        ignore_eos: bool = False,
    ) -> None:
        self._session = session
        self._urls = cycle(url.rstrip("/") + PATHS[endpoint] for url in urls)
        self._model = model
        self._endpoint = endpoint
        self._timeout_wall_s = timeout_wall_s
        self._ignore_eos = ignore_eos

    def body(self, request: Request, tokens: int, limit: int | None) -> bytes:
        """Return the JSON of a request (`body_of`)."""
        return body_of(request, self._model, self._endpoint, tokens, limit, ignore_eos=self._ignore_eos)

    async def send(self, body: bytes, due: float, headers: dict[str, str]) -> Answer:
        """Send a request and read its answer to the end.

        Raises only on cancellation. `due` is a time of `time.perf_counter`.
        """
        scan = StreamScan()
        failure, replica, rejected, waited_s = "", None, False, 0.0
        try:
            async with (
                asyncio.timeout(self._timeout_wall_s),
                self._session.post(next(self._urls), data=body, headers=headers) as response,
            ):
                replica = response.headers.get("x-warmroute-replica")
                waited_s = float(response.headers.get("x-warmroute-waited-ms", 0)) / 1e3
                if response.status != 200:
                    failure, rejected = f"http_{response.status}", response.status in REJECTED_STATUSES
                else:
                    async for chunk in response.content.iter_any():
                        scan.feed(chunk, time.perf_counter())
                    failure = scan.failure
        except TimeoutError:
            failure = "timeout"
        except aiohttp.ClientConnectorError:
            failure = "connect"
        except (aiohttp.ClientError, OSError):
            failure = "broken"
        return replace(_answer(scan, due, failure, rejected, replica), waited_s=waited_s)


def _answer(scan: StreamScan, due: float, failure: str, rejected: bool, replica: str | None) -> Answer:
    e2e_s = time.perf_counter() - due
    if failure:
        return Answer(None, e2e_s, failure, rejected, replica=replica)
    usage = scan.usage()
    details = usage.prompt_tokens_details
    first_at = scan.first_content_at or scan.first_byte_at
    return Answer(
        ttft_s=None if first_at is None else first_at - due,
        e2e_s=e2e_s,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=details.cached_tokens if details else None,
        completion_tokens=usage.completion_tokens,
        replica=replica,
        engine_ttft_s=usage.ttft_s,
    )


# Around a run


def open_unlimited_session() -> aiohttp.ClientSession:
    """Return a session for a `Client`: unlimited keep-alive connections, and answers that are not decompressed."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=SET_UP_TIMEOUT_S),
        read_bufsize=READ_BUFFER_BYTES,
        auto_decompress=False,
    )


async def first_model(session: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> str:
    """Return the first model that `/v1/models` lists."""
    text = await _get(session, f"{url.rstrip('/')}/v1/models", headers)
    try:
        models: list[dict[str, object]] = msgspec.json.decode(text)["data"]
        return str(models[0]["id"])
    except (msgspec.DecodeError, KeyError, IndexError, TypeError) as error:
        raise ReplayError(f"{url}/v1/models lists no model; set --model") from error


async def read_counters(session: aiohttp.ClientSession, replicas: Sequence[str]) -> list[tuple[float, float]]:
    """Return (prompt tokens looked up, prompt tokens found in cache) of each replica since it started."""
    pages = await asyncio.gather(*(_get(session, f"{url.rstrip('/')}/metrics", {}) for url in replicas))
    counters = []
    for url, page in zip(replicas, pages, strict=True):
        sums = _counter_sums(page)
        names = next((pair for pair in COUNTERS if pair[0] in sums), None)
        if names is None:
            raise ReplayError(f"{url}/metrics has no counter of {', '.join(c[0] for c in COUNTERS)}")
        counters.append((sums[names[0]], sums.get(names[1], 0.0)))
    return counters


def _counter_sums(page: str) -> dict[str, float]:
    """Return the sums over labels of the known counters, by name without `_total`."""
    known = {name for pair in COUNTERS for name in pair}
    sums: dict[str, float] = {}
    for line in page.splitlines():
        match = re.match(r"([a-zA-Z_:]+?)(?:_total)?(?:\{.*\})? ([-+.0-9eE]+)", line)
        if match and match[1] in known:
            sums[match[1]] = sums.get(match[1], 0.0) + float(match[2])
    return sums


async def _get(session: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> str:
    try:
        async with asyncio.timeout(SET_UP_TIMEOUT_S), session.get(url, headers=headers) as response:
            if response.status != 200:
                raise ReplayError(f"{url} answered {response.status}")
            return await response.text()
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise ReplayError(f"{url}: {error or type(error).__name__}") from error

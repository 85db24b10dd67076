"""What a client asks: a request is parsed, and its prompt hashed, before anything is decided.

Long bodies are parsed and hashed in one thread beside the event loop: in several they would fight over the
interpreter, and the loop with them. What the router cannot read it passes on; it refuses only what no engine could
take (no JSON, compressed) and what no replica serves.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from router.core.blocks import Chain, chain_of, ring_key
from router.core.dialects import OPENAI, PATHS, BadBody, Dialect, spoken_on
from router.core.dialects.seen import Seen
from router.core.dialects.wire import nests_deeper
from router.core.facts import Ask
from router.core.models import NoReplica, UnknownModel
from router.exchange import HOP_HEADERS
from router.placing import Placer, Wanted
from router.receiving import Request
from router.tokens import Tokens

RESPONSES = "/v1/responses"
# They need no prefill.
FREE_PATHS = ("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/v1/messages/count_tokens")
BYTES_PER_TOKEN = 4  # of a body whose prompt is unknown
PAUSE_BYTES_MIN, PAUSE_BYTES_PER_S = 1 << 20, 1 << 29  # beyond a MiB its thread rests two milliseconds for each
SEEN_BYTES_MAX = 16 << 20  # remembered of the beginnings of bodies, by each of the two threads that read them

_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[\w-]{1,128})"')
_MULTIPART_MODEL = re.compile(rb'name="model"\r\n\r\n([^\r\n]{1,256})\r\n')


class Refusal(Exception):
    """The router itself answers, in the dialect's error body."""

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, *, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after_s = status, code, param, retry_after_s


@dataclass(slots=True)
class Question:
    """A request as far as it is understood before placing."""

    request: Request
    lines: list[bytes]  # header lines for the engine
    body: bytes
    dialect: Dialect
    wanted: Wanted
    strip_usage: bool

    @property
    def stored(self) -> bool:
        """Whether the engine may keep the answer, so that it must not be made twice."""
        return self.request.path.startswith(RESPONSES) and self.wanted.ask.stored is not False


class Reader:
    """Turns requests into Questions."""

    def __init__(
        self,
        placer: Placer,
        tokens: Tokens | None,
        *,
        offload_bytes_min: int,
        ask_usage: bool,
        json_depth_max: int = 256,
    ) -> None:
        """`tokens` turns prompts into token ids; without it every prompt is placed by estimate."""
        self._placer = placer
        self._tokens = tokens
        self._offload_bytes_min = offload_bytes_min
        self._ask_usage = ask_usage
        self._depth_max = json_depth_max
        self._thread = ThreadPoolExecutor(1, "parse")
        self._seen, self._seen_long = (Seen(bytes_max=SEEN_BYTES_MAX, seed=secrets.randbits(64)) for _ in range(2))

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def understand(self, request: Request, request_id: str) -> Question:
        """Parse the body and hash the prompt. Raises Refusal."""
        if request.fields.get(b"content-encoding", b"identity").lower() != b"identity":
            raise Refusal(415, "unsupported_encoding", "Compressed request bodies are not accepted.")
        path = request.path
        dialect = PATHS.get(path)
        try:
            ask, model, chain = await self._placing_facts(request, dialect)
        except BadBody as error:
            raise Refusal(400, error.code, str(error)) from error
        body = request.body
        tokens = None
        if self._tokens is not None and dialect is not None and model and self._placer.follows():
            view = self._placer.token_view(model)
            tokens = await self._tokens.of(dialect, path, body, ask, model, view) if view is not None else None
        ask.decoded = None  # not kept while the answer comes
        strip_usage = self._ask_usage and dialect is not None and ask.stream and not ask.wants_usage
        return Question(
            request=request,
            lines=_forward_lines(request, request_id),
            body=dialect.with_usage(body) if strip_usage and dialect else body,
            dialect=dialect or spoken_on(path),
            wanted=Wanted(
                ask,
                model,
                chain,
                ring_key(ask, chain, request.header(b"x-session-id"), body),
                tokens,
                0 if path in FREE_PATHS else len(body) // BYTES_PER_TOKEN,
                ask.response_id or _response_id(path),
            ),
            strip_usage=strip_usage,
        )

    async def _placing_facts(self, request: Request, dialect: Dialect | None) -> tuple[Ask, str | None, Chain | None]:
        """What is asked, the model meant, and the prompt's keys. Raises BadBody and Refusal."""
        path = request.path
        if dialect is None:
            if request.body_bytes < self._offload_bytes_min:
                ask = _parse_other(request, self._depth_max)
            else:
                run = asyncio.get_running_loop().run_in_executor
                ask = await run(self._thread, _parse_other, request, self._depth_max)
            return ask, self._model(ask, required=False), None
        keep = self._tokens is not None and self._placer.follows()
        if request.body_bytes < self._offload_bytes_min:
            _check_depth(request.body, self._depth_max)
            ask = dialect.parse(path, request.body, keep=keep, seen=self._seen)
            model = self._model(ask, required=True)
            return ask, model, _hashed(ask, model)
        run = asyncio.get_running_loop().run_in_executor
        ask, chain = await run(self._thread, _read_long, dialect, request, keep, self._seen_long, self._depth_max)
        model = self._model(ask, required=True)
        if chain is None and ask.model is None:
            chain = await run(self._thread, _hashed, ask, model)
        return ask, model, chain

    def _model(self, ask: Ask, *, required: bool) -> str | None:
        try:
            if ask.model is None and not required:
                return None
            return self._placer.resolve(ask.model)
        except NoReplica as error:
            raise none_ready() from error
        except UnknownModel as error:
            known = ", ".join(error.known[:20]) or "none"
            what = f"The model '{ask.model}' does not exist" if ask.model else "The request names no model"
            raise Refusal(
                404 if ask.model else 400, "model_not_found", f"{what}; served are: {known}.", "model"
            ) from error


def _hashed(ask: Ask, model: str | None) -> Chain | None:
    """In the thread in which it was parsed (core/dialects/seen.py)."""
    if ask.prompt is None or model is None:
        return None
    chain = chain_of(ask, model)
    ask.prompt.let_go()
    return chain


def _check_depth(body: bytes, depth_max: int) -> None:
    """Raises BadBody. Fields that are only passed on may have no depth either that ends an engine's process."""
    if nests_deeper(body, depth_max):
        raise BadBody("invalid_json", f"The request body has more than {depth_max} levels of JSON within one another.")


def _read_long(dialect: Dialect, request: Request, keep: bool, seen: Seen, depth_max: int) -> tuple[Ask, Chain | None]:
    """Put together, parse, and hash for the model that is named; a request that names none is hashed once it is known.

    Each step holds the interpreter for milliseconds, and the event loop, which lets go of it between any two sockets,
    would get to one socket in between. So behind a very long body's steps the thread rests, and the loop gets to all.
    """
    pause_s = max(0, request.body_bytes - PAUSE_BYTES_MIN) / PAUSE_BYTES_PER_S
    body = request.body
    time.sleep(pause_s)
    _check_depth(body, depth_max)
    ask = dialect.parse(request.path, body, keep=keep, seen=seen)
    time.sleep(pause_s)
    chain = _hashed(ask, ask.model)
    time.sleep(pause_s)
    return ask, chain


def _parse_other(request: Request, depth_max: int) -> Ask:
    """A path whose prompts the index does not read: its model, and whatever keeps it with a replica."""
    if request.fields.get(b"content-type", b"").startswith(b"multipart/"):
        found = _MULTIPART_MODEL.search(request.body)
        return Ask(found[1].decode(errors="replace") if found else None)
    if not request.body:
        return Ask(None)
    _check_depth(request.body, depth_max)
    ask = OPENAI.parse(request.path, request.body, keep=False)
    ask.prompt = None
    return ask


def _forward_lines(request: Request, request_id: str) -> list[bytes]:
    named: tuple[bytes, ...] = ()
    if b"connection" in request.fields:  # it may name others that are for us alone
        named = tuple(token.strip().lower() for token in request.fields[b"connection"].split(b","))
    lines = [
        b"%b: %b\r\n" % (name, value)
        for low, name, value in request.lines
        if low not in HOP_HEADERS and low not in named and low != b"x-request-id"
    ]
    lines.append(f"X-Request-Id: {request_id}\r\n".encode())
    return lines


def _response_id(path: str) -> str | None:
    """Of a path below /v1/responses."""
    return path.removeprefix(RESPONSES + "/").partition("/")[0] if path.startswith(RESPONSES + "/") else None


def made_response(head: bytes) -> str | None:
    """The response id at the beginning of an answer."""
    found = _RESPONSE_ID.search(head, 0, 65_536)
    return found[1].decode() if found else None


def none_ready() -> Refusal:
    """The answer when nobody can take a request now."""
    return Refusal(503, "no_replica_ready", "No replica is ready to take this request.")

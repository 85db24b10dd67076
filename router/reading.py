"""What a client asks: a request is read, parsed, and its prompt hashed, before anything is decided.

Long bodies are parsed and hashed off the event loop. What the router cannot read it passes on; it refuses only what
no engine could take (no JSON, too large, compressed) and what no replica serves.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, replace

from aiohttp import web
from aiohttp.web_exceptions import HTTPRequestEntityTooLarge
from multidict import CIMultiDict
from yarl import URL

from router.core.blocks import Chain, chain_of, ring_key
from router.core.dialects import OPENAI, PATHS, BadBody, Dialect, spoken_on
from router.core.facts import Ask
from router.core.keys import TokenPrompt
from router.core.models import NoReplica, UnknownModel
from router.core.routing import Router
from router.tokens import Tokens

RESPONSES = "/v1/responses"
# They need no prefill.
FREE_PATHS = ("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/v1/messages/count_tokens")
BYTES_PER_TOKEN = 4  # of a body whose prompt is unknown
HASH_BYTES_MAX = 1 << 20  # hashed on the event loop, in half a millisecond: a hop to a thread costs as much

# RFC 9110 section 7.6.1: these belong to one connection. Content-Length is made anew from the body.
HOP_HEADERS = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
     "transfer-encoding", "upgrade", "content-length", "host", "expect")
)  # fmt: skip
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[\w-]{1,128})"')
_MULTIPART_MODEL = re.compile(rb'name="model"\r\n\r\n([^\r\n]{1,256})\r\n')


class Refusal(Exception):
    """The router itself answers, in the dialect's error body."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


@dataclass(slots=True)
class Question:
    """A request as far as it is understood before placing."""

    target: str  # path and query, as the client encoded them
    path: str  # decoded, without query
    method: str
    headers: CIMultiDict[str]
    body: bytes
    dialect: Dialect
    ask: Ask
    model: str | None
    chain: Chain | None
    ring_key: str
    body_tokens: int
    only: str | None
    strip_usage: bool
    tokens: TokenPrompt | None  # where they are known and tell something


class ResponseOwners:
    """Which replica made which stored response; bounded, oldest forgotten first."""

    def __init__(self, ids_max: int) -> None:
        self._ids_max = ids_max
        self._owners: dict[str, str] = {}

    def learn(self, head: bytes, replica: str) -> None:
        """Find the response id at the beginning of an answer."""
        found = _RESPONSE_ID.search(head, 0, 65_536)
        if found:
            self._owners[found[1].decode()] = replica
            if len(self._owners) > self._ids_max:
                del self._owners[next(iter(self._owners))]

    def owner(self, response_id: str | None) -> str | None:
        """The replica, if it is remembered."""
        return self._owners.get(response_id) if response_id else None


class Reader:
    """Turns requests into Questions."""

    def __init__(
        self,
        router: Router,
        tokens: Tokens | None,
        *,
        offload_bytes_min: int,
        response_ids_max: int,
        ask_usage: bool,
    ) -> None:
        """`tokens` turns prompts into token ids; without it every prompt is placed by estimate."""
        self._router = router
        self._tokens = tokens
        self._offload_bytes_min = offload_bytes_min
        self._ask_usage = ask_usage
        self.owners = ResponseOwners(response_ids_max)

    async def understand(self, request: web.Request, body: bytes, request_id: str) -> Question:
        """Parse the body and hash the prompt; long ones off the event loop. Raises Refusal."""
        path = request.path
        dialect = PATHS.get(path)
        loop = asyncio.get_running_loop()
        long = len(body) >= self._offload_bytes_min
        try:
            if dialect is None:
                ask = _parse_other(request, body)
            elif long:
                ask = await loop.run_in_executor(None, dialect.parse, path, body)
            else:
                ask = dialect.parse(path, body)
        except BadBody as error:
            raise Refusal(400, error.code, str(error)) from error
        model = self._model(ask, required=dialect is not None)
        chain = None
        if ask.prompt is not None and model is not None:
            hop = len(ask.prompt.text) >= HASH_BYTES_MAX
            chain = await loop.run_in_executor(None, chain_of, ask, model) if hop else chain_of(ask, model)
        tokens = None
        if self._tokens is not None and dialect is not None and model and self._router.models.follows(model):
            tokens = await self._tokens.of(dialect, path, body, ask, model)
        strip_usage = self._ask_usage and dialect is not None and ask.stream and not ask.wants_usage
        response_id = ask.response_id or request.match_info.get("response_id")
        return Question(
            target=_target(request),
            path=path,
            method=request.method,
            headers=_forward_headers(request, request_id),
            body=dialect.with_usage(body) if strip_usage and dialect else body,
            dialect=dialect or spoken_on(path),
            ask=replace(ask, decoded=None) if ask.decoded is not None else ask,  # not kept while the answer comes
            model=model,
            chain=chain,
            ring_key=ring_key(ask, chain, request.headers.get("x-session-id"), body),
            body_tokens=0 if path in FREE_PATHS else len(body) // BYTES_PER_TOKEN,
            only=self.owners.owner(response_id),
            strip_usage=strip_usage,
            tokens=tokens,
        )

    def _model(self, ask: Ask, *, required: bool) -> str | None:
        try:
            if ask.model is None and not required:
                return None
            return self._router.models.resolve(ask.model)
        except NoReplica as error:
            raise none_ready() from error
        except UnknownModel as error:
            known = ", ".join(error.known[:20]) or "none"
            what = f"The model '{ask.model}' does not exist" if ask.model else "The request names no model"
            raise Refusal(
                404 if ask.model else 400, "model_not_found", f"{what}; served are: {known}.", "model"
            ) from error


async def read(request: web.Request) -> bytes:
    """The whole body. Raises Refusal when it is compressed or too large."""
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise Refusal(415, "unsupported_encoding", "Compressed request bodies are not accepted.")
    try:
        return await request.read()
    except HTTPRequestEntityTooLarge as error:
        limit = request.client_max_size
        raise Refusal(413, "body_too_large", f"The request body is larger than {limit} bytes.") from error


def _parse_other(request: web.Request, body: bytes) -> Ask:
    """A path whose prompts the index does not read: its model, and whatever keeps it with a replica."""
    if request.content_type.startswith("multipart/"):
        found = _MULTIPART_MODEL.search(body)
        return Ask(found[1].decode(errors="replace") if found else None)
    if not body:
        return Ask(None)
    ask = OPENAI.parse(request.path, body)
    return replace(ask, prompt=None)


def _forward_headers(request: web.Request, request_id: str) -> CIMultiDict[str]:
    named = {token.strip().lower() for token in request.headers.get("Connection", "").split(",")}
    headers = CIMultiDict(
        (k, v) for k, v in request.headers.items() if k.lower() not in HOP_HEADERS and k.lower() not in named
    )
    headers["X-Request-Id"] = request_id
    return headers


def _target(request: web.Request) -> str:
    """Path and query; a client that takes us for a forward proxy sends a whole URL (RFC 9112 section 3.2.2)."""
    raw = request.raw_path
    return raw if raw.startswith("/") else URL(raw, encoded=True).raw_path_qs


def none_ready() -> Refusal:
    """The answer when nobody can take a request now."""
    return Refusal(503, "no_replica_ready", "No replica is ready to take this request.")

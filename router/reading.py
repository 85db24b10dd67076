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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from router.core.blocks import Chain, chain_of, ring_key
from router.core.dialects import OPENAI, PATHS, BadBody, Dialect, spoken_on, tenancy
from router.core.dialects.forms import form_model
from router.core.dialects.seen import Seen
from router.core.dialects.wire import nests_deeper
from router.core.facts import Ask
from router.core.models import NoReplica, UnknownModel
from router.exchange import HOP_HEADERS
from router.keys import ANYBODY, Caller, Tenant
from router.moments import Moments
from router.placing import Placer, Wanted
from router.receiving import Request
from router.tokens import Tokens

RESPONSES = "/v1/responses"
# They need no prefill.
FREE_PATHS = ("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/v1/messages/count_tokens")
BYTES_PER_TOKEN = 4  # of a body whose prompt is unknown
PAUSE_BYTES_MIN, PAUSE_BYTES_PER_S = 1 << 20, 1 << 29  # beyond a MiB its thread rests two milliseconds for each
SEEN_BYTES_MAX = 16 << 20  # remembered of the beginnings of bodies, by each of the two threads that read them

CREDENTIALS = frozenset((b"authorization", b"x-api-key"))
TENANT, PRIORITY = b"x-warmroute-tenant", b"x-warmroute-priority"  # hints, which are for us alone

_NOT_SENT_ON = HOP_HEADERS | {b"x-request-id", TENANT, PRIORITY}
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
    receipts: bool = True  # whether its caller may be told where the prompt was found
    trace: Moments | None = None  # of one that is traced

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
        secret: str = "",
        json_depth_max: int = 256,
    ) -> None:
        """`tokens` turns prompts into token ids; without it every prompt is placed by estimate. From the `secret`
        isolated tenants' salts are made."""
        self._placer = placer
        self._tokens = tokens
        self._offload_bytes_min = offload_bytes_min
        self.ask_usage = ask_usage
        self._depth_max = json_depth_max
        self._thread = ThreadPoolExecutor(1, "parse")
        self._seen, self._seen_long = (Seen(bytes_max=SEEN_BYTES_MAX, seed=secrets.randbits(64)) for _ in range(2))
        self._secret = secret.encode()
        self.credentials(passed_on=True, api_key="")

    def credentials(self, *, passed_on: bool, api_key: str) -> None:
        """From now on clients' own credentials are passed on to replicas or not; with an `api_key`, it is sent in
        their place."""
        self._not_sent_on = _NOT_SENT_ON if passed_on and not api_key else _NOT_SENT_ON | CREDENTIALS
        self._own_lines = [f"Authorization: Bearer {api_key}\r\n".encode()] if api_key else []

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def understand(self, request: Request, request_id: str, caller: Caller = ANYBODY) -> Question:
        """Parse the body and hash the prompt. Raises Refusal."""
        if request.fields.get(b"content-encoding", b"identity").lower() != b"identity":
            raise Refusal(415, "unsupported_encoding", "Compressed request bodies are not accepted.")
        path = request.path
        dialect = PATHS.get(path)
        try:
            ask, model, chain = await self._placing_facts(request, dialect, caller)
        except BadBody as error:
            raise Refusal(400, error.code, str(error)) from error
        body = await self._own_body(request, ask, model, caller)
        tokens = None
        if self._tokens is not None and dialect is not None and model and self._placer.follows():
            view = self._placer.token_view(model)
            tokens = await self._tokens.of(dialect, path, body, ask, model, view) if view is not None else None
        ask.decoded = None  # not kept while the answer comes
        strip_usage = self.ask_usage and dialect is not None and ask.stream and not ask.wants_usage
        return Question(
            request=request,
            lines=self._forward_lines(request, request_id),
            body=dialect.with_usage(body) if strip_usage and dialect else body,
            dialect=dialect or spoken_on(path),
            wanted=Wanted(
                ask,
                model,
                chain,
                ring_key(ask, chain, request.header(b"x-session-id"), body),
                tokens,
                0 if path in FREE_PATHS else len(body) // BYTES_PER_TOKEN,
                _response_id(path) or ask.response_id,
                caller.name,
                caller.priority,
                len(body),
            ),
            strip_usage=strip_usage,
            receipts=caller.tenant is None or caller.tenant.receipts,
        )

    async def _placing_facts(
        self, request: Request, dialect: Dialect | None, caller: Caller
    ) -> tuple[Ask, str | None, Chain | None]:
        """What is asked, the model meant, and the prompt's keys. Raises BadBody and Refusal."""
        path = request.path
        if dialect is None:
            limited = _must_name_model(path, caller)
            if request.body_bytes < self._offload_bytes_min:
                ask = _parse_other(request, self._depth_max, limited)
            else:
                run = asyncio.get_running_loop().run_in_executor
                ask = await run(self._thread, _parse_other, request, self._depth_max, limited)
            return ask, self._model(ask, caller, required=limited), None
        keep = self._tokens is not None and self._placer.follows()
        salt = self._salting(caller)
        if request.body_bytes < self._offload_bytes_min:
            _check_depth(request.body, self._depth_max)
            self._seen.apart(salt(b"") if salt else b"")
            ask = dialect.parse(path, request.body, keep=keep, seen=self._seen)
            if salt is not None:
                ask.salt = salt(ask.salt)
            model = self._model(ask, caller, required=True)
            return ask, model, _hashed(ask, model)
        run = asyncio.get_running_loop().run_in_executor
        ask, chain = await run(self._thread, _read_long, dialect, request, keep, self._seen_long, self._depth_max, salt)
        model = self._model(ask, caller, required=True)
        if chain is None and ask.model is None:
            chain = await run(self._thread, _hashed, ask, model)
        return ask, model, chain

    def _salting(self, caller: Caller) -> Callable[[bytes], bytes] | None:
        """Makes an isolated tenant's salt of what the caller gave."""
        tenant = caller.tenant
        return partial(tenancy.tenant_salt, self._secret, tenant.name) if tenant and tenant.isolated else None

    async def _own_body(self, request: Request, ask: Ask, model: str | None, caller: Caller) -> bytes:
        """The body as the caller's tenant may send it. Raises Refusal."""
        tenant, path = caller.tenant, request.path
        if tenant is None:
            return request.body
        if tenant.isolated and path not in FREE_PATHS and not path.startswith(RESPONSES + "/"):
            engines = self._placer.engines(model) if model is not None else ()
            if path not in PATHS or not tenancy.isolates(path, engines):
                what = "No engine that serves this keeps tenants' caches apart on this path"
                raise Refusal(400, "isolation_unsupported", f"{what}, which your tenant asks for.")
        if request.body_bytes < self._offload_bytes_min:
            adapters, body = _owned(request, ask, tenant)
        else:
            run = asyncio.get_running_loop().run_in_executor
            adapters, body = await run(self._thread, _owned, request, ask, tenant)
        if not all(map(tenant.allows, adapters)):
            raise _not_allowed()
        return body

    def _forward_lines(self, request: Request, request_id: str) -> list[bytes]:
        named: tuple[bytes, ...] = ()
        if b"connection" in request.fields:  # it may name others that are for us alone
            named = tuple(token.strip().lower() for token in request.fields[b"connection"].split(b","))
        not_sent_on = self._not_sent_on
        lines = [
            b"%b: %b\r\n" % (name, value)
            for low, name, value in request.lines
            if low not in not_sent_on and low not in named
        ]
        lines += self._own_lines
        lines.append(f"X-Request-Id: {request_id}\r\n".encode())
        return lines

    def _model(self, ask: Ask, caller: Caller, *, required: bool) -> str | None:
        tenant = caller.tenant
        if ask.model is None and not required:
            return None
        if tenant is not None and ask.model is not None and not tenant.allows(ask.model):
            raise _not_allowed()
        try:
            model = self._placer.resolve(ask.model)
        except NoReplica as error:
            raise none_ready() from error
        except UnknownModel as error:
            shown = error.known if tenant is None else [each for each in error.known if tenant.allows(each)]
            known = ", ".join(shown[:20]) or "none"
            what = f"The model '{ask.model}' does not exist" if ask.model else "The request names no model"
            raise Refusal(
                404 if ask.model else 400, "model_not_found", f"{what}; served are: {known}.", "model"
            ) from error
        if tenant is not None and not tenant.allows(model):
            raise _not_allowed()
        return model


def _hashed(ask: Ask, model: str | None) -> Chain | None:
    """In the thread in which it was parsed (core/dialects/seen.py)."""
    if ask.prompt is None or model is None:
        return None
    chain = chain_of(ask, model)
    ask.prompt.let_go()
    return chain


def _must_name_model(path: str, caller: Caller) -> bool:
    """Whether a request on a path that no dialect has must be for one model: its tenant may not use all."""
    return caller.tenant is not None and caller.tenant.models is not None and not path.startswith(RESPONSES + "/")


def _not_allowed() -> Refusal:
    return Refusal(403, "model_not_allowed", "This API key is not for that model.", "model")


def _owned(request: Request, ask: Ask, tenant: Tenant) -> tuple[list[str], bytes]:
    """Adapters that the tenant must be allowed, and the body with what makes it the tenant's own. In any thread."""
    path, body = request.path, request.body
    form = path not in PATHS and request.fields.get(b"content-type", b"").startswith(b"multipart/")
    named = tenancy.adapters(body) if tenant.models is not None and not form else []
    if path == RESPONSES:
        body = tenancy.with_request_id(body, f"resp_{secrets.token_hex(16)}")
    if tenant.isolated and path in PATHS:
        body = tenancy.with_salt(path, body, ask.salt)
    return named, body


def _check_depth(body: bytes, depth_max: int) -> None:
    """Raises BadBody. Fields that are only passed on may have no depth either that ends an engine's process."""
    if nests_deeper(body, depth_max):
        raise BadBody("invalid_json", f"The request body has more than {depth_max} levels of JSON within one another.")


def _read_long(
    dialect: Dialect,
    request: Request,
    keep: bool,
    seen: Seen,
    depth_max: int,
    salt: Callable[[bytes], bytes] | None,
) -> tuple[Ask, Chain | None]:
    """Put together, parse, and hash for the model that is named; a request that names none is hashed once it is known.

    Each step holds the interpreter for milliseconds, and the event loop, which lets go of it between any two sockets,
    would get to one socket in between. So behind a very long body's steps the thread rests, and the loop gets to all.
    """
    pause_s = max(0, request.body_bytes - PAUSE_BYTES_MIN) / PAUSE_BYTES_PER_S
    body = request.body
    time.sleep(pause_s)
    _check_depth(body, depth_max)
    seen.apart(salt(b"") if salt else b"")
    ask = dialect.parse(request.path, body, keep=keep, seen=seen)
    if salt is not None:
        ask.salt = salt(ask.salt)
    time.sleep(pause_s)
    chain = _hashed(ask, ask.model)
    time.sleep(pause_s)
    return ask, chain


def _parse_other(request: Request, depth_max: int, limited: bool) -> Ask:
    """A path whose prompts the index does not read: its model, and whatever keeps it with a replica. `limited`: it must
    be for the one model. Raises BadBody."""
    content_type = request.fields.get(b"content-type", b"")
    if content_type.startswith(b"multipart/"):
        if limited:
            return Ask(form_model(content_type, request.body))
        found = _MULTIPART_MODEL.search(request.body)
        return Ask(found[1].decode(errors="replace") if found else None)
    if not request.body:
        return Ask(None)
    _check_depth(request.body, depth_max)
    ask = OPENAI.parse(request.path, request.body, keep=False)
    ask.prompt = None
    return ask


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

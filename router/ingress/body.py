"""Request bodies: parsing before placement, and changes to the body.

Every function is pure, except for the memories in its `ParseContext`. So it runs on the event loop for a short body and
in a thread for a long one. Each step for a long body holds the interpreter for milliseconds. The event loop releases
the interpreter between any two sockets, so it would serve only one socket between two steps. Therefore the thread
sleeps after each step of a very long body, and the loop can serve all sockets.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from threading import Lock
from typing import TypeVar

from msgspec import Struct

from router.config.api_keys import OFF, Tenant
from router.core.dialects import OPENAI, PATHS, Dialect, InvalidBody, tenant_isolation
from router.core.dialects.multipart import any_form_model, form_model, form_streams, plain_fields, url_fields, url_form
from router.core.dialects.tool_normalization import PATHS as REPAIRED_PATHS
from router.core.dialects.tool_normalization import ToolNormalizer
from router.core.insights.prompt_memory.shared_prefixes import TOOLS
from router.core.prompts.block_keys import Chain, chain_of
from router.core.prompts.cache_identity import with_fewer_tools
from router.core.prompts.incremental_parse import BodyPrefixCache, KnownPrefix
from router.core.prompts.json_fields import DEPTH, PARTS, VALUES, check_limits
from router.core.prompts.lenient_json import BYTE_ORDER_MARK, ask_of, in_other_encoding, to_utf8
from router.core.types.requests import RequestSpec
from router.http.request import Refusal, Request
from router.ingress.proxied_request import RESPONSES
from router.placement_api import PlacementService

# After each step a thread sleeps for two milliseconds per MiB of the body beyond the first.
REST_BYTES_MIN, REST_BYTES_PER_S = 1 << 20, 1 << 29

# A long body is parsed on the event loop if its new part and its total size are within these limits. That takes half a
# millisecond.
HERE_NEW_BYTES_MAX, HERE_BYTES_MAX = 32 << 10, 512 << 10

# vLLM's path for SageMaker, on which this header overrides the body's model.
INVOCATIONS, ADAPTER = "/invocations", b"x-amzn-sagemaker-adapter-identifier"

_JSON = re.compile(rb"[ \t\r\n]*[\[{]")  # the beginning of an object or an array
_AROUND_JSON = b" \t\r\n\v\f" + BYTE_ORDER_MARK  # some JSON parsers skip these bytes
_MULTIPART, _URL_FORM = b"multipart/", b"application/x-www-form-urlencoded"

_T = TypeVar("_T")


class ParseContext(Struct, eq=False):  # a Struct for speed: core/types/requests.py
    """Parameters for one body. `seen` and `repairs` are memories of the thread that parses it."""

    dialect: Dialect | None  # None for a path with prompts that the index does not read
    tenant: Tenant | None
    model_required: bool  # the request is for one model, named or the only one
    model_certain: bool  # a form must name its model unambiguously: its tenant may not use all models
    repairs_wanted: tuple[str, ...]
    append_only: str
    keep: bool  # the decoded body must be kept, because the template's input is made of it
    depth_max: int
    parts_max: int
    values_max: int
    salt: Callable[[bytes], bytes] | None  # derives an isolated tenant's cache salt from the caller's salt
    placer: PlacementService
    seen: BodyPrefixCache
    repairs: ToolNormalizer
    thread: Executor | None  # thread that parses; None: the event loop's thread
    lock: Lock  # must be held to use the memories of that thread
    here: bool = False  # only a small part of the body is new: it is parsed on the event loop, if the thread is idle
    relayed: bool = True  # the answer passes through the router
    ttft_ms: float | None = None  # time limit for the first token; None: no limit
    due_s: float | None = None  # the same as a time of time.monotonic()
    passes_unread: bool = False  # an unreadable body is forwarded unchanged: no check of it is required
    opaque: bool = False  # only an engine can read the body
    mark: bytes = b""  # byte order mark of the body; it is removed before parsing
    form_streams: bool = False  # the body is a form that requests a stream

    async def run(self, work: Callable[..., _T], *arguments: object) -> _T:
        """Call a function of this file on the event loop, or in the thread of long bodies."""
        if self.thread is None:
            return work(*arguments)
        if self.here and self.lock.acquire(blocking=False):
            try:
                return work(*arguments)
            finally:
                self.lock.release()
        return await asyncio.get_running_loop().run_in_executor(
            self.thread, partial(self._run_locked, work, *arguments)
        )

    def _run_locked(self, work: Callable[..., _T], *arguments: object) -> _T:
        with self.lock:  # the thread still works for a request that was cancelled and has given up its turn
            return work(*arguments)

    def shorten(self, request: Request) -> None:
        """Parse a long body on the event loop if nearly all of it was read with an earlier one."""
        dialect = self.dialect
        name = dialect.seen_as[self.keep] if dialect is not None else b""
        if not name or request.body_bytes > HERE_BYTES_MAX or not self.lock.acquire(blocking=False):
            return
        try:
            self.seen.per_tenant(self.salt(b"") if self.salt is not None else b"")
            place = self.seen.look(request.body, name)
        finally:
            self.lock.release()
        self.here = place is not None and len(place.rest) <= HERE_NEW_BYTES_MAX

    @property
    def observed_tenant(self) -> str:
        """Tenant that may see the result of the prompt comparison; its prompts are compared only with its own. "" if
        the result is not reported, or if prompts are separated by their salt."""
        tenant = self.tenant
        if tenant is None or tenant.isolated or not (tenant.receipts or self.append_only != OFF):
            return ""
        return tenant.name

    def yield_gil(self, body_bytes: int) -> None:
        """Yield the interpreter to the event loop, unless this runs on it."""
        if self.thread is not None and not self.here:
            time.sleep(max(0, body_bytes - REST_BYTES_MIN) / REST_BYTES_PER_S)


class ParseResult(Struct, eq=False):
    """Result of parsing a body."""

    ask: RequestSpec
    chain: Chain | None  # None if the prompt is unknown, or cannot be hashed before its model is resolved


def parse(request: Request, how: ParseContext) -> ParseResult:
    """Parse a body and hash its prompt for the model that it names. Raises InvalidBody.

    A prompt is hashed later if the body names no model, or if some of its tools may not be called: engines of that
    model may omit those. For a body that only engines can read, `dialect` becomes None.
    """
    if how.opaque:
        how.dialect = None
        return ParseResult(RequestSpec(None), None)
    body = request.body
    if body.startswith(BYTE_ORDER_MARK):
        how.mark = BYTE_ORDER_MARK
        request.replace_body([body[len(BYTE_ORDER_MARK) :]], request.body_bytes)
    try:
        return _parse(request, how)
    except InvalidBody as error:
        ask = _unread(request, how, error.code) if how.passes_unread else None
        if ask is None:
            raise
    how.dialect = None
    return ParseResult(ask, None)


def _parse(request: Request, how: ParseContext) -> ParseResult:
    dialect, salt, body = how.dialect, how.salt, request.body
    if in_other_encoding(body):
        raise InvalidBody("invalid_json", "The request body is not UTF-8.")
    if dialect is None:
        return ParseResult(_parse_other(request, how), None)
    how.yield_gil(request.body_bytes)
    how.seen.per_tenant(salt(b"") if salt is not None else b"")
    name = dialect.seen_as[how.keep]
    _check_shape(body, how, how.seen.look(body, name) if name else None)
    ask = dialect.parse(request.path, body, keep=how.keep, seen=how.seen)
    if salt is not None:
        ask.salt = salt(ask.salt)
    how.yield_gil(request.body_bytes)
    chain = None
    if ask.model is not None and not ask.adapter and ask.prompt is not None and ask.prompt.fewer_tools is None:
        chain = chain_of(ask, how.placer.cache_identity(ask.model))
    how.yield_gil(request.body_bytes)
    return ParseResult(ask, chain)


def hash_without_tools(ask: RequestSpec, known_as: str) -> Chain | None:
    """Return the keys of a parsed prompt on engines that omit tools which may not be called. As with `chain_of`, it
    must be called in the thread that parsed the prompt (core/prompts/incremental_parse.py)."""
    if ask.prompt is not None:
        ask.prompt = with_fewer_tools(ask.prompt)
    return chain_of(ask, known_as)


def needs_normalization(path: str, ask: RequestSpec) -> bool:
    """True if a prompt begins with tools, or is not understood. To search the body for tools would take longer. But a
    prompt of `/v1/responses` does not contain all tools of its body, so it always counts."""
    if path not in REPAIRED_PATHS or path == RESPONSES or ask.prompt is None:
        return path in REPAIRED_PATHS
    head = ask.prompt.text if ask.prompt.joint is None else ask.prompt.joint.head
    return head.startswith(TOOLS)


def normalize_tools(request: Request, how: ParseContext) -> tuple[str, ...]:
    """Repair the body's tools. Returns the wanted repairs that it needed; with any, it must be parsed anew."""
    body, tenant = request.body, how.tenant
    how.yield_gil(request.body_bytes)
    whose = tenant.name if tenant is not None and tenant.isolated else ""
    body, needed = how.repairs.normalize(body, how.repairs_wanted, whose)
    how.yield_gil(request.body_bytes)
    if needed:
        request.replace_body([body], len(body))
    return needed


def scope_to_tenant(request: Request, ask: RequestSpec, tenant: Tenant, id_: str) -> bytes:
    """Return the body as its tenant may send it. If it names an id of its request, the id is replaced with this one.
    Raises Refusal for an adapter that the tenant may not use, and for a form with fields that tenants share."""
    path, body = request.path, request.body
    if path in PATHS or not _form_of(request):
        found = tenant_isolation.read_isolation_fields(body)
        if tenant.models is not None and not all(map(tenant.allows, tenant_isolation.adapters(found))):
            raise model_forbidden()
        # Engines store a response under its id: with another response's id, a request would overwrite that one.
        body = tenant_isolation.strip_shared_fields(
            body, found, f"resp_{secrets.token_hex(16)}" if path == RESPONSES else id_
        )
    else:
        _check_form(request)
    if tenant.isolated and path in PATHS:
        body = tenant_isolation.with_salt(path, body, ask.salt)
    return body


def strip_kv_transfer_params(request: Request) -> bytes:
    """Return the body without parameters for transfers between engines. Raises Refusal for a form with such
    parameters."""
    path, body = request.path, request.body
    if path in PATHS or not _form_of(request):
        return tenant_isolation.strip_transfers(body)
    _check_form(request)
    return body


def _check_form(request: Request) -> None:
    """Raises Refusal for a form with fields for engines alone, or with fields that have two possible readings."""
    content_type, body = request.fields[b"content-type"], request.body
    try:
        is_multipart = _form_of(request) == _MULTIPART
        names = tenant_isolation.FORM_FIELDS
        tenant_isolation.check_form(
            plain_fields(content_type, body, names) if is_multipart else url_fields(body, names)
        )
    except InvalidBody as error:
        raise Refusal(400, "invalid_form", str(error)) from error


def model_forbidden() -> Refusal:
    """Return the refusal of a request for a model that its API key does not allow."""
    return Refusal(403, "model_not_allowed", "This API key does not allow that model.", "model")


def _check_shape(body: bytes, how: ParseContext, place: KnownPrefix | None = None) -> None:
    """Check the shape of JSON. Raises InvalidBody in two cases:

    - The number of parts or values is too high. Decoding them would take many times the body's size in memory, and
      block the event loop.
    - It is so deep that it could crash an engine's process. This holds also for fields that are only forwarded.

    The part that was read before, up to a `place`, was checked then.
    """
    known = place is not None and place.has_at_most(how.parts_max, how.values_max)
    read = place.rest if known and place is not None else body
    found = check_limits(read, how.depth_max, how.parts_max, how.values_max)
    if found == PARTS:
        said = f"The request body has more than {how.parts_max} objects and arrays (limits.json_parts_max)"
        raise InvalidBody("too_many_parts", f"{said}; send fewer messages, parts or tools.")
    if found == VALUES:
        said = f"The request body has more than {how.values_max} values (limits.json_values_max)"
        raise InvalidBody("too_many_values", f"{said}; send a shorter prompt.")
    if found == DEPTH:
        said = f"The request body has more than {how.depth_max} nested levels of JSON."
        raise InvalidBody("invalid_json", said)


def _unread(request: Request, how: ParseContext, code: str) -> RequestSpec | None:
    """Return the known attributes of a body that cannot be read for the reason in `code`; None if no engine could read
    it either. Raises InvalidBody."""
    content_type = request.fields.get(b"content-type", b"").lower()
    text = to_utf8(request.body)
    if text is None or _JSON.match(text) is None:
        other = how.dialect is None and bool(content_type) and b"json" not in content_type
        return RequestSpec(None) if other else None
    if code != "invalid_json":
        return None
    _check_shape(text, how)
    return ask_of(text)


def _form_of(request: Request) -> bytes:
    """Return _MULTIPART or _URL_FORM if the body is such a form, else b"". Content that begins like JSON is JSON,
    whatever its type: engines may parse it as JSON, and curl labels any body as a form."""
    content_type = request.fields.get(b"content-type", b"").lower()
    for form in (_MULTIPART, _URL_FORM):
        if content_type.startswith(form):
            return form if request.body.lstrip(_AROUND_JSON)[:1] not in (b"{", b"[", b"") else b""
    return b""


def _parse_other(request: Request, how: ParseContext) -> RequestSpec:
    """Return the model, and the attributes that bind a request to a replica, for a path with prompts that are not read.
    Raises InvalidBody."""
    form = _form_of(request)
    if form == _MULTIPART:
        content_type = request.fields[b"content-type"]
        how.form_streams = form_streams(content_type, request.body)
        read = form_model if how.model_certain else any_form_model
        return RequestSpec(read(content_type, request.body))
    if form == _URL_FORM:
        model, how.form_streams = url_form(request.body, sure=how.model_certain)
        return RequestSpec(model)
    if not request.body:
        return RequestSpec(None)
    _check_shape(request.body, how)
    ask = OPENAI.parse(request.path, request.body, keep=False)
    ask.prompt = None
    if request.path == INVOCATIONS and (adapter := request.header(ADAPTER)):
        ask.model = adapter
    return ask

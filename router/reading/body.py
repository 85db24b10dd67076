"""The bodies of requests: what is read of one before placing, and what is changed in it.

Every function is pure but for the memories in its `Reading`, so it runs on the event loop for a short body and in a
thread for a long one. A long body's steps hold the interpreter for milliseconds each, and the event loop, which lets go
of the interpreter between any two sockets, would get to one socket in between. So behind each step of a very long body
the thread rests, and the loop gets to all sockets.
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

from router.core.dialects import OPENAI, PATHS, BadBody, Dialect, tenancy
from router.core.dialects.forms import any_form_model, form_model, form_streams, plain_fields, url_fields, url_form
from router.core.dialects.repairs import PATHS as REPAIRED_PATHS
from router.core.dialects.repairs import Repairs
from router.core.facts.requests import Ask
from router.core.observatory.memory.templates import TOOLS
from router.core.prompts.beginnings import Place, Seen
from router.core.prompts.blocks import Chain, chain_of
from router.core.prompts.bodies import DEPTH, PARTS, VALUES, excess
from router.core.prompts.identity import with_fewer_tools
from router.core.prompts.unread import BYTE_ORDER_MARK, as_utf8, ask_of, in_other_encoding
from router.http.request import Refusal, Request
from router.placer import Placer
from router.reading.question import RESPONSES
from router.settings.keys import OFF, Tenant

# Behind each step a thread rests for two milliseconds per MiB of the body beyond the first.
REST_BYTES_MIN, REST_BYTES_PER_S = 1 << 20, 1 << 29

# A long body is read on the event loop if so little of it is new, and it is no longer than that: half a millisecond.
HERE_NEW_BYTES_MAX, HERE_BYTES_MAX = 32 << 10, 512 << 10

# A path of vLLM's for SageMaker, on which this header counts more than the body's model.
INVOCATIONS, ADAPTER = "/invocations", b"x-amzn-sagemaker-adapter-identifier"

_JSON = re.compile(rb"[ \t\r\n]*[\[{]")  # the beginning of an object or an array
_AROUND_JSON = b" \t\r\n\v\f" + BYTE_ORDER_MARK  # some parsers of JSON skip it
_MULTIPART, _URL_FORM = b"multipart/", b"application/x-www-form-urlencoded"

_T = TypeVar("_T")


class Reading(Struct, eq=False):  # a Struct for speed: core/facts/requests.py
    """How one body is read, for whom, and where: `seen` and `repairs` are memories of the thread that reads it."""

    dialect: Dialect | None  # None for a path whose prompts the index does not read
    tenant: Tenant | None
    model_required: bool  # the request is for one model, named or the only one
    model_certain: bool  # nobody may read another model in a form: its tenant may not use all
    repairs_wanted: tuple[str, ...]
    append_only: str
    keep: bool  # the decoded body must be kept: the template's input is made of it
    depth_max: int
    parts_max: int
    values_max: int
    salt: Callable[[bytes], bytes] | None  # makes an isolated tenant's cache salt from the caller's salt
    placer: Placer
    seen: Seen
    repairs: Repairs
    thread: Executor | None  # thread that reads; None: the event loop's thread
    lock: Lock  # held by whoever uses the memories of that thread
    here: bool = False  # little of the body is new: it is read on the event loop, if the thread is idle
    relayed: bool = True  # the answer comes by here
    ttft_ms: float | None = None  # time within which the first token is wanted; None: any
    due_s: float | None = None  # the same as a time of time.monotonic()
    passes_unread: bool = False  # a body that cannot be read goes on as it is: nothing in it has to be looked at
    opaque: bool = False  # only an engine can read the body
    mark: bytes = b""  # the byte order mark with which the body came; it is read without
    form_streams: bool = False  # the body is a form that asks for a stream

    async def run(self, work: Callable[..., _T], *arguments: object) -> _T:
        """Call a function of this file here, or in the thread of long bodies."""
        if self.thread is None:
            return work(*arguments)
        if self.here and self.lock.acquire(blocking=False):
            try:
                return work(*arguments)
            finally:
                self.lock.release()
        return await asyncio.get_running_loop().run_in_executor(self.thread, partial(self._alone, work, *arguments))

    def _alone(self, work: Callable[..., _T], *arguments: object) -> _T:
        with self.lock:  # a request that was cancelled leaves the thread at work, and gives up its turn
            return work(*arguments)

    def shorten(self, request: Request) -> None:
        """Read a long body here if nearly all of it was read with an earlier one."""
        dialect = self.dialect
        name = dialect.seen_as[self.keep] if dialect is not None else b""
        if not name or request.body_bytes > HERE_BYTES_MAX or not self.lock.acquire(blocking=False):
            return
        try:
            self.seen.apart(self.salt(b"") if self.salt is not None else b"")
            place = self.seen.look(request.body, name)
        finally:
            self.lock.release()
        self.here = place is not None and len(place.rest) <= HERE_NEW_BYTES_MAX

    @property
    def told(self) -> str:
        """The tenant that may hear what its prompt was compared with, and is compared with its own alone; "" where
        nobody hears of it, or where prompts are told apart by their salt."""
        tenant = self.tenant
        if tenant is None or tenant.isolated or not (tenant.receipts or self.append_only != OFF):
            return ""
        return tenant.name

    def rest(self, body_bytes: int) -> None:
        """Give the event loop a turn, unless this runs on it."""
        if self.thread is not None and not self.here:
            time.sleep(max(0, body_bytes - REST_BYTES_MIN) / REST_BYTES_PER_S)


class Parsed(Struct, eq=False):
    """What is read of a body."""

    ask: Ask
    chain: Chain | None  # None where the prompt is unknown, or cannot be hashed before its model is resolved


def parse(request: Request, how: Reading) -> Parsed:
    """Everything that is read of a body before placing: parsed, and hashed for the model that it names. Raises BadBody.

    A prompt is hashed later where the body names no model, or where its tools may not all be called: engines of that
    model may leave those out. A body that only engines can read has no dialect from then on.
    """
    if how.opaque:
        how.dialect = None
        return Parsed(Ask(None), None)
    body = request.body
    if body.startswith(BYTE_ORDER_MARK):
        how.mark = BYTE_ORDER_MARK
        request.bring([body[len(BYTE_ORDER_MARK) :]], request.body_bytes)
    try:
        return _parse(request, how)
    except BadBody as error:
        ask = _unread(request, how, error.code) if how.passes_unread else None
        if ask is None:
            raise
    how.dialect = None
    return Parsed(ask, None)


def _parse(request: Request, how: Reading) -> Parsed:
    dialect, salt, body = how.dialect, how.salt, request.body
    if in_other_encoding(body):
        raise BadBody("invalid_json", "The request body is not in UTF-8, in which alone it can be read here.")
    if dialect is None:
        return Parsed(_parse_other(request, how), None)
    how.rest(request.body_bytes)
    how.seen.apart(salt(b"") if salt is not None else b"")
    name = dialect.seen_as[how.keep]
    _check_shape(body, how, how.seen.look(body, name) if name else None)
    ask = dialect.parse(request.path, body, keep=how.keep, seen=how.seen)
    if salt is not None:
        ask.salt = salt(ask.salt)
    how.rest(request.body_bytes)
    chain = None
    if ask.model is not None and not ask.adapter and ask.prompt is not None and ask.prompt.fewer_tools is None:
        chain = chain_of(ask, how.placer.known_as(ask.model))
    how.rest(request.body_bytes)
    return Parsed(ask, chain)


def hashed_with_fewer_tools(ask: Ask, known_as: str) -> Chain | None:
    """The keys of a parsed prompt on engines that leave out tools that may not be called. As `chain_of`, it must be
    called in the thread that parsed the prompt (core/prompts/beginnings.py)."""
    if ask.prompt is not None:
        ask.prompt = with_fewer_tools(ask.prompt)
    return chain_of(ask, known_as)


def may_need_repair(path: str, ask: Ask) -> bool:
    """Whether a prompt begins with tools, or is not understood. To look for tools in the body would take longer; but a
    prompt of `/v1/responses` does not show all tools that there are."""
    if path not in REPAIRED_PATHS or path == RESPONSES or ask.prompt is None:
        return path in REPAIRED_PATHS
    head = ask.prompt.text if ask.prompt.joint is None else ask.prompt.joint.head
    return head.startswith(TOOLS)


def repair(request: Request, how: Reading) -> tuple[str, ...]:
    """Put the body's tools right. Returns which of the wanted repairs it needed; with any, it must be parsed anew."""
    body, tenant = request.body, how.tenant
    how.rest(request.body_bytes)
    whose = tenant.name if tenant is not None and tenant.isolated else ""
    body, needed = how.repairs.repaired(body, how.repairs_wanted, whose)
    how.rest(request.body_bytes)
    if needed:
        request.bring([body], len(body))
    return needed


def owned(request: Request, ask: Ask, tenant: Tenant, id_: str) -> bytes:
    """The body as its tenant may send it: where it names an id of its request, it gets this one. Raises Refusal for an
    adapter that the tenant may not use, and for a form with what tenants share."""
    path, body = request.path, request.body
    if path in PATHS or not _form_of(request):
        found = tenancy.named(body)
        if tenant.models is not None and not all(map(tenant.allows, tenancy.adapters(found))):
            raise not_allowed()
        # Engines store a response under its id: who names another's would have it stored over that.
        body = tenancy.without_shared(body, found, f"resp_{secrets.token_hex(16)}" if path == RESPONSES else id_)
    else:
        _check_form(request)
    if tenant.isolated and path in PATHS:
        body = tenancy.with_salt(path, body, ask.salt)
    return body


def untransferred(request: Request) -> bytes:
    """The body without what it says of transfers between engines. Raises Refusal for a form that says something."""
    path, body = request.path, request.body
    if path in PATHS or not _form_of(request):
        return tenancy.without_transfers(body)
    _check_form(request)
    return body


def _check_form(request: Request) -> None:
    """Raises Refusal for a form with fields for engines alone, or whose fields could be read in two ways."""
    content_type, body = request.fields[b"content-type"], request.body
    try:
        is_multipart = _form_of(request) == _MULTIPART
        names = tenancy.FORM_FIELDS
        tenancy.check_form(plain_fields(content_type, body, names) if is_multipart else url_fields(body, names))
    except BadBody as error:
        raise Refusal(400, "invalid_form", str(error)) from error


def not_allowed() -> Refusal:
    """The answer to a request for a model that its API key is not for."""
    return Refusal(403, "model_not_allowed", "This API key is not for that model.", "model")


def _check_shape(body: bytes, how: Reading, place: Place | None = None) -> None:
    """Raises BadBody for JSON of so many parts or values that decoding it would take many times its size in memory, and
    hold the event loop; and for JSON so deep that it could end an engine's process, also in fields that are only passed
    on. What was read before, up to a `place`, was checked then."""
    known = place is not None and place.has_at_most(how.parts_max, how.values_max)
    read = place.rest if known and place is not None else body
    found = excess(read, how.depth_max, how.parts_max, how.values_max)
    if found == PARTS:
        said = f"The request body has more than {how.parts_max} objects and arrays (limits.json_parts_max)"
        raise BadBody("too_many_parts", f"{said}; send fewer messages, parts or tools.")
    if found == VALUES:
        said = f"The request body has more than {how.values_max} values (limits.json_values_max)"
        raise BadBody("too_many_values", f"{said}; send a shorter prompt.")
    if found == DEPTH:
        said = f"The request body has more than {how.depth_max} levels of JSON within one another."
        raise BadBody("invalid_json", said)


def _unread(request: Request, how: Reading, code: str) -> Ask | None:
    """What is known of a body that cannot be read for this reason; None where no engine could read it either. Raises
    BadBody."""
    content_type = request.fields.get(b"content-type", b"").lower()
    text = as_utf8(request.body)
    if text is None or _JSON.match(text) is None:
        other = how.dialect is None and bool(content_type) and b"json" not in content_type
        return Ask(None) if other else None
    if code != "invalid_json":
        return None
    _check_shape(text, how)
    return ask_of(text)


def _form_of(request: Request) -> bytes:
    """_MULTIPART or _URL_FORM if the body is such a form, else b"". Content that begins as JSON does is JSON, whatever
    its type: engines may read it so, and curl says of any body that it is a form."""
    content_type = request.fields.get(b"content-type", b"").lower()
    for form in (_MULTIPART, _URL_FORM):
        if content_type.startswith(form):
            return form if request.body.lstrip(_AROUND_JSON)[:1] not in (b"{", b"[", b"") else b""
    return b""


def _parse_other(request: Request, how: Reading) -> Ask:
    """The model, and what keeps a request with a replica, for a path whose prompts are not read. Raises BadBody."""
    form = _form_of(request)
    if form == _MULTIPART:
        content_type = request.fields[b"content-type"]
        how.form_streams = form_streams(content_type, request.body)
        read = form_model if how.model_certain else any_form_model
        return Ask(read(content_type, request.body))
    if form == _URL_FORM:
        model, how.form_streams = url_form(request.body, sure=how.model_certain)
        return Ask(model)
    if not request.body:
        return Ask(None)
    _check_shape(request.body, how)
    ask = OPENAI.parse(request.path, request.body, keep=False)
    ask.prompt = None
    if request.path == INVOCATIONS and (adapter := request.header(ADAPTER)):
        ask.model = adapter
    return ask

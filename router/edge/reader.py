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
from functools import partial

from router.core.dialects import OPENAI, PATHS, BadBody, Dialect, spoken_on, tenancy
from router.core.dialects.forms import form_model
from router.core.dialects.repairs import PATHS as REPAIRED_PATHS
from router.core.dialects.repairs import Repairs, in_order
from router.core.facts.misses import Sighting
from router.core.facts.requests import Ask
from router.core.fleet.models import NoReplica, UnknownModel
from router.core.observatory.memory.suspect import Suspect
from router.core.observatory.memory.templates import TOOLS
from router.core.placement.wanted import Wanted
from router.core.prompts.beginnings import Seen
from router.core.prompts.blocks import Chain, chain_of, ring_key
from router.core.prompts.bodies import nests_deeper, step_of
from router.core.prompts.identity import FEWER_TOOLS, with_fewer_tools
from router.edge import answering
from router.edge.answering import HISTORY_CHANGED, none_ready
from router.edge.observer import Observer
from router.edge.question import RESPONSES, STORED, Question
from router.http.exchange import HOP_HEADERS
from router.http.request import Refusal, Request
from router.placer import Placer
from router.settings.keys import ANYBODY, OFF, REJECT, Caller, Tenant
from router.tokens.request_tokens import Tokens

# They need no prefill.
FREE_PATHS = ("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/v1/messages/count_tokens")
BYTES_PER_TOKEN = 4  # of a body whose prompt is unknown
PAUSE_BYTES_MIN, PAUSE_BYTES_PER_S = 1 << 20, 1 << 29  # beyond a MiB its thread rests two milliseconds for each
SEEN_BYTES_MAX = 16 << 20  # remembered of the beginnings of bodies, by each of the two threads that read them
REPAIRED_BYTES_MAX = 4 << 20  # likewise, of tools and what they became

CREDENTIALS = frozenset((b"authorization", b"x-api-key"))
TENANT, PRIORITY = b"x-warmroute-tenant", b"x-warmroute-priority"  # hints, which are for us alone

_NOT_SENT_ON = HOP_HEADERS | {b"x-request-id", TENANT, PRIORITY}
_STEP = re.compile(r"[\w.:-]{1,64}", re.ASCII)
_MULTIPART_MODEL = re.compile(rb'name="model"\r\n\r\n([^\r\n]{1,256})\r\n')


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
        observer: Observer | None = None,
        repairs: tuple[str, ...] = (),
        append_only: str = OFF,
        step_header: str = "",
        step_field: str = "",
    ) -> None:
        """`tokens` turns prompts into token ids; without it every prompt is placed by estimate. From the `secret`
        isolated tenants' salts are made. The `observer` sees prompts' texts, which are dropped then. `repairs` and
        `append_only` hold for those who show no key."""
        self._observer = observer
        self._step_header, self._step_field = step_header.lower().encode(), step_field
        self._repairs, self._repairs_long = (Repairs(bytes_max=REPAIRED_BYTES_MAX) for _ in range(2))
        self.configure(repairs=repairs, append_only=append_only)
        self._placer = placer
        self._tokens = tokens
        self._offload_bytes_min = offload_bytes_min
        self.ask_usage = ask_usage
        self._depth_max = json_depth_max
        self._aside = ThreadPoolExecutor(1, "parse")
        self._seen, self._seen_long = (Seen(bytes_max=SEEN_BYTES_MAX, seed=secrets.randbits(64)) for _ in range(2))
        self._secret = secret.encode()
        self.credentials(passed_on=True, api_key="")

    def credentials(self, *, passed_on: bool, api_key: str) -> None:
        """From now on clients' own credentials are passed on to replicas or not; with an `api_key`, it is sent in
        their place."""
        kept = _NOT_SENT_ON | {self._step_header}
        self._not_sent_on = kept if passed_on and not api_key else kept | CREDENTIALS
        self._own_lines = [f"Authorization: Bearer {api_key}\r\n".encode()] if api_key else []

    def configure(self, *, repairs: tuple[str, ...], append_only: str) -> None:
        """What holds from now on for those who show no key."""
        self._repairs_wanted, self._append_only = in_order(repairs), append_only

    def close(self) -> None:
        """Stop the thread."""
        self._aside.shutdown(wait=False, cancel_futures=True)

    async def understand(self, request: Request, request_id: str, caller: Caller = ANYBODY) -> Question:
        """Parse the body and hash the prompt. Raises Refusal."""
        encoding = request.fields.get(b"content-encoding")
        if encoding is not None and encoding.lower() != b"identity":
            raise Refusal(415, "unsupported_encoding", "Compressed request bodies are not accepted.")
        path = request.path
        dialect, tenant = PATHS.get(path), caller.tenant
        wanted, append_only = (
            (tenant.repairs, tenant.append_only) if tenant is not None else (self._repairs_wanted, self._append_only)
        )
        repairs: tuple[str, ...] = ()
        try:
            ask, model, chain = await self._placing_facts(request, dialect, caller)
            if wanted and path in REPAIRED_PATHS and (path == RESPONSES or _may_have_tools(ask)):
                repairs = await self._repair(request, wanted, tenant)
                if repairs:
                    ask, model, chain = await self._placing_facts(request, dialect, caller)
        except BadBody as error:
            raise Refusal(400, error.code, str(error)) from error
        sighting = None
        if self._observer is not None:
            ask.step = self._step(request, ask)
            sure, always = append_only != OFF, append_only == REJECT
            seen = self._observer.look(ask, chain, request, sure=sure, always=always)
            sighting = (
                await self._settled(seen, request, ask, chain, append_only) if isinstance(seen, Suspect) else seen
            )
            if sighting is not None:
                sighting.step = ask.step
        changed = answering.change_of(sighting) if append_only != OFF else None
        if changed is not None and append_only == REJECT:
            own = tenant is None or tenant.isolated
            raise Refusal(409, HISTORY_CHANGED, answering.change_message(changed, own=own), changed.path or None)
        if ask.prompt is not None:
            ask.prompt.let_go()
        body = request.body if caller.tenant is None else await self._own_body(request, ask, model, caller.tenant)
        tokens = None
        if self._tokens is not None and dialect is not None and model and self._placer.follows():
            view = self._placer.token_view(model)
            tokens = await self._tokens.of(dialect, path, body, ask, model, view) if view is not None else None
        ask.decoded, ask.metadata = None, b""  # not kept while the answer comes
        strip_usage = self.ask_usage and dialect is not None and ask.stream and not ask.wants_usage
        return Question(  # by place: see core/placement/router.py
            request,
            self._forward_lines(request, request_id),
            dialect.with_usage(body) if strip_usage and dialect else body,
            dialect or spoken_on(path),
            Wanted(
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
                0.0,
                sighting,
            ),
            strip_usage,
            tenant is None or tenant.receipts,
            None,
            repairs,
            f"{HISTORY_CHANGED} {answering.change_header(changed)}" if changed is not None else "",
        )

    def _step(self, request: Request, ask: Ask) -> str:
        """Which step of an agent it says to be."""
        said = request.fields.get(self._step_header)
        step = said.decode("ascii", "replace") if said is not None else step_of(ask.metadata, self._step_field)
        return step if step and _STEP.fullmatch(step) else ""

    async def _settled(
        self, look: Suspect, request: Request, ask: Ask, chain: Chain | None, append_only: str
    ) -> Sighting | None:
        """What earlier prompts say of it, where a glance does not tell."""
        if self._observer is None or chain is None:
            return None
        aside, sure = request.body_bytes >= self._offload_bytes_min, append_only != OFF
        return await self._observer.settle(
            look, ask, chain, request, self._aside, aside=aside, sure=sure, rejects=append_only == REJECT
        )

    async def _repair(self, request: Request, wanted: tuple[str, ...], tenant: Tenant | None) -> tuple[str, ...]:
        """Put the body right; what was read of it counts no more, then. Returns what it needed."""
        whose = tenant.name if tenant is not None and tenant.isolated else ""
        if request.body_bytes < self._offload_bytes_min:
            body, needed = self._repairs.repaired(request.body, wanted, whose)
        else:
            run = asyncio.get_running_loop().run_in_executor
            body, needed = await run(self._aside, _repair_long, self._repairs_long, request, wanted, whose)
        if needed:
            request.bring([body], len(body))
        return needed

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
                ask = await run(self._aside, _parse_other, request, self._depth_max, limited)
            return ask, self._model(ask, caller, required=limited), None
        keep = self._tokens is not None and self._placer.follows()
        salt = self._salting(caller)
        if request.body_bytes < self._offload_bytes_min:
            body = request.body
            _check_depth(body, self._depth_max)
            self._seen.apart(salt(b"") if salt else b"")
            ask = dialect.parse(path, body, keep=keep, seen=self._seen)
            if salt is not None:
                ask.salt = salt(ask.salt)
            model = self._model(ask, caller, required=True)
            return ask, model, _hashed(ask, model, self._placer, fewer_tools=self._leaves_out(ask, model))
        run, placer = asyncio.get_running_loop().run_in_executor, self._placer
        ask, chain = await run(
            self._aside, _read_long, dialect, request, keep, self._seen_long, self._depth_max, salt, placer
        )
        model = self._model(ask, caller, required=True)
        if chain is None and ask.prompt is not None:
            fewer_tools = self._leaves_out(ask, model)
            chain = await run(self._aside, partial(_hashed, ask, model, placer, fewer_tools=fewer_tools))
        return ask, model, chain

    def _leaves_out(self, ask: Ask, model: str | None) -> bool:
        """Whether the model's engines leave out the tools that this request may not call."""
        if ask.prompt is None or ask.prompt.fewer_tools is None or model is None:
            return False
        return FEWER_TOOLS.issuperset(self._placer.engines(model))

    def _salting(self, caller: Caller) -> Callable[[bytes], bytes] | None:
        """Makes an isolated tenant's salt of what the caller gave."""
        tenant = caller.tenant
        return partial(tenancy.tenant_salt, self._secret, tenant.name) if tenant and tenant.isolated else None

    async def _own_body(self, request: Request, ask: Ask, model: str | None, tenant: Tenant) -> bytes:
        """The body as the caller's tenant may send it. Raises Refusal."""
        path = request.path
        if tenant.isolated and path not in FREE_PATHS and not path.startswith(RESPONSES + "/"):
            engines = self._placer.engines(model) if model is not None else ()
            if path not in PATHS or not tenancy.isolates(path, engines):
                what = "No engine that serves this keeps tenants' caches apart on this path"
                raise Refusal(400, "isolation_unsupported", f"{what}, which your tenant asks for.")
        if request.body_bytes < self._offload_bytes_min:
            adapters, body = _owned(request, ask, tenant)
        else:
            run = asyncio.get_running_loop().run_in_executor
            adapters, body = await run(self._aside, _owned, request, ask, tenant)
        if not all(map(tenant.allows, adapters)):
            raise _not_allowed()
        return body

    def _forward_lines(self, request: Request, request_id: str) -> list[bytes]:
        not_sent_on = self._not_sent_on
        if b"connection" in request.fields:  # it may name others that are for us alone
            named = request.fields[b"connection"].split(b",")
            not_sent_on = not_sent_on.union([token.strip().lower() for token in named])
        lines = [b"%b: %b\r\n" % (name, value) for low, name, value in request.lines if low not in not_sent_on]
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
        except UnknownModel as unknown:
            shown = unknown.known if tenant is None else [each for each in unknown.known if tenant.allows(each)]
            known = ", ".join(shown[:20]) or "none"
            what = f"The model '{ask.model}' does not exist" if ask.model else "The request names no model"
            raise Refusal(
                404 if ask.model else 400, "model_not_found", f"{what}; served are: {known}.", "model"
            ) from unknown
        if tenant is not None and not tenant.allows(model):
            raise _not_allowed()
        return model


def _may_have_tools(ask: Ask) -> bool:
    """Whether a prompt begins with tools, or is not understood. To look for them in the body would take longer; but of
    `/v1/responses` a prompt does not show all tools that there are."""
    prompt = ask.prompt
    if prompt is None:
        return True
    head = prompt.text if prompt.joint is None else prompt.joint.head
    return head.startswith(TOOLS)


def _hashed(ask: Ask, model: str | None, placer: Placer, *, fewer_tools: bool = False) -> Chain | None:
    """In the thread in which it was parsed (core/prompts/beginnings.py)."""
    if ask.prompt is None or model is None:
        return None
    if fewer_tools:
        ask.prompt = with_fewer_tools(ask.prompt)
    return chain_of(ask, placer.known_as(model))


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


def _pause_s(request: Request) -> float:
    return max(0, request.body_bytes - PAUSE_BYTES_MIN) / PAUSE_BYTES_PER_S


def _repair_long(
    repairs: Repairs, request: Request, wanted: tuple[str, ...], whose: str
) -> tuple[bytes, tuple[str, ...]]:
    """Behind each step the thread rests, as in `_read_long`."""
    body, pause_s = request.body, _pause_s(request)
    time.sleep(pause_s)
    made = repairs.repaired(body, wanted, whose)
    time.sleep(pause_s)
    return made


def _read_long(
    dialect: Dialect,
    request: Request,
    keep: bool,
    seen: Seen,
    depth_max: int,
    salt: Callable[[bytes], bytes] | None,
    placer: Placer,
) -> tuple[Ask, Chain | None]:
    """Put together, parse, and hash for the model that is named. A request that names none is hashed once it is known;
    so is one whose tools may not all be called, once it is known whether its engines leave those out.

    Each step holds the interpreter for milliseconds, and the event loop, which lets go of it between any two sockets,
    would get to one socket in between. So behind a very long body's steps the thread rests, and the loop gets to all.
    """
    pause_s = _pause_s(request)
    body = request.body
    time.sleep(pause_s)
    _check_depth(body, depth_max)
    seen.apart(salt(b"") if salt else b"")
    ask = dialect.parse(request.path, body, keep=keep, seen=seen)
    if salt is not None:
        ask.salt = salt(ask.salt)
    time.sleep(pause_s)
    chain = None
    if ask.prompt is not None and ask.prompt.fewer_tools is None:
        chain = _hashed(ask, ask.model, placer)
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
    return path.removeprefix(STORED).partition("/")[0] if path.startswith(STORED) else None

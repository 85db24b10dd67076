"""Request reader: parses a request and hashes its prompt, before any decision is made.

Long bodies are parsed and hashed in one thread next to the event loop. Several threads would compete with each other,
and with the loop, for the interpreter. Tenants take turns on it (parse_queue.py), and a tenant over its rate gets no
turn (rate_reservation.py). The router forwards a body that it cannot read, unless keys or disaggregated prefill require
it to be read. It refuses only three kinds of requests: those that no engine could accept (not JSON, or compressed),
those with more parts than may be decoded, and those for a model that no replica serves.
"""

from __future__ import annotations

import re
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Lock

from msgspec import Struct

from router.config.api_keys import ANONYMOUS, OFF, REJECT, Caller, Tenant
from router.config.schema import ApiSettings, DisaggSettings, InsightsSettings, LimitSettings, UpstreamSettings
from router.config.url_maps import continued_models
from router.core.dialects import PATHS, InvalidBody, dialect_of, tenant_isolation
from router.core.dialects.p2p_body import PULLING
from router.core.dialects.tool_normalization import ToolNormalizer, in_order
from router.core.disagg.splittable_requests import can_disaggregate
from router.core.fleet.models import NoReplicaReady, UnknownModel
from router.core.insights.prompt_memory.diff_candidate import DiffCandidate
from router.core.placement.placement_request import PlacementRequest
from router.core.prompts import agent_headers
from router.core.prompts.block_keys import Chain, chain_of, ring_key
from router.core.prompts.cache_identity import FEWER_TOOLS
from router.core.prompts.incremental_parse import BodyPrefixCache
from router.core.prompts.json_fields import step_of
from router.core.types.cache_misses import PromptAnalysis
from router.core.types.requests import AgentIds, Prompt, RequestSpec
from router.http.request import Refusal, Request
from router.ingress import local_responses
from router.ingress.body import (
    ParseContext,
    hash_without_tools,
    model_forbidden,
    needs_normalization,
    normalize_tools,
    parse,
    scope_to_tenant,
    strip_kv_transfer_params,
)
from router.ingress.codings import is_opaque
from router.ingress.failover_policy import FailoverPlanResult, build_failover_plan, wants_failover
from router.ingress.local_responses import HISTORY_CHANGED, no_replica_ready
from router.ingress.model_names import Meant, Unlisted, may_name, may_use, meant_by
from router.ingress.parse_queue import ParseQueue
from router.ingress.prompt_observer import PromptObserver
from router.ingress.proxied_request import STORED, ProxiedRequest
from router.ingress.rate_reservation import reserve_rate
from router.ingress.session_identity import SessionHasher
from router.ingress.ttft_deadline import ttft_ms_of
from router.ingress.upstream_headers import UpstreamHeaders, should_request_usage
from router.placement_api import PlacementService
from router.tokenization.request_tokens import RequestTokenizer

# Paths with requests that need no prefill.
NO_PREFILL_PATHS = (
    "/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/v1/messages/count_tokens",
    "/v1/chat/completions/render", "/v1/completions/render", "/v1/messages/render", "/cohere/v2/chat/render",
    "/v1/chat/completions/derender", "/v1/completions/derender", "/parse_function_call", "/separate_reasoning",
)  # fmt: skip
BYTES_PER_TOKEN = 4  # assumed for a body with an unknown prompt
# Memory limits for each of the two threads that read bodies: beginnings of bodies; tools before and after repair.
SEEN_BYTES_MAX, REPAIRED_BYTES_MAX = 16 << 20, 4 << 20

_STEP = re.compile(r"[\w.:-]{1,64}", re.ASCII)


_API, _INSIGHTS, _UPSTREAM, _DISAGG = ApiSettings(), InsightsSettings(), UpstreamSettings(), DisaggSettings()


class _ParsedBody(Struct, eq=False):  # a Struct for speed: core/types/requests.py
    """Result of reading a body, and the body for the engine."""

    ask: RequestSpec
    chain: Chain | None
    meant: Meant | None  # None for a request that may go to any replica
    sighting: PromptAnalysis | None
    warning: str
    body: bytes
    repairs: tuple[str, ...]
    ids: AgentIds | None
    planned: FailoverPlanResult


class RequestParser:
    """Turns requests into Questions."""

    def __init__(
        self,
        placer: PlacementService,
        tokens: RequestTokenizer | None,
        limits: LimitSettings,
        *,
        api: ApiSettings = _API,
        insights: InsightsSettings = _INSIGHTS,
        upstream: UpstreamSettings = _UPSTREAM,
        disagg: DisaggSettings = _DISAGG,
        secret: str = "",
        messages_bytes_max: int = 0,
        observer: PromptObserver | None = None,
    ) -> None:
        """Create a reader.

        - `tokens`: turns prompts into token ids. Without it every prompt is placed by estimate.
        - `limits`, `api`, `insights`, `upstream`, `disagg`: sections of the settings. The repairs of tools and the
          history policy of `insights` apply to callers without a key.
        - `secret`: isolated tenants' salts are derived from it.
        - `messages_bytes_max`: size of the decoded messages that are also kept of long bodies if their token ids are
          wanted, for the conversations' next turns.
        - `observer`: reads the texts of prompts, which are then dropped.
        """
        self._placer = placer
        self._tokens = tokens
        self._observer = observer
        self._secret = secret.encode()
        self._kinship = SessionHasher(self._secret)
        self.forwarding = UpstreamHeaders()
        self._parse_thread = ThreadPoolExecutor(1, "parse")
        self.turns = ParseQueue(clock=time.monotonic)
        sizes = (SEEN_BYTES_MAX, SEEN_BYTES_MAX + messages_bytes_max)
        self._seen, self._seen_aside = (BodyPrefixCache(bytes_max=size, seed=secrets.randbits(64)) for size in sizes)
        self._aside_lock = Lock()
        self._unlisted = Unlisted(time.monotonic)
        self._repairs, self._repairs_aside = (ToolNormalizer(bytes_max=REPAIRED_BYTES_MAX) for _ in range(2))
        self._splits = bool(disagg.kv_connector)
        # False: engines require disaggregated prefill, which is impossible for a stream that has begun
        self._fails_over = disagg.kv_connector != "sglang"
        self.configure(limits, api, insights, upstream)

    def configure(
        self, limits: LimitSettings, api: ApiSettings, insights: InsightsSettings, upstream: UpstreamSettings
    ) -> None:
        """Use these sections of the settings for the requests that follow."""
        self._limits, self._api, self._insights = limits, api, insights
        self._failover, self._failover_models = (
            upstream.stream_failover,
            continued_models(upstream.stream_failover_models),
        )
        self._repairs_wanted = in_order(insights.normalize_tools)
        self.forwarding.step_header = insights.step_header.lower().encode()
        self.turns.bytes_max, self.turns.wait_s = limits.parse_queue_bytes_max, limits.parse_queue_timeout_s

    def close(self) -> None:
        """Stop the thread."""
        self._parse_thread.shutdown(wait=False, cancel_futures=True)

    async def parse(
        self, request: Request, request_id: str, caller: Caller = ANONYMOUS, *, relayed: bool = True
    ) -> ProxiedRequest:
        """Parse the body, hash its prompt, compare it with earlier ones, and turn it into tokens. `relayed`: the answer
        passes through the router, so that fields which only the router requested can be removed from it. Raises
        Refusal."""
        how = self._make_parse_context(request, caller)
        how.relayed = relayed
        id_ = request_id if caller.tenant is None else local_responses.engine_id(request, request_id)
        charged = reserve_rate(self._placer, request, caller)
        if how.thread is None:
            read = await self._read(request, how, id_)
        else:
            await self.turns.take(caller.name, caller.priority, request.body_bytes)
            try:
                how.shorten(request)
                read = await self._read(request, how, id_)
            finally:
                self.turns.give_back()
        return await self._build_request(request, id_, caller, how, read, charged=charged)

    async def _read(self, request: Request, how: ParseContext, id_: str) -> _ParsedBody:
        """Read a body, in the thread of long ones or here. Engines know the request as `id_`. Raises Refusal."""
        tenant = how.tenant
        repairs: tuple[str, ...] = ()
        try:
            parsed = await how.run(parse, request, how)
            meant = await self._resolve_names(parsed.ask, how)
            if how.repairs_wanted and how.dialect is not None and needs_normalization(request.path, parsed.ask):
                repairs = await how.run(normalize_tools, request, how)
            if repairs:
                parsed = await how.run(parse, request, how)
        except InvalidBody as error:
            raise Refusal(400, error.code, str(error)) from error
        ask, chain = parsed.ask, parsed.chain
        model = meant.model if meant is not None else None
        if meant is not None and ask.prompt is not None and (chain is None or meant.adapter):
            work = hash_without_tools if self._leaves_out(ask.prompt, meant.model) else chain_of
            chain = await how.run(work, ask, meant.identity)
        seen = self._look(request, ask, chain, how)
        sighting = (
            await self._finish_comparison(seen, request, ask, chain, how) if isinstance(seen, DiffCandidate) else seen
        )
        ids = agent_headers.ids_of(request.fields, ask.names)
        if sighting is not None:
            sighting.step, sighting.agent = ask.step, agent_headers.label_of(ids)
        warning = _make_history_warning(sighting, how)
        if ask.prompt is not None:
            ask.prompt.release()
        body = request.body
        if tenant is not None:
            self._check_isolation(request.path, model, tenant)
            body = await how.run(scope_to_tenant, request, ask, tenant, id_)
        elif self._splits:
            body = await how.run(strip_kv_transfer_params, request)
        plan: FailoverPlanResult = (None, "")
        if ask.stream and model is not None and how.relayed and how.dialect is not None:
            wants = wants_failover(request, tenant, model, self._failover_models, self._failover)
            if wants and not self._fails_over:
                plan = (None, "split")
            elif wants:
                engines, room = frozenset(self._placer.engines(model)), self._placer.context_tokens(model)
                plan = await how.run(build_failover_plan, request.path, body, ask, engines, room)
        return _ParsedBody(ask, chain, meant, sighting, warning, body, repairs, ids, plan)

    async def _build_request(
        self, request: Request, id_: str, caller: Caller, how: ParseContext, read: _ParsedBody, *, charged: bool
    ) -> ProxiedRequest:
        """Return the question for a body that was read, with its prompt's tokens if they are wanted."""
        ask, meant, body, tokens = read.ask, read.meant, read.body, None
        model = meant.model if meant is not None else None
        if self._tokens is not None and how.dialect is not None and model and self._placer.wants_token_ids():
            view = self._placer.tokenization_spec(model)
            if view is not None and meant is not None and meant.adapter != view.adapter and meant.adapter:
                view = replace(view, adapter=meant.adapter)
            if view is not None:
                tokens = await self._tokens.tokenize_request(how.dialect, request.path, body, ask, model, view)
        # free memory: the question lives until the end of its answer
        ask.decoded, ask.metadata, ask.names = None, b"", None
        wanted = _build_placement_request(
            request, body, ask, read.chain, caller, self._kinship.affinity_key(request, read.ids, ask, caller)
        )
        wanted.conversation = self._kinship.conversation_ref(read.ids, caller)
        wanted.model, wanted.tokens, wanted.sighting, wanted.charged = model, tokens, read.sighting, charged
        question = self._question(request, id_, body, how, wanted)
        question.set_failover_plan(*read.planned)
        question.repairs, question.warning, ask.stream_options = read.repairs, read.warning, None
        question.whose = self._kinship.labels(request, read.ids, ask, caller)
        if question.body is not request.body:
            request.replace_body([question.body], request.body_bytes)  # one copy is enough
        if how.mark and not self._splits:  # the bodies of both stages are made from its content
            question.body = how.mark + question.body
        return question

    async def parse_headers_only(
        self, request: Request, request_id: str, caller: Caller, model: str | None
    ) -> ProxiedRequest:
        """Return the question of a request with a body that does not pass through the router, for this model or for the
        only one that is served. Raises Refusal."""
        tenant = caller.tenant
        if tenant is not None and (tenant.isolated or tenant.models is not None):
            what = "The permissions of this API key depend on the body, which the gateway does not send"
            raise Refusal(400, "body_needed", f"{what}; set its request_body_mode to BUFFERED.")
        how = self._make_parse_context(request, caller)
        ask = RequestSpec(model)
        found = await self._resolve_names(ask, how)
        charged = reserve_rate(self._placer, request, caller)
        ids = agent_headers.ids_of(request.fields, None)
        hint = (
            self._kinship.affinity_key(request, ids, ask, caller) or request_id
        )  # requests without a session are spread
        wanted = _build_placement_request(request, b"", ask, None, caller, hint)
        wanted.model = found.model if found is not None else None
        wanted.charged, wanted.conversation = charged, self._kinship.conversation_ref(ids, caller)
        id_ = request_id if tenant is None else local_responses.engine_id(request, request_id)
        question = self._question(request, id_, b"", how, wanted)
        question.whose = self._kinship.labels(request, ids, ask, caller)
        return question

    # -- body ----------------------------------------------------------------------------------------------------

    def _make_parse_context(self, request: Request, caller: Caller) -> ParseContext:
        """Return the parameters for reading this request's body. Raises Refusal for a compressed body, and for an
        invalid deadline."""
        tenant, dialect = caller.tenant, PATHS.get(request.path)
        must_read = tenant is not None or self._splits
        opaque = is_opaque(request, must_read=must_read)
        aside = request.body_bytes >= self._limits.offload_bytes_min
        salt = None
        if tenant is not None and tenant.isolated:
            salt = partial(tenant_isolation.tenant_salt, self._secret, tenant.name)
        reading = ParseContext(
            dialect=dialect,
            tenant=tenant,
            model_required=not request.path.startswith(STORED),
            model_certain=tenant is not None and tenant.models is not None,
            repairs_wanted=self._repairs_wanted if tenant is None else tenant.normalize_tools,
            append_only=self._insights.history_policy if tenant is None else tenant.history_policy,
            keep=dialect is not None and self._tokens is not None and self._placer.wants_token_ids(),
            depth_max=self._limits.json_depth_max,
            parts_max=self._limits.json_parts_max,
            values_max=self._limits.json_values_max,
            salt=salt,
            placer=self._placer,
            seen=self._seen_aside if aside else self._seen,
            repairs=self._repairs_aside if aside else self._repairs,
            thread=self._parse_thread if aside else None,
            lock=self._aside_lock,
        )
        reading.passes_unread, reading.opaque = not must_read, opaque
        if (ttft_ms := ttft_ms_of(request, caller)) is not None:
            reading.ttft_ms, reading.due_s = ttft_ms, time.monotonic() + ttft_ms / 1e3
        return reading

    async def _resolve_names(self, ask: RequestSpec, how: ParseContext) -> Meant | None:
        """Resolve the request's names; None if the path needs no model. If no replica is known to serve a name, the
        model lists are read again, because a replica may serve it by now. Raises Refusal."""
        tenant = how.tenant
        if ask.model is None and not how.model_required:
            return None
        if tenant is not None and not may_name(tenant, ask):
            raise model_forbidden()
        found = self._try_resolve(ask)
        unlisted = found.adapter if isinstance(found, Meant) and not found.listed else ""
        if (isinstance(found, UnknownModel) and ask.model) or (unlisted and self._unlisted.is_due(unlisted)):
            await self._placer.look(unlisted or ask.model or "")
            found = self._try_resolve(ask)
        if isinstance(found, NoReplicaReady):
            refusal = no_replica_ready(*self._placer.readiness_summary(ask.model))
            # other names come from the client, and must not become metrics labels
            if ask.model and self._placer.engines(ask.model):
                refusal.model = ask.model
            else:
                refusal.model = self._placer.find_expected_base(ask.model)
            raise refusal from found
        if isinstance(found, UnknownModel):
            raise _unknown(ask, found, tenant) from found
        if tenant is not None and not may_use(tenant, ask, found):
            raise model_forbidden()
        return found

    def _try_resolve(self, ask: RequestSpec) -> Meant | NoReplicaReady | UnknownModel:
        """Resolve the names, or return the error: native code must not await while it handles an exception
        (deploy/compiled.py)."""
        try:
            return meant_by(self._placer, ask, self._api.unknown_models)
        except (NoReplicaReady, UnknownModel) as error:
            return error

    def _leaves_out(self, prompt: Prompt, model: str) -> bool:
        """True if the model's engines omit the tools that this prompt may not call."""
        return prompt.fewer_tools is not None and FEWER_TOOLS.issuperset(self._placer.engines(model))

    def _check_isolation(self, path: str, model: str | None, tenant: Tenant) -> None:
        """Raises Refusal for a path on which the model's engines would not keep an isolated tenant's caches
        separate."""
        if not tenant.isolated or path in NO_PREFILL_PATHS or path.startswith(STORED):
            return
        engines = self._placer.engines(model) if model is not None else ()
        if path not in PATHS or not tenant_isolation.can_isolate(path, engines):
            what = "No engine of this model isolates the caches of tenants on this path"
            raise Refusal(400, "isolation_unsupported", f"{what}, but this tenant requires isolation.")

    # -- history -------------------------------------------------------------------------------------------------

    def _look(
        self, request: Request, ask: RequestSpec, chain: Chain | None, how: ParseContext
    ) -> PromptAnalysis | DiffCandidate | None:
        """Compare this prompt with earlier ones by a quick look. None without an observatory."""
        if self._observer is None:
            return None
        ask.step = self._step(request, ask)
        sure, always = how.append_only != OFF, how.append_only == REJECT
        return self._observer.inspect(ask, chain, request, sure=sure, always=always, tenant=how.observed_tenant)

    def _step(self, request: Request, ask: RequestSpec) -> str:
        """Return the step of an agent that the request names; "" if it names none."""
        said = request.fields.get(self.forwarding.step_header)
        step = said.decode("ascii", "replace") if said is not None else step_of(ask.metadata, self._insights.step_field)
        return step if step and _STEP.fullmatch(step) else ""

    async def _finish_comparison(
        self, look: DiffCandidate, request: Request, ask: RequestSpec, chain: Chain | None, how: ParseContext
    ) -> PromptAnalysis | None:
        """Complete the comparison with earlier prompts if a quick look was not enough."""
        if self._observer is None or chain is None:
            return None
        aside, sure, rejects = how.thread is not None, how.append_only != OFF, how.append_only == REJECT
        return await self._observer.compare(
            look,
            ask,
            chain,
            request,
            self._parse_thread,
            aside=aside,
            sure=sure,
            rejects=rejects,
            tenant=how.observed_tenant,
        )

    # -- forwarding ----------------------------------------------------------------------------------------------

    def _question(
        self, request: Request, request_id: str, body: bytes, how: ParseContext, wanted: PlacementRequest
    ) -> ProxiedRequest:
        """Return the request in the form for an engine."""
        dialect, ask = how.dialect, wanted.ask
        wanted.due_s = how.due_s
        metered = how.tenant is not None and bool(how.tenant.tokens_per_min)
        asks = how.relayed and dialect is not None and ask.stream and not ask.wants_usage
        asks = asks and should_request_usage(self._api.ask_usage, self._placer, wanted.model, metered=metered)
        question = ProxiedRequest(
            request=request,
            lines=self.forwarding.lines(request, request_id),
            body=body,
            dialect=dialect or dialect_of(request.path),
            wanted=wanted,
            asks_usage=asks,
            receipts=how.tenant is None or how.tenant.receipts,
            metered=metered,
        )
        if asks:
            question.stream_options = ask.stream_options
        question.ttft_ms, question.form_streams = how.ttft_ms, how.form_streams
        # A stalled P2P KV transfer is detected by a late first event, so only streams may use such transfers.
        wanted.may_pull = ask.stream and dialect is not None and request.path in PULLING and not question.stored
        if self._splits:
            wanted.may_split = self._may_split(question)
        return question

    def _may_split(self, question: ProxiedRequest) -> bool:
        """True if one replica may prefill the request and another one decode it. An answer of one token is complete
        after its prefill, and stored responses stay with the replica that made them."""
        wanted, path = question.wanted, question.request.path
        if question.stored or wanted.response_id is not None or wanted.model is None or wanted.ask.prompt is None:
            return False
        if wanted.ask.output_tokens_max is not None and wanted.ask.output_tokens_max <= 1:
            return False
        return can_disaggregate(path, question.body, frozenset(self._placer.engines(wanted.model)))


def _build_placement_request(
    request: Request, body: bytes, ask: RequestSpec, chain: Chain | None, caller: Caller, hint: str | None
) -> PlacementRequest:
    """Return the data for placement, without the model, tokens, comparison result and conversation. `hint` is the ring
    key; None for a key from the prompt."""
    path = request.path
    return PlacementRequest(
        ask=ask,
        model=None,
        chain=chain,
        ring_key=ring_key(ask, chain, hint, body),
        body_tokens=0 if path in NO_PREFILL_PATHS else len(body) // BYTES_PER_TOKEN,
        response_id=path.removeprefix(STORED).partition("/")[0] if path.startswith(STORED) else ask.response_id,
        tenant=caller.name,
        priority=caller.priority,
        body_bytes=len(body),
    )


def _make_history_warning(sighting: PromptAnalysis | None, how: ParseContext) -> str:
    """Return a header's value for a client with an append-only conversation that was changed. Raises Refusal if such a
    change must be refused."""
    changed = local_responses.history_change(sighting) if how.append_only != OFF else None
    if changed is None:
        return ""
    if how.append_only == REJECT:
        raise Refusal(409, HISTORY_CHANGED, local_responses.change_message(changed), changed.path or None)
    return f"{HISTORY_CHANGED} {local_responses.change_header(changed)}"


def _unknown(ask: RequestSpec, unknown: UnknownModel, tenant: Tenant | None) -> Refusal:
    """Return the refusal of a request for a model that no replica serves, or of a request that names no model while
    several are served."""
    shown = unknown.known if tenant is None else [each for each in unknown.known if tenant.allows(each)]
    known = ", ".join(shown[:20]) or "none"
    what = f"The model '{ask.model}' does not exist" if ask.model else "The request names no model"
    return Refusal(404 if ask.model else 400, "model_not_found", f"{what}; served are: {known}.", "model")

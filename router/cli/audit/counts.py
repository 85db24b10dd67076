"""Puts logged requests through the memory of texts into the ledger, as the router does with its own.

In place of replicas there is one cache that is big enough for all prompts: any block that an earlier prompt had is a
hit. This is the best hit rate that any placement can reach with these prompts unchanged. Misses are explained as the
router does it (core/insights/breakdown.py), with a cache that neither evicts nor leaves.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable

from msgspec import Struct

from router.cli.audit.log_requests import LoggedRequest
from router.cli.audit.router_log import Served
from router.core.dialects import PATHS
from router.core.estimators.token_ratio import BYTES_PER_TOKEN, ModelTokens, plausible
from router.core.insights.difference.compare import compare
from router.core.insights.ledger.totals import Ledger
from router.core.insights.prompt_memory.prompt_tracker import PromptTracker
from router.core.insights.token_funnel import token_fates
from router.core.insights.two_generation_cache import Generations
from router.core.prompts.block_keys import Chain, chain_of
from router.core.types.cache_misses import MissReason, PromptAnalysis, TokenBreakdown, TokenFate
from router.core.types.ended_requests import CacheUse, ClientInfo, RequestTimes
from router.core.types.placements import Usage
from router.core.types.requests import Prompt, RequestSpec

BLOCK_TOKENS = 16  # engines' usual block size; parts of a block are not cached
PROMPT_BYTES_MAX = 8 << 20
TEMPLATES_MAX, GROUPS_MAX = 1_024, 200
PROMPTS_MAX = 1 << 20  # prompts remembered to recognize identical ones
MODELS_MAX = 1_024
PROGRESS_EVERY = 1_000  # requests between two transfers of templates to the ledger

Tokenizer = Callable[[LoggedRequest, RequestSpec], int]  # number of tokens of a prompt; 0 if unknown


class _Placed(Struct):
    predicted_cached_tokens: int
    replay: bool
    replica: str = ""  # a log names none


class _Ended(Struct):
    """Request in the form that the ledger accepts. All have the same time, so that no sum fades."""

    route: str
    model: str
    client: ClientInfo
    cache: CacheUse
    receipt: _Placed
    times: RequestTimes
    at_s: float = 0.0
    usage: Usage | None = None


class Audit:
    """Sums over a log's requests."""

    def __init__(self, *, memory_bytes_max: int, excerpts: bool, tokenizer: Tokenizer | None = None) -> None:
        """`memory_bytes_max` limits the texts; all other data takes one or two hundred megabytes."""
        self._watcher = PromptTracker(
            memory_bytes_max, PROMPT_BYTES_MAX, TEMPLATES_MAX, excerpts=excerpts, seed=secrets.randbits(64)
        )
        self._excerpts = excerpts
        self._tokenizer = tokenizer
        self._prompts: Generations[bool] = Generations(PROMPTS_MAX)
        self._models: dict[str, ModelTokens] = {}
        self.ledger = Ledger(
            templates_max=TEMPLATES_MAX, groups_max=GROUPS_MAX, steps_max=1, excerpts=excerpts, tenant=str, now_s=0.0
        )
        self.served = Served()
        self.places: Counter[TokenFate] = Counter()  # tokens by the place where they end, with that one cache
        self.requests = 0
        self.body_bytes = 0
        # requests by the source of their token count: usage, tokenizer or bytes
        self.counted_by: Counter[str] = Counter()
        self.logged_tokens = self.logged_hits = 0  # sums over requests with hits reported by the engine
        self.first_s = self.last_s = 0.0  # Unix time; 0: no time was logged

    @property
    def forgot(self) -> bool:
        """True if the memory was too small for the whole log."""
        return self._watcher.forgot

    def add(self, request: LoggedRequest) -> None:
        """Count the next request. Raises InvalidBody."""
        if not request.body:
            self._note(request)
            return
        ask = PATHS[request.path].parse(request.path, request.body, keep=self._tokenizer is not None)
        self.requests += 1
        self.body_bytes += len(request.body)
        self._note(request)
        model = ask.model or request.model
        chain = chain_of(ask, model)
        if ask.prompt is None or chain is None:
            tokens = request.prompt_tokens or max(1, int(len(request.body) / BYTES_PER_TOKEN))
            miss, sighting, replay = TokenBreakdown(tokens, 0, {MissReason.UNSUPPORTED: tokens}), None, False
        else:
            tokens, bytes_per_token = self._size(request, ask, ask.prompt, model)
            sighting = self._see(request, ask, chain)
            miss = _break_down_tokens(tokens, bytes_per_token, sighting)
            replay = self._prompts.get(chain.end_key) or False
            self._prompts.put(chain.end_key, True)
        self.places.update(token_fates(miss, replay=replay))
        client, cache = ClientInfo(request.tenant), CacheUse(sighting, miss)
        self.ledger.observe(_Ended(request.path, model, client, cache, _Placed(miss.hit, replay), RequestTimes()))
        if self.requests % PROGRESS_EVERY == 0:
            self.settle()

    def settle(self) -> None:
        """Settle the ledger, before it is read."""
        self.ledger.know(self._watcher.templates())
        self.ledger.settle(0.0)

    def bytes_per_token(self, model: str) -> float:
        """Return the learned bytes per token of this model."""
        tokens = self._models.get(model)
        return tokens.bytes_per_token if tokens is not None else BYTES_PER_TOKEN

    def _note(self, request: LoggedRequest) -> None:
        if request.cached_tokens is not None:
            self.logged_tokens += request.prompt_tokens
            self.logged_hits += request.cached_tokens
        if request.at_s is not None:
            self.first_s = min(self.first_s or request.at_s, request.at_s)
            self.last_s = max(self.last_s, request.at_s)

    def _size(self, request: LoggedRequest, ask: RequestSpec, prompt: Prompt, model: str) -> tuple[int, float]:
        """Return the tokens of a prompt and its bytes per token: as logged, or by the tokenizer, or as learned."""
        if prompt.bytes_per_token is not None and not prompt.opaque_bytes:
            self.counted_by["ids"] += 1
            return max(1, round(prompt.size / prompt.bytes_per_token)), prompt.bytes_per_token
        learned = self._models.get(model)
        if learned is None:
            if len(self._models) >= MODELS_MAX:
                self._models.clear()
            learned = self._models[model] = ModelTokens()
        tokens, by = request.prompt_tokens, "usage"
        if not tokens and self._tokenizer is not None:
            tokens, by = self._tokenizer(request, ask), "tokenizer"
        if tokens:
            ratio = prompt.size / tokens
            if prompt.bytes_per_token is None:
                learned.observe(prompt.size - prompt.opaque_bytes, tokens, prompt.opaque_bytes)
            if plausible(ratio) or prompt.opaque_bytes:
                self.counted_by[by] += 1
                return tokens, ratio
        self.counted_by["bytes"] += 1
        tokens = learned.tokens_of(prompt)
        return tokens, prompt.size / tokens if prompt.opaque_bytes else learned.bytes_per_token

    def _see(self, request: LoggedRequest, ask: RequestSpec, chain: Chain) -> PromptAnalysis:
        session, path, body = request.session, request.path, request.body
        look = self._watcher.classify(ask, chain, session=session, path=path, body=body, sure=True)
        if isinstance(look, PromptAnalysis):
            return look
        if look.comparable:
            look.read()
            compared = compare(
                look.before,
                look.after,
                from_bytes=look.from_bytes,
                body=look.body,
                path=look.path,
                excerpts=self._excerpts,
            )
            self._watcher.record_diff(look, compared)
        return look.sighting


def _break_down_tokens(tokens: int, bytes_per_token: float, sighting: PromptAnalysis) -> TokenBreakdown:
    """Divide the prompt's tokens into stretches in this order: hit, identity or diverged, cold or new, tail."""
    whole = (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    hit = min(whole, int(sighting.known_bytes / bytes_per_token) // BLOCK_TOKENS * BLOCK_TOKENS)
    misses: dict[MissReason, int] = {}
    left = whole - hit
    if sighting.repeated_bytes:
        misses[MissReason.DIVERGED] = min(left, round(sighting.repeated_bytes / bytes_per_token))
    elif not sighting.known_bytes:
        misses[MissReason.IDENTITY] = min(left, int(sighting.identity_bytes / bytes_per_token))
    left -= sum(misses.values())
    related = sighting.known_bytes or sighting.repeated_bytes or sighting.turn or sighting.template
    misses[MissReason.NEW if related else MissReason.COLD] = left
    misses[MissReason.TAIL] = tokens - whole
    return TokenBreakdown(tokens, hit, {miss: size for miss, size in misses.items() if size})

"""Environment of the cost benchmark: a router with followed replicas, and engines under its control.

Bodies go through the router's own RequestParser, template, tokenizer and placement. Engines are the events that vLLM
would send for the placed requests. CPU is that of the whole process (`time.process_time`), so work in other threads
counts.
"""

from __future__ import annotations

import cProfile
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from loadtest.common.in_process_router import ignore, join, local_placer, make_json_request, warm_router
from loadtest.core_cost.corpus import MODEL
from router.config.schema import LimitSettings, Settings
from router.core.cache_state.event_index import EventIndex
from router.core.dialects import PATHS
from router.core.fleet.lease import Lease
from router.core.kv_events.batch_decoder import decode, slices
from router.core.prompts.block_keys import chain_of, token_chain
from router.core.prompts.token_keys import KeyCache, TokenPrompt, rest
from router.core.types.placements import Confidence, EndReason, Outcome, Usage
from router.core.types.replicas import Load
from router.ingress.parser import RequestParser
from router.ingress.proxied_request import ProxiedRequest
from router.tokenization.encoder import PromptEncoder
from router.tokenization.request_tokens import RUNS_MAX, RequestTokenizer

CHAT = "/v1/chat/completions"
BLOCK_TOKENS = 16
REPLICAS = 8
ANSWER_TOKENS = 200
SLICE_BLOCKS = 1_024
STAGES = ("parse", "canonical", "input", "tokens", "keys", "place", "finish")


class CostError(RuntimeError):
    """The measured case did not occur; the message names the reason."""


# Events of engines


def make_stored_event(
    ids: bytes, keys: Sequence[int], first: int, end: int, *, as_map: bool
) -> dict[str, Any] | list[Any]:
    """Return the stored blocks `first` to `end` of a prompt as a vLLM event.

    It is a map (0.24 and later) or an array (before).
    """
    tokens = list(memoryview(ids).cast("I")[first * BLOCK_TOKENS : end * BLOCK_TOKENS])
    names = [_engine_hash(key) for key in keys[first:end]]
    event: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": _engine_hash(keys[first - 1]) if first else None,
        "token_ids": tokens,
        "block_size": BLOCK_TOKENS,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(names),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return event if as_map else list(event.values())


def make_removed_event(key: int, *, as_map: bool) -> dict[str, Any] | list[Any]:
    """Return the removal of one block as a vLLM event."""
    event = {"type": "BlockRemoved", "block_hashes": [_engine_hash(key)], "medium": "GPU", "group_idx": 0}
    return event if as_map else list(event.values())


def _engine_hash(key: int) -> int:
    return xxh3_64_intdigest(key.to_bytes(8, "big"))


def token_ids(rng: random.Random, blocks: int) -> bytes:
    """Return random ids as large as those of current vocabularies, uint32 little-endian."""
    return b"".join(rng.randrange(150_000).to_bytes(4, "little") for _ in range(blocks * BLOCK_TOKENS))


def batch(events: list[Any]) -> bytes:
    """Return one message of an engine's stream."""
    return msgspec.msgpack.encode([time.time(), events, 0])


def follow(knowledge: EventIndex, replica: str, payload: bytes, now_s: float) -> None:
    """Process one message as the router does."""
    for event in decode(payload).events:
        for part in slices(event, SLICE_BLOCKS):
            knowledge.apply(replica, part, now_s)


# Decisions


@dataclass(slots=True)
class Decision:
    """CPU of one decision in seconds, and of its stages if they were measured one by one."""

    cpu_s: float
    ids: bytes
    replica: str
    cached_tokens: int
    stages_s: dict[str, float] = field(default_factory=dict)


class PricedRouter:
    """A router with eight followed replicas, and engines that compute each placed prompt. Its clock is artificial."""

    def __init__(self, folder: Path, *, one_thread: bool = False) -> None:
        settings = Settings()
        offload_bytes_min = sys.maxsize if one_thread else settings.limits.offload_bytes_min
        self.now_s = 1_000.0
        self.profiler: cProfile.Profile | None = None
        self.router = warm_router()
        self.prompts = PromptEncoder(
            {MODEL: str(folder)},
            deadline_s=60.0,
            cache_bytes_max=settings.tokens.cache_bytes_max,
            offload_bytes_min=offload_bytes_min,
        )
        self.placer = local_placer(self.router, lambda: self.now_s, settings.admission)
        tokens = RequestTokenizer(self.prompts, None, offload_bytes_min=offload_bytes_min)
        self.reader = RequestParser(self.placer, tokens, LimitSettings(offload_bytes_min=offload_bytes_min))
        self._keys = KeyCache(RUNS_MAX)
        self._stored: dict[str, set[int]] = {}
        self.replicas = join(self.router, REPLICAS, MODEL, Load(kv_tokens_max=4_000_000, block_tokens=BLOCK_TOKENS))
        for name in self.replicas:
            self.router.knowledge.grade(name, Confidence.EXACT, "joined at batch 0", self.now_s)
        self.router.models.observe_tokens(MODEL, "")

    def close(self) -> None:
        """Stop the threads of the reader and the prompts."""
        self.reader.close()
        self.prompts.close()

    def fill(self, blocks: int) -> None:
        """Let every replica hold `blocks` different blocks."""
        rng = random.Random(1)
        for name in self.replicas:
            for _ in range(blocks // SLICE_BLOCKS):
                self.hold(name, token_ids(rng, SLICE_BLOCKS))

    def spread(self, ids: bytes) -> None:
        """Let each replica hold the prompt up to its number in eighths: nothing, one eighth, two eighths, and so on."""
        for number, name in enumerate(self.replicas):
            self.hold(name, ids[: len(ids) // 4 * number // REPLICAS * 4])

    def hold(self, replica: str, ids: bytes) -> None:
        """Let the replica's engine compute a prompt and publish its blocks."""
        keys = token_chain(ids, BLOCK_TOKENS, 0)
        known = self._stored.setdefault(replica, set())
        first = next((i for i, key in enumerate(keys) if key not in known), len(keys))
        known.update(keys[first:])
        if first < len(keys):
            event = make_stored_event(ids, keys, first, len(keys), as_map=True)
            follow(self.router.knowledge, replica, batch([event]), self.now_s)

    async def decide(self, body: bytes) -> Decision:
        """Run one request as a whole through the router's own code."""
        request = make_json_request(CHAT, body)
        begun_s = self._begin()
        question = await self.reader.parse(request, "cost")
        understood_s = self._end(begun_s)
        placed = self._place(question)
        placed.cpu_s += understood_s
        return placed

    async def stages(self, body: bytes) -> Decision:
        """Run a decision step by step, every step on this thread."""
        dialect, marks = PATHS[CHAT], [time.process_time()]

        def mark() -> None:
            marks.append(time.process_time())

        ask = dialect.parse(CHAT, body)
        mark()
        chain = chain_of(ask, MODEL)
        mark()
        given = dialect.template_input(CHAT, body, ask.decoded)
        mark()
        ids = await self.prompts.encode(given, MODEL, "vllm") if given else None
        mark()
        if not ids or chain is None:
            raise CostError("the prompt could not be turned into tokens: see the log above")
        prompt = TokenPrompt(ids, "", b"")
        keys = self._keys.find_leading_keys(prompt, BLOCK_TOKENS)
        known = len(keys)
        keys += rest(prompt, BLOCK_TOKENS, keys)
        self._keys.learn(prompt, BLOCK_TOKENS, keys, known)
        mark()
        question = await self.reader.parse(make_json_request(CHAT, body), "cost")
        question.wanted.tokens = prompt
        placed = self._place(question)
        spent = [after - before for before, after in pairwise(marks)]
        placed.stages_s = dict(zip(STAGES, spent, strict=False)) | placed.stages_s
        placed.cpu_s = sum(spent for name, spent in placed.stages_s.items() if name != "finish")
        return placed

    def _place(self, question: ProxiedRequest) -> Decision:
        """Place a request, let it be answered, and finish it."""
        wanted = question.wanted
        if wanted.tokens is None:
            raise CostError("the prompt was placed by estimate: no tokens")
        self.now_s += 1.0
        begun_s = self._begin()
        lease = self.placer.admission.admit(wanted, frozenset(), ignore)
        place_s = self._end(begun_s)
        if not isinstance(lease, Lease):
            raise CostError("an idle fleet is reported as full")
        self.now_s += 1.0
        usage = Usage(wanted.tokens.tokens, ANSWER_TOKENS, lease.cached_tokens)
        self.hold(lease.replica, wanted.tokens.ids)
        begun_s = self._begin()
        self.placer.finish(lease, Outcome(EndReason.OK, usage), self.now_s)
        finish_s = self._end(begun_s)
        spent = {"place": place_s, "finish": finish_s}
        return Decision(place_s, wanted.tokens.ids, lease.replica, lease.cached_tokens, spent)

    def _begin(self) -> float:
        if self.profiler:
            self.profiler.enable()
        return time.process_time()

    def _end(self, begun_s: float) -> float:
        spent_s = time.process_time() - begun_s
        if self.profiler:
            self.profiler.disable()
        return spent_s

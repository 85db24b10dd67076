"""Parts of the record of a request: its client, its times, and its use of the cache."""

from __future__ import annotations

from msgspec import Struct

from router.core.types.cache_misses import PromptAnalysis, TokenBreakdown, TokenFate
from router.core.types.requests import Priority


class ClientInfo(Struct):
    """Facts about the client of a request, from its key and its headers."""

    tenant: str = ""
    # Keys of names that the client chose (telemetry/request_record.py, `session_key`); "" for none.
    session: str = ""  # of its session
    agent_id: str = ""  # of its agent's conversation
    agent_parent: str = ""  # of the conversation that started that one
    agent: str = ""  # kind of its agent (core/prompts/agent_headers.py); "" if unknown
    agent_final: bool = False  # True if the client declares the conversation finished
    priority: Priority = Priority.NORMAL


class RequestTimes(Struct):
    """Durations of a request, and its deadline."""

    duration_s: float = 0.0
    overhead_s: float | None = None  # time from request read to the call of the first replica
    queued_s: float = 0.0  # time in the router's queue
    ttft_s: float | None = None
    inter_token_s: float | None = None
    events: int = 0  # events of the stream
    wanted_ttft_ms: float | None = None  # deadline for the first token, in milliseconds; None: no deadline
    in_time: bool | None = None  # True if a stream met this deadline; None: no first token, or no deadline


class CacheUse(Struct):
    """Cached and missed tokens of a prompt."""

    analysis: PromptAnalysis | None = None
    # reasons for missed tokens, by the engine's count if reported, otherwise as predicted
    miss: TokenBreakdown | None = None
    places: dict[TokenFate, int] | None = None  # tokens by the place where they ended, computed from `miss` once

"""Record of one request while it is served. Metrics, logs and traces are made from it when the request ends."""

from __future__ import annotations

from msgspec import Struct
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from router.core.types.cache_misses import PromptAnalysis, TokenBreakdown, TokenFate
from router.core.types.placements import Receipt, Usage
from router.core.types.requests import Priority

CAUSE = " Cause: "  # stands in an error's text before the failure behind the router, which may name replicas


class RequestRecord(Struct):
    """Facts about one request, the source of metrics, the log line and `/admin/decisions`."""

    id: str
    route: str
    at_s: float = 0.0  # Unix time
    model: str = ""
    status: int = 0
    ending: str = ""
    error: str | None = None
    # the error's message to the client, with its cause even if the client does not receive the cause
    detail: str | None = None
    stream: bool = False
    duration_s: float = 0.0
    overhead_s: float | None = None  # time from request read to the call of the first replica
    ttft_s: float | None = None
    inter_token_s: float | None = None
    events: int = 0
    receipt: Receipt | None = None
    usage: Usage | None = None
    retries: tuple[tuple[str, str], ...] = ()  # (kind of failure, replica) per attempt that was retried
    tenant: str = ""
    queued_s: float = 0.0  # time in the router's queue
    trace_id: str = ""  # "" if the request is not traced
    sighting: PromptAnalysis | None = None
    # reasons for missed tokens, by the engine's count if reported, otherwise as predicted
    miss: TokenBreakdown | None = None
    places: dict[TokenFate, int] | None = None  # tokens by the place where they ended, computed from `miss` once
    repairs: tuple[str, ...] = ()  # repairs that the body needed
    warning: str = ""  # the warning header that the client received
    session: str = ""  # `session_key` of the name that the client gave its session; "" for none
    agent: str = ""  # kind of the client's agent (core/prompts/agent_headers.py); "" if unknown
    agent_id: str = ""  # `session_key` of the agent's conversation; "" for none
    agent_parent: str = ""  # `session_key` of the conversation that started it; "" for none
    agent_final: bool = False  # True if the client declares the conversation finished
    priority: Priority = Priority.NORMAL
    wanted_ttft_ms: float | None = None  # deadline for the first token, in milliseconds; None: no deadline
    in_time: bool | None = None  # True if a stream met this deadline; None: no first token, or no deadline
    # Values for a stream that was continued on another replica; "" for any other. They are "exact", the kind of the
    # failure, and the replica that failed.
    continued: tuple[str, str, str] = ("", "", "")
    not_continued: str = ""  # reason that a stream was not continued, or could not have been
    # given by the control plane at the end: unique, rising, microseconds of Unix time if the clock is steady
    number: int = 0


def session_key(name: bytes, apart: str = "") -> str:
    """Return the key that stands for the name of a client's session: 16 hexadecimal digits.

    Names are text that clients choose, and are neither shown nor kept. A client that knows a name finds its requests by
    the key. `apart` is the name of an isolated tenant; its keys differ from those of all other tenants.
    """
    return xxh3_64_hexdigest(name, xxh3_64_intdigest(apart.encode(errors="surrogatepass")) if apart else 0)

"""What is known of one request while it is served: metrics, logs and traces are made of it when it ends."""

from __future__ import annotations

from msgspec import Struct
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from router.core.facts.misses import Breakdown, Sighting, TokenPlace
from router.core.facts.placements import Receipt, Usage
from router.core.facts.requests import Priority

CAUSE = " Cause: "  # stands in an error's text before what failed behind the router, which may name replicas


class RequestRecord(Struct):
    """Everything about one request that metrics, the log line and `/admin/decisions` are made of."""

    id: str
    route: str
    at_s: float = 0.0  # Unix time
    model: str = ""
    status: int = 0
    ending: str = ""
    error: str | None = None
    detail: str | None = None  # the error's message to the client, and its cause even where the client is not told
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
    trace_id: str = ""  # "" where the request is not traced
    sighting: Sighting | None = None
    miss: Breakdown | None = None  # why tokens missed, by the engine's count if reported, otherwise as predicted
    places: dict[TokenPlace, int] | None = None  # tokens by the place where they ended, made of `miss` once
    repairs: tuple[str, ...] = ()  # repairs that the body needed
    warning: str = ""  # the warning header that the client got
    session: str = ""  # `session_key` of the name that the client gave its session; "" for none
    agent: str = ""  # kind of agent whose client asks (core/prompts/agents.py); "" where it is not known
    agent_id: str = ""  # `session_key` of the agent's conversation; "" for none
    agent_parent: str = ""  # `session_key` of the conversation that started it; "" for none
    agent_final: bool = False  # the client says that the conversation is over
    priority: Priority = Priority.NORMAL
    wanted_ttft_ms: float | None = None  # time within which the first token was wanted; None: any
    in_time: bool | None = None  # whether a stream's first token came within that; None: there was none, or no wish
    # Of a stream that went on on another replica: exactness ("exact", "approximate"), kind of the break, and the
    # replica that broke; "" of any other.
    continued: tuple[str, str, str] = ("", "", "")
    not_continued: str = ""  # reason for which a stream was not continued, or could not have been
    number: int = 0  # given by the hub at the end: unique, rising, microseconds of Unix time where the clock is steady


def session_key(name: bytes, apart: str = "") -> str:
    """What stands for the name of a client's session: 16 hexadecimal digits. Names are text that clients choose, and
    are neither shown nor kept; whoever knows one finds its requests by it. `apart` is the name of an isolated tenant,
    whose keys no other tenant's are."""
    return xxh3_64_hexdigest(name, xxh3_64_intdigest(apart.encode(errors="surrogatepass")) if apart else 0)

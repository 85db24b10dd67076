"""Record of one request while it is served. Metrics, logs and traces are made from it when the request ends."""

from __future__ import annotations

from msgspec import Struct
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from router.core.types.ended_requests import CacheUse, ClientInfo, RequestTimes
from router.core.types.placements import Receipt, Usage

CAUSE = " Cause: "  # stands in an error's text before the failure behind the router, which may name replicas
NO_REPLICA_READY = "no_replica_ready"  # error of a request that no replica could take


class FailoverOutcome(Struct):
    """Continuation of a stream on another replica."""

    # Values for a stream that was continued on another replica; "" for any other. They are "exact", the kind of the
    # failure, and the replica that failed.
    continued: tuple[str, str, str] = ("", "", "")
    not_continued: str = ""  # reason that a stream was not continued, or could not have been


class RequestRecord(Struct):
    """Facts about one request, the source of metrics, the log line and `/admin/decisions`."""

    id: str
    route: str
    client: ClientInfo
    times: RequestTimes
    cache: CacheUse
    failover: FailoverOutcome
    at_s: float = 0.0  # Unix time
    model: str = ""
    status: int = 0
    ending: str = ""
    error: str | None = None
    # the error's message to the client, with its cause even if the client does not receive the cause
    detail: str | None = None
    stream: bool = False
    receipt: Receipt | None = None
    usage: Usage | None = None
    retries: tuple[tuple[str, str], ...] = ()  # (kind of failure, replica) per attempt that was retried
    trace_id: str = ""  # "" if the request is not traced
    repairs: tuple[str, ...] = ()  # repairs that the body needed
    warning: str = ""  # the warning header that the client received
    # given by the control plane at the end: unique, rising, microseconds of Unix time if the clock is steady
    number: int = 0


def begin_record(id_: str, route: str, at_s: float, tenant: str = "") -> RequestRecord:
    """Return the record of a request that was just received."""
    return RequestRecord(id_, route, ClientInfo(tenant), RequestTimes(), CacheUse(), FailoverOutcome(), at_s)


def session_key(name: bytes, apart: str = "") -> str:
    """Return the key that stands for the name of a client's session: 16 hexadecimal digits.

    Names are text that clients choose, and are neither shown nor kept. A client that knows a name finds its requests by
    the key. `apart` is the name of an isolated tenant; its keys differ from those of all other tenants.
    """
    return xxh3_64_hexdigest(name, xxh3_64_intdigest(apart.encode(errors="surrogatepass")) if apart else 0)

"""Parsed request: its content, its dialect, and the data for placement."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from router.core.dialects import PATHS, Dialect
from router.core.dialects.failover import FailoverPlan, with_ids
from router.core.placement.placement_request import PlacementRequest
from router.http.request import Request
from router.ingress.session_identity import SessionLabels
from router.telemetry.spans import RequestTrace

RESPONSES = "/v1/responses"
STORED = RESPONSES + "/"  # followed by the id of a stored response


class ProxiedRequest(Struct, eq=False):  # a Struct for speed: core/types/requests.py
    """A request as parsed before placement."""

    request: Request
    lines: list[bytes]  # header lines that the engine gets
    body: bytes  # body for the engine: repaired, and with a request for usage once that is decided
    dialect: Dialect
    wanted: PlacementRequest
    asks_usage: bool  # the router may request usage that the client did not request and does not get
    receipts: bool = True  # its caller may learn the location of cached parts of the prompt
    trace: RequestTrace | None = None  # None for a request that is not traced
    metered: bool = False  # its tenant has a rate of tokens, so tokens that its engine does not count are estimated
    repairs: tuple[str, ...] = ()  # repairs that its body needed
    warning: str = ""  # value of a header for the client; "" for none
    ttft_ms: float | None = None  # time limit for its first token; None: no limit
    whose: SessionLabels | None = None  # its conversation; None if no conversation is known
    plan: FailoverPlan | None = None  # plan for the failover of its stream; None: an error ends it
    not_continued: str = ""  # reason why a wanted plan does not exist
    stream_options: dict[str, Any] | None = None  # the client's own, of a stream for which usage may be requested
    usage_asked: bool = False  # only the router requested usage
    form_streams: bool = False  # a form requests a stream; no speed is learned from those (`RequestSpec.stream`)

    def release_body(self) -> None:
        """Drop the body. Its answer has begun, so it is not sent to another replica."""
        self.body = b""
        if self.plan is None or not self.plan.calls_tools:  # otherwise it may be sent once more
            self.request.release_body()

    def set_failover_plan(self, plan: FailoverPlan | None, why_not: str) -> None:
        """Set the failover plan of the stream. The engine is then asked for token ids. With None, `why_not` is the
        reason."""
        self.plan, self.not_continued = plan, why_not
        if plan is None:
            return
        # The router must read the events, so they must not be compressed: token ids could not be removed again.
        self.lines = [line for line in self.lines if line[:16].lower() != b"accept-encoding:"]
        self.body = with_ids(self.body)

    def ask_usage(self) -> None:
        """Make the engine send usage at the end of the stream."""
        self.usage_asked = True
        shared = self.body is self.request.body
        self.body = self.dialect.with_usage(self.body, self.stream_options)
        if shared:
            self.request.replace_body([self.body], self.request.body_bytes)  # one copy is enough
        if self.plan is not None:
            self.plan.ask_usage()

    @property
    def judge(self) -> Dialect | None:
        """Dialect that can decide if an event stream is complete. None on paths with streams in an unknown format."""
        request = self.request
        fetched = request.method == "GET" and request.path.startswith(STORED)  # a stored response, with `stream=true`
        return self.dialect if fetched else PATHS.get(request.path)

    @property
    def stored(self) -> bool:
        """True if the engine may store the answer, so that it must not be made twice."""
        return self.request.path.startswith(RESPONSES) and self.wanted.ask.stored is not False

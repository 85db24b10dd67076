"""One request, understood: what was asked, in which dialect, and what placing needs."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from router.core.dialects import PATHS, Dialect
from router.core.dialects.continuing import ContinuationPlan, with_ids
from router.core.placement.wanted import Wanted
from router.http.request import Request
from router.reading.kinship import Whose
from router.telemetry.spans import Moments

RESPONSES = "/v1/responses"
STORED = RESPONSES + "/"  # followed by the id of a stored response


class Question(Struct, eq=False):  # a Struct for speed: core/facts/requests.py
    """A request as far as it is understood before placing."""

    request: Request
    lines: list[bytes]  # header lines that the engine gets
    body: bytes  # the body that the engine gets: repaired, and with usage asked for once that is decided
    dialect: Dialect
    wanted: Wanted
    asks_usage: bool  # usage may be asked for, which the client did not ask for, and does not get
    receipts: bool = True  # whether its caller may be told where the prompt was found
    trace: Moments | None = None  # None for a request that is not traced
    metered: bool = False  # its tenant has a rate of tokens, so what its engine does not count is estimated
    repairs: tuple[str, ...] = ()  # repairs that its body needed
    warning: str = ""  # value of a header for the client; "" for none
    ttft_ms: float | None = None  # time within which its first token is wanted; None: any
    whose: Whose | None = None  # conversation that it belongs to; None where nothing is known of one
    plan: ContinuationPlan | None = None  # plan for its stream, should that break; None: an error ends it
    not_continued: str = ""  # reason for which there is no plan, where one is wanted
    stream_options: dict[str, Any] | None = None  # the client's own, of a stream whose usage may be asked for
    usage_asked: bool = False  # only the router asked for usage
    form_streams: bool = False  # a form asks for a stream; no speed is learned from those (`Ask.stream`)

    def let_go(self) -> None:
        """Drop the body: its answer has begun, so it is sent to nobody else."""
        self.body = b""
        if self.plan is None or not self.plan.by_text:  # otherwise it may be sent once more
            self.request.let_go()

    def take_plan(self, plan: ContinuationPlan | None, why_not: str) -> None:
        """Have the stream continued by this plan, for which the engine is asked for token ids; None: `why_not`."""
        self.plan, self.not_continued = plan, why_not
        if plan is None:
            return
        # The events must be read, so none may be compressed: ids could not be taken out again.
        self.lines = [line for line in self.lines if line[:16].lower() != b"accept-encoding:"]
        if plan.asks_ids:
            self.body = with_ids(self.body)

    def ask_usage(self) -> None:
        """Have the engine asked for usage at the end of the stream."""
        self.usage_asked = True
        shared = self.body is self.request.body
        self.body = self.dialect.with_usage(self.body, self.stream_options)
        if shared:
            self.request.bring([self.body], self.request.body_bytes)  # one copy is enough
        if self.plan is not None:
            self.plan.ask_usage()

    @property
    def judge(self) -> Dialect | None:
        """The dialect that can say whether an answer that is a stream of events is whole. None on paths whose streams
        are not known."""
        request = self.request
        fetched = request.method == "GET" and request.path.startswith(STORED)  # a stored response, with `stream=true`
        return self.dialect if fetched else PATHS.get(request.path)

    @property
    def stored(self) -> bool:
        """Whether the engine may store the answer, so that it must not be made twice."""
        return self.request.path.startswith(RESPONSES) and self.wanted.ask.stored is not False

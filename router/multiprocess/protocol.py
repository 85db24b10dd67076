"""Protocol between hub and workers: length-prefixed msgpack frames, several messages a frame.

A frame is four bytes of length (little-endian) and one msgpack value: from a worker a `WorkerFrame`, from the hub a
list of messages. A worker numbers its placements. The number also identifies the lease for the life of the connection,
so that a placement can be cancelled before it is answered. Block keys travel as packed uint64 in this machine's order.
Times are `time.monotonic()`, which all processes of a machine share (Linux: CLOCK_MONOTONIC).

A frame that does not decode, or is too long, is a WireError and closes the connection. The hub then takes back the
worker's leases, and the worker places by the ring until it is connected again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from router.core.types.disagg_types import KvConnector
from router.core.types.misses import PromptAnalysis, Template, TokenBreakdown, TokenFate
from router.core.types.placements import Confidence, EndReason, PlacementReason
from router.core.types.requests import Priority
from router.placement_api import TokenizationSpec

FRAME_BYTES_MAX = 64 << 20  # largest frame; a prompt of a million tokens takes about 2 MB
QUEUE_BYTES_MAX = 64 << 20  # bytes that wait for the other side to read; beyond this the connection is closed
HEAD_BYTES = 4

Name = Annotated[str, Meta(max_length=4_096)]
Id = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0)]
ReceiptParts = tuple[str, str, PlacementReason, Confidence, int, int]  # the fields of a Receipt up to its candidates


class WireError(ValueError):
    """A frame that is no message between hub and workers."""


# -- from a worker ---------------------------------------------------------------------------------------------------


class Hello(Struct, tag=0, array_like=True):
    """The first message of a connection."""

    worker: Count
    pid: Count


class WantLease(Struct, tag=1, array_like=True, gc=False):
    """Request for a lease, answered by LeaseOpened or Unplaced. Prompts are sent as sizes and keys, never as text."""

    id: Id
    model: str | None
    ring_key: str
    stream: bool
    output_tokens_max: int | None
    body_tokens: int
    response_id: str | None
    exclude: tuple[str, ...]
    prompt: tuple[Count, Count, float | None] | None  # bytes, opaque bytes, bytes per token
    chain: tuple[bytes, int, int, tuple[tuple[int, int, int], ...], int] | None  # the fields of a Chain
    # number of tokens, ids or b"", adapter, salt, keys by block size
    tokens: tuple[Count, bytes, str, bytes, dict[int, bytes]] | None
    tenant: str = ""
    priority: Priority = Priority.NORMAL
    body_bytes: Count = 0
    sighting: PromptAnalysis | None = None
    kin: tuple[Count, Count, bool] | None = None  # the fields of a ConversationRef
    due_s: float | None = None
    may_pull: bool = True
    may_split: bool = False


class AdoptLease(Struct, tag=2, array_like=True, gc=False):
    """An open lease that the worker opened without the hub, or got from an earlier hub."""

    id: Id
    replica: str
    model: str | None
    stream: bool
    prompt_tokens: Count
    first_token_s: float | None


class FirstToken(Struct, tag=3, array_like=True, gc=False):
    """Arrival of the first body event of a stream."""

    id: Id
    now_s: float


class Finish(Struct, tag=4, array_like=True, gc=False):
    """End of a lease, or of a placement that is no longer wanted."""

    id: Id
    ending: EndReason
    usage: tuple[int, int, int | None] | None
    events: Count
    now_s: float


class Report(Struct, tag=5, array_like=True, gc=False):
    """End of a request. `lease` identifies its receipt if the hub made that."""

    id: str
    route: str
    at_s: float
    model: str
    status: int
    ending: str
    error: str | None
    detail: str | None
    stream: bool
    duration_s: float
    overhead_s: float | None
    ttft_s: float | None
    inter_token_s: float | None
    events: int
    usage: tuple[int, int, int | None] | None
    retries: tuple[tuple[str, str], ...]
    lease: int | None
    receipt: ReceiptParts | None
    tenant: str = ""
    queued_s: float = 0.0
    sighting: PromptAnalysis | None = None
    miss: TokenBreakdown | None = None
    replay: bool = False
    repairs: tuple[str, ...] = ()
    trace_id: str = ""
    warning: str = ""
    session: str = ""
    # kind of agent, its conversation, the parent conversation, True if it is over
    agent: tuple[str, str, str, bool] = ("", "", "", False)
    # priority, milliseconds within which the first token was wanted, True if it came in time
    deadline: tuple[Priority, float | None, bool | None] = (Priority.NORMAL, None, None)
    continued: tuple[str, str, str] = ("", "", "")
    not_continued: str = ""
    places: dict[TokenFate, int] | None = None


class ReplicaRefused(Struct, tag=6, array_like=True, gc=False):
    """A connection to the replica was refused."""

    replica: Name


class ResponseMade(Struct, tag=7, array_like=True, gc=False):
    """A replica has made a stored response."""

    response_id: Name
    replica: Name
    tenant: Name = ""


class AttemptFailed(Struct, tag=8, array_like=True, gc=False):
    """An attempt failed."""

    replica: Name
    kind: Name


class FigureCounts(Struct, tag=9, array_like=True, gc=False):
    """Counts of the worker since its last such message, by the names of telemetry/process_totals.py."""

    counts: dict[Name, int]  # a level, such as open connections, may also fall


class PageWanted(Struct, tag=10, array_like=True, gc=False):
    """Request for one of the router's own pages."""

    id: Id
    path: Name
    owner: tuple[str | None, bool, bool] | None = None  # the fields of a RequestPrincipal
    accept: Name = ""  # the caller's header, in ASCII


class ProgressNotice(Struct, tag=11, array_like=True, gc=False):
    """A stream of the replica continues."""

    replica: Name


class Cooldown(Struct, tag=12, array_like=True, gc=False):
    """The replica requested a cooldown for `for_s` seconds."""

    replica: Name
    for_s: float
    full: bool = False  # the queue was full


class TemplatesSeen(Struct, tag=13, array_like=True):
    """Templates with which prompts of the worker's clients begin, new or changed; a body is sent once per
    connection."""

    templates: list[Template]


class RateSpent(Struct, tag=20, array_like=True):
    """Requests and tokens by tenant that the worker has placed without this hub."""

    spent: dict[str, tuple[float, float]]


class RequestShed(Struct, tag=21, array_like=True, gc=False):
    """The worker has shed a request before it read its body."""

    code: Name
    priority: Priority


class SourceStalled(Struct, tag=22, array_like=True, gc=False):
    """A P2P KV transfer from the replica got no answer in time."""

    source: Name


class Prefilled(Struct, tag=23, array_like=True, gc=False):
    """End of the prefill stage of a lease."""

    id: Id
    ending: EndReason
    usage: tuple[int, int, int | None] | None
    now_s: float
    alone: bool = False  # the prefill stage is useless: the decoding replica also computes the prompt


class TransferFailedNotice(Struct, tag=24, array_like=True, gc=False):
    """A request that one replica prefilled failed at its decoding replica."""

    prefill: Name
    decode: Name


class ModelLacked(Struct, tag=25, array_like=True, gc=False):
    """The replica answered that it does not serve a model of its list."""

    replica: Name
    model: Name


FromWorker = (
    Hello
    | WantLease
    | AdoptLease
    | FirstToken
    | Finish
    | Report
    | ReplicaRefused
    | ResponseMade
    | AttemptFailed
    | FigureCounts
    | PageWanted
    | ProgressNotice
    | Cooldown
    | TemplatesSeen
    | RateSpent
    | RequestShed
    | SourceStalled
    | Prefilled
    | TransferFailedNotice
    | ModelLacked
)


class WorkerFrame(Struct, array_like=True):
    """A worker's frame."""

    in_flight: Count  # requests that the worker is answering
    messages: list[FromWorker]


# -- from the hub ----------------------------------------------------------------------------------------------------


class LeaseOpened(Struct, tag=0, array_like=True, gc=False):
    """A lease."""

    id: Id
    receipt: ReceiptParts
    miss: TokenBreakdown | None = None
    replay: bool = False
    ttft_ms: tuple[float, float] = (0.0, 0.0)  # predicted time to first token: median, ninetieth percentile
    tier_tokens: int = 0  # part of the predicted cached tokens that must be loaded from tiers
    pull: tuple[str, str, int] | None = None  # source, its address, and tokens that will come from there
    leg: tuple[str, KvConnector, str, int] | None = None  # prefilling replica; its KV connector and address; its lease


class Unplaced(Struct, tag=1, array_like=True, gc=False):
    """Refusal of a lease. There are four cases. The request is shed (`shed`). The hub cannot place it, or it was
    cancelled (`failed`). Its stored response is unknown. Otherwise no replica is ready to take it."""

    id: Id
    failed: bool
    shed: tuple[str, str, float] | None = None  # code, message, seconds until the client may retry
    unknown_response: str | None = None  # id of a stored response that is not the tenant's


class ReplicaView(Struct, tag=2, array_like=True):
    """Ready replicas and their models. It is the hub's first message, and is sent again after every change."""

    ready: list[tuple[str, tuple[str, ...]]]  # replica -> its models
    unready: tuple[str, ...]  # models without a ready replica
    default: str | None  # the model of requests that name none
    tokens: dict[str, TokenizationSpec]
    ids: bool  # True if placements carry token ids in addition to block keys
    engines: dict[str, tuple[str, ...]] = {}  # model -> kinds of engine that serve it
    names: dict[str, str] = {}  # model -> the other name with which its chains begin
    readiness_summary: str = ""  # text with the number of ready replicas, and the reasons why others are not
    contexts: dict[str, int] = {}  # model -> tokens of the longest context that a replica has for it
    hub: int = 0  # a number that is different for each hub
    prefills: tuple[str, ...] = ()  # ready prefill replicas: they take whole requests only if no other replica does
    disagg_only: tuple[str, ...] = ()  # ready replicas that take no whole requests
    parents: dict[str, str] = {}  # LoRA adapter -> its base model
    expected: dict[str, str] = {}  # model or adapter that may have no replica -> its base model
    adapting: tuple[str, ...] = ()  # those of them that take `name:adapter`


class UnreachableNotice(Struct, tag=3, array_like=True, gc=False):
    """A connection to the replica was refused: requests that wait for it will get no answer."""

    replica: str


class RemovedNotice(Struct, tag=4, array_like=True, gc=False):
    """The replica has left."""

    replica: str


class PageAnswer(Struct, tag=5, array_like=True, gc=False):
    """A requested page; None if the page does not exist."""

    id: Id
    page: tuple[int, str, bytes] | None


class StalledNotice(Struct, tag=6, array_like=True, gc=False):
    """The replica accepts and does not answer: requests that wait for it should be tried on another one."""

    replica: str


class Working(Struct, tag=8, array_like=True):
    """Replicas that have shown work since the last such message. Also the healthy ones of the other replicas with
    engines that report no counters."""

    moving: list[str]
    uncounted: list[str]


class Queued(Struct, tag=7, array_like=True, gc=False):
    """The request is in the hub's queue. LeaseOpened or Unplaced follows, without a time limit."""

    id: Id


class RatesLeft(Struct, tag=20, array_like=True):
    """Remaining requests and tokens of tenants' rates, for tenants that have spent any lately."""

    levels: dict[str, tuple[float | None, float | None]]


FromHub = (
    LeaseOpened
    | Unplaced
    | ReplicaView
    | UnreachableNotice
    | RemovedNotice
    | PageAnswer
    | StalledNotice
    | Working
    | Queued
    | RatesLeft
)

_encoder = msgspec.msgpack.Encoder()
_batches = msgspec.msgpack.Decoder(WorkerFrame)
_answers = msgspec.msgpack.Decoder(list[FromHub])


def frame(value: WorkerFrame | Sequence[FromHub]) -> bytes:
    """Encode one frame. Raises WireError if the other side would refuse the length."""
    body = _encoder.encode(value)
    if len(body) > FRAME_BYTES_MAX:
        raise WireError(f"a frame of {len(body)} bytes; allowed are {FRAME_BYTES_MAX}")
    return len(body).to_bytes(HEAD_BYTES, "little") + body


def batch_of(body: bytes) -> WorkerFrame:
    """Decode a worker's frame. Raises WireError."""
    return _decode_frame(_batches, body)  # type: ignore[no-any-return]


def answers_of(body: bytes) -> list[FromHub]:
    """Decode a frame from the hub. Raises WireError."""
    return _decode_frame(_answers, body)  # type: ignore[no-any-return]


def _decode_frame(decoder: Any, body: bytes) -> Any:  # noqa: ANN401 - the type of the decoder
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"a frame that does not decode: {error}") from error


class Frames:
    """Splits a stream of bytes into the bodies of frames, for any segmentation."""

    def __init__(self, bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._kept = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the bodies of the frames that are complete now. Raises WireError for one that is too long."""
        kept = self._kept
        if kept:
            kept += data
        view = memoryview(kept or data)
        bodies, at, total = [], 0, len(view)
        while total - at >= HEAD_BYTES:
            size = int.from_bytes(view[at : at + HEAD_BYTES], "little")
            if size > self._bytes_max:
                raise WireError(f"a frame of {size} bytes; allowed are {self._bytes_max}")
            end = at + HEAD_BYTES + size
            if end > total:
                break
            bodies.append(bytes(view[at + HEAD_BYTES : end]))
            at = end
        if at or not kept:  # otherwise `kept` is the beginning of a long frame
            self._kept = bytearray(view[at:])
        return bodies

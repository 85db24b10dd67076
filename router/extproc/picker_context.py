"""State shared by all streams of one picker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from router.extproc.stream_messages import MalformedCount
from router.http.body_budget import BodyBudget
from router.ingress.context import IngressContext
from router.placement_api import PlacementService


class OpenStream(Protocol):
    """Interface of a stream in flight, for its picker."""

    def release(self) -> None:
        """Release the stream if Envoy carries its answer without the picker."""


@dataclass(frozen=True, slots=True)
class ExtProcConfig:
    """Settings of a picker, from `gateway`, `limits`, `listen`, `api` and `pulls` of config/schema.py."""

    inference: frozenset[str]  # paths of prompts, and those that are forwarded
    objectives: Mapping[str, str]  # name -> name of a priority
    fallbacks_max: int
    streams_max: int
    stream_s_max: float
    body_bytes_max: int
    body_timeout_s: float
    head_timeout_s: float
    bodies_wait_s: float  # time for which a body may wait for memory
    answer_bytes_max: int  # bytes kept of an answer that does not stream, to read its usage
    sampled_ratio: float
    conformance: bool
    receipts: bool
    pull_stall_s: float  # added to the predicted time to first token (config/schema.py: `pulls`)


@dataclass(slots=True)
class ServiceContext:
    """Parts and counters shared by all streams. `rules` may be replaced, for later requests."""

    placer: PlacementService
    ingress: IngressContext
    rules: ExtProcConfig
    bodies: BodyBudget  # memory budget for bodies, of all frontends of this process
    malformed: MalformedCount
    clock: Callable[[], float]
    streams: set[OpenStream] = field(default_factory=set)  # streams in flight
    cut_why: str = ""  # reason for which streams are cut; "": a cancelled stream means that its client left
    served_told: bool = False  # the gateway reports the serving endpoint, so a missing report is meaningful
    known: bool = False  # `/readyz` was 200, or a replica ready, since this process began
    heads_told: bool = False  # the gateway sends heads of answers, so a stream without one has lost its client
    answers_come: bool = False  # the gateway sends answers when requested
    shown: int = 0  # answers that were requested and arrived
    asked: int = 0  # requested answers without a piece since the last that arrived

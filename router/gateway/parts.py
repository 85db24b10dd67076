"""What all streams of one picker share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from router.gateway.messages import MalformedCount
from router.http.body_budget import BodyBudget
from router.placer import Placer
from router.reading.desk import Desk


class OpenStream(Protocol):
    """A stream under way, as its picker knows it."""

    def release(self) -> None:
        """Let go of the stream if Envoy carries its answer on without the picker."""


@dataclass(frozen=True, slots=True)
class PickerRules:
    """What a picker goes by (settings/schema.py: `gateway`, `limits`, `listen`, `api`, `pulls`)."""

    inference: frozenset[str]  # paths of prompts, and those that are passed on
    objectives: Mapping[str, str]  # name -> name of a priority
    fallbacks_max: int
    streams_max: int
    stream_s_max: float
    body_bytes_max: int
    body_timeout_s: float
    head_timeout_s: float
    bodies_wait_s: float  # how long a body may wait for room
    answer_bytes_max: int  # of an answer that does not stream, what is kept to read its usage
    sampled_ratio: float
    conformance: bool
    receipts: bool
    pull_stall_s: float  # beyond the predicted time to the first token (settings/schema.py: `pulls`)


@dataclass(slots=True)
class PickerParts:
    """The parts, and what is counted over all streams. `rules` may be replaced, for requests to come."""

    placer: Placer
    desk: Desk
    rules: PickerRules
    bodies: BodyBudget  # room for bodies, of all faces of this process
    malformed: MalformedCount
    clock: Callable[[], float]
    streams: set[OpenStream] = field(default_factory=set)  # streams under way
    cut_why: str = ""  # why streams are cut; "" while one that is cancelled means that its client left
    served_told: bool = False  # the gateway says which endpoint served, so that its silence says something
    known: bool = False  # `/readyz` was 200, or a replica ready, since this process began
    heads_told: bool = False  # it shows heads of answers, so that a stream without one has lost its client
    answers_come: bool = False  # it sends answers that it is asked for
    shown: int = 0  # answers that were asked for and came
    asked: int = 0  # answers that were asked for, of which nothing came, since the last that came

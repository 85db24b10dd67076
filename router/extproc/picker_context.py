"""State shared by all streams of one picker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from router.config.schema import Settings
from router.config.url_maps import objectives
from router.core.dialects import PATHS
from router.extproc.stream_messages import MalformedCount
from router.http.body_budget import BodyBudget
from router.ingress.context import IngressContext
from router.placement_api import PlacementService


class OpenStream(Protocol):
    """Interface of a stream in flight, for its picker."""

    def release(self) -> None:
        """Release the stream if Envoy carries its answer without the picker."""


@dataclass(slots=True)
class ServiceContext:
    """Parts and counters shared by all streams. `settings` may be replaced by `configure`, for later requests."""

    placer: PlacementService
    ingress: IngressContext
    settings: Settings
    bodies: BodyBudget  # memory budget for bodies, of all frontends of this process
    malformed: MalformedCount
    clock: Callable[[], float]
    inference: frozenset[str] = frozenset()  # paths of prompts, and those that are forwarded
    objectives: Mapping[str, str] = field(default_factory=dict)  # name -> name of a priority
    streams: set[OpenStream] = field(default_factory=set)  # streams in flight
    cut_why: str = ""  # reason for which streams are cut; "": a cancelled stream means that its client left
    served_told: bool = False  # the gateway reports the serving endpoint, so a missing report is meaningful
    known: bool = False  # `/readyz` was 200, or a replica ready, since this process began
    heads_told: bool = False  # the gateway sends heads of answers, so a stream without one has lost its client
    answers_come: bool = False  # the gateway sends answers when requested
    shown: int = 0  # answers that were requested and arrived
    asked: int = 0  # requested answers without a piece since the last that arrived

    def __post_init__(self) -> None:
        self.configure(self.settings)

    def configure(self, settings: Settings) -> None:
        """Use these settings for later requests."""
        self.settings = settings
        self.inference = frozenset((*PATHS, *settings.api.passthrough))
        self.objectives = objectives(settings.extproc.objectives)

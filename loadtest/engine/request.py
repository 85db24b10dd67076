"""What a simulated engine is asked to compute, and why it may refuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.engine.legs import Legs


class RequestRefused(ValueError):
    """The request can never run: it is longer than the model's context or than the whole cache."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What the model needs to know of a prompt and its answer."""

    request_id: int
    prompt_tokens: int
    output_tokens: int
    keys: Sequence[int]
    """Names of the full blocks of prompt and answer, each naming its whole prefix; blocks past the end are
    never cached. A caller that knows nothing of the answer gives the prompt's only."""
    tag: object = None
    """Anything; it is handed back in `BlockStored`."""
    source: str = ""
    """Engine from whose CPU memory to bring what this one lacks (peers.py); "": none."""
    handover: tuple[Legs, str] | None = None
    """The legs of the engine that computes its prompt, and its id there; None: it is computed here."""
    hold: bool = False
    """Whether it is a prefill leg, whose blocks are kept for another engine (arriving.py)."""

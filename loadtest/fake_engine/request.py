"""Requests to a simulated engine, and the reason of a refusal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.fake_engine.prefill_export import PrefillExports


class RequestRefused(ValueError):
    """The request can never run: it is longer than the model's context or than the whole cache."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A prompt and its answer as the model needs them."""

    request_id: int
    prompt_tokens: int
    output_tokens: int
    keys: Sequence[int]
    """Keys of the full blocks of prompt and answer; each key identifies its whole prefix. Blocks after the last key are
    never cached. A caller that does not know the answer passes only the keys of the prompt."""
    tag: object = None
    """Any object; it is returned in `BlockStored`."""
    source: str = ""
    """Engine from whose CPU memory to transfer the blocks that this engine lacks (`peers.py`); "": none."""
    handover: tuple[PrefillExports, str] | None = None
    """The `PrefillExports` of the engine that computes the prompt, and the request's id there; None: the prompt is
    computed here."""
    hold: bool = False
    """True for a prefill request; its blocks are kept for another engine (`kv_receive.py`)."""

"""The external interface of a member's family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loadtest.fake_engine.replica import SimulatedReplica
from loadtest.fake_engine.zoo.member import Family, Member
from loadtest.fake_engine.zoo.sglang import SglangFace
from loadtest.fake_engine.zoo.vllm import Face

_FACES = {Family.VLLM: Face, Family.SGLANG: SglangFace}


def face_of(
    member: Member, model_name: str, replica: SimulatedReplica, sources: Mapping[str, Any], *, tell_ttft: bool
) -> Face:
    """Return the external interface of a member; `sources` is the content of vLLM's page `/kv_event_sources`."""
    return _FACES[member.family](member, model_name, replica, sources, tell_ttft=tell_ttft)

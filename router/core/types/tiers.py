"""Storage tiers of an engine's blocks outside its GPU, by the medium names that engines publish.

    gpu        GPU, or no medium at all
    cpu        CPU (vLLM's offloading), CPU_PINNED (SGLang's HiCache), CPU_TIER1 and CPU_TIER2 (older SGLang)
    storage    STORAGE with the locality local or none, FS and OBJ (older vLLM), DISK (SGLang)
    external   EXTERNAL (SGLang), and any medium with another name
    shared     any medium with the locality REMOTE: one store for several replicas

A block that several tiers have is read from the first of these that has it.

PEER and LEG are not tiers. They name P2P KV transfers from the CPU memory of another replica (core/fleet/pulls.py), and
transfers from a prefill replica to a decode replica (core/disagg/pairs.py).
"""

from __future__ import annotations

GPU = "GPU"  # the medium that is no tier
REMOTE = "/REMOTE"  # ends the medium of a store that several replicas reach
CPU, STORAGE, EXTERNAL, SHARED = "cpu", "storage", "external", "shared"
TIERS = (CPU, STORAGE, EXTERNAL, SHARED)  # the fastest first
PEER, LEG = "peer", "leg"
UNREPORTED = (
    STORAGE,
    SHARED,
)  # tiers with events for added blocks (vLLM's files and buckets) but none for removed ones

_STORAGE_MEDIUMS = ("STORAGE", "FS", "OBJ", "DISK")


def tier_of(medium: str) -> str:
    """Return the tier of a medium as batch_decoder.py names it; "" for the GPU."""
    if medium == GPU:
        return ""
    if medium.endswith(REMOTE):
        return SHARED
    if medium.startswith("CPU"):
        return CPU
    return STORAGE if medium in _STORAGE_MEDIUMS else EXTERNAL

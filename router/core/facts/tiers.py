"""Where an engine keeps blocks besides its GPU: tiers, by the mediums that engines name.

    gpu        GPU, or no medium at all
    cpu        CPU (vLLM's offloading), CPU_PINNED (SGLang's HiCache), CPU_TIER1 and CPU_TIER2 (older SGLang)
    storage    STORAGE that is local or of unsaid locality, FS and OBJ (older vLLM), DISK (SGLang)
    external   EXTERNAL (SGLang), and any medium that has another name
    shared     any medium with the locality REMOTE: one store behind several replicas

A block that several tiers have is read from the first of these that has it.

PEER and LEG are no tiers: they name what is pulled from the CPU memory of another replica (core/fleet/pulls.py), and
what a replica that prefills sends to the one that decodes (core/fleet/legs.py).
"""

from __future__ import annotations

GPU = "GPU"  # the medium that is no tier
REMOTE = "/REMOTE"  # ends the medium of a store that several replicas reach
CPU, STORAGE, EXTERNAL, SHARED = "cpu", "storage", "external", "shared"
TIERS = (CPU, STORAGE, EXTERNAL, SHARED)  # the quickest first
PEER, LEG = "peer", "leg"
UNTOLD = (STORAGE, SHARED)  # tiers whose engines say what comes (vLLM's files and buckets), and not what goes

_STORAGE_MEDIUMS = ("STORAGE", "FS", "OBJ", "DISK")


def tier_of(medium: str) -> str:
    """The tier of a medium as decoding.py gives it; "" for the GPU."""
    if medium == GPU:
        return ""
    if medium.endswith(REMOTE):
        return SHARED
    if medium.startswith("CPU"):
        return CPU
    return STORAGE if medium in _STORAGE_MEDIUMS else EXTERNAL

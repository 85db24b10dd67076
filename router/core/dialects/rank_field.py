"""Data-parallel rank of a request: sent in a header, for SGLang's `/generate` in the body."""

from __future__ import annotations

from collections.abc import Sequence

from router.core.dialects.sglang import with_rank
from router.core.dialects.tenant_isolation import GENERATE
from router.core.prompts.lenient_json import is_object

# vLLM 0.32 (entrypoints/generate/base/serving.py) and SGLang 0.5.23 (entrypoints/openai/serving_base.py) read it.
RANK_HEADER = "X-data-parallel-rank"


def for_rank(rank: int, path: str, lines: Sequence[bytes], body: bytes) -> tuple[list[bytes], bytes]:
    """Return header lines and body that reach one rank of a server. A rank that the client set is replaced."""
    name = RANK_HEADER.lower().encode()
    kept = [line for line in lines if line.partition(b":")[0].lower() != name]
    kept.append(f"{RANK_HEADER}: {rank}\r\n".encode())
    return kept, with_rank(body, rank) if path == GENERATE and is_object(body) else body

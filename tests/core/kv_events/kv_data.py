"""The recorded event streams of real engines (tests/data/kv, see NOTICE there), and the same events in the encodings
of other versions."""

from __future__ import annotations

import base64
import gzip
import json
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

FOLDER = Path(__file__).parents[2] / "data" / "kv"
NAMES = sorted(path.name.removesuffix(".jsonl.gz") for path in FOLDER.glob("*.jsonl.gz"))


@dataclass(frozen=True, slots=True)
class Batch:
    """One message."""

    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a recording; `cached_tokens` is the engine's own count over all its prompts (of the last one
    where `siblings`)."""

    label: str
    prompts: tuple[bytes, ...]  # token ids, uint32 little-endian
    adapter: str
    salt: bytes
    extra_key: bool  # SGLang: cached apart from all others, and its events do not say so
    siblings: bool
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Recording:
    """One stream, in the order things happened; `replay` was asked for at its end."""

    engine: str
    block_tokens: int
    rows: tuple[Batch | Asked, ...]
    replay: tuple[Batch, ...]

    @property
    def batches(self) -> list[Batch]:
        """The live messages."""
        return [row for row in self.rows if isinstance(row, Batch)]


@cache
def recording(name: str) -> Recording:
    """Read one fixture."""
    text = gzip.decompress((FOLDER / f"{name}.jsonl.gz").read_bytes())
    head, *lines = [json.loads(line) for line in text.splitlines()]
    rows: list[Batch | Asked] = []
    replay: list[Batch] = []
    for line in lines:
        if line["kind"] == "request":
            rows.append(_asked(line))
        else:
            batch = Batch(line["seq"], base64.b64decode(line["payload"]))
            (rows if line["kind"] == "batch" else replay).append(batch)
    return Recording(head["engine"], head["block_tokens"], tuple(rows), tuple(replay))


def _asked(line: dict[str, Any]) -> Asked:
    prompts = tuple(id_bytes(_ids(prompt)) for prompt in line["prompts"])
    return Asked(
        line["label"],
        prompts,
        line.get("adapter", ""),
        line.get("salt", "").encode(),
        "extra_key" in line,
        line.get("siblings", False),
        line["cached"],
    )


def _ids(prompt: dict[str, Any]) -> list[int]:
    if "ids" in prompt:
        return list(prompt["ids"])
    return [first + i for first, count in prompt["runs"] for i in range(count)]


def id_bytes(ids: list[int] | tuple[int, ...]) -> bytes:
    """Token ids as the index takes them."""
    return array("I", ids).tobytes()


def _maps_to_arrays(event: dict[str, Any]) -> list[Any]:
    """vLLM 0.22 and 0.23: positional, trailing defaults left out."""
    if event["type"] == "BlockStored":
        names = ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"]
        names += ["extra_keys", "group_idx", "kv_cache_spec_kind"]
    else:
        names = ["block_hashes", "medium", "group_idx"] if event["type"] == "BlockRemoved" else []
    return [event["type"], *(event.get(name) for name in names)]


def _sglang_arrays(event: dict[str, Any]) -> list[Any]:
    """SGLang's positional form: a map of what else there is in the place of vLLM's lora_name; none where nothing is."""
    if event["type"] == "BlockStored":
        names = ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"]
        more = {name: event[name] for name in ("cache_salt", "session_id") if event.get(name)}
        return [event["type"], *(event.get(name) for name in names), *([more] if more else [])]
    return [event["type"], *([event["block_hashes"], event.get("medium")] if event["type"] == "BlockRemoved" else [])]


def _tagged(event: dict[str, Any]) -> dict[str, Any]:
    """Extra keys as vLLM 0.31 and later hash them, should they ever be sent so."""
    if event["type"] != "BlockStored":
        return event
    name = event.get("lora_name")

    def tag(key: Any) -> Any:
        return ["lora", name, "/adapters/x"] if key == name else ["cache_salt", key]

    extra = [keys and [tag(key) for key in keys] for keys in event.get("extra_keys") or []]
    return {**event, "extra_keys": extra or None, "a_field_of_tomorrow": {"x": [1]}}


def _signed(event: dict[str, Any]) -> dict[str, Any]:
    """Integer hashes with a sign."""
    return _hashes(event, lambda key: key - (1 << 64) if isinstance(key, int) and key >= 1 << 63 else key)


def _folded(event: dict[str, Any]) -> dict[str, Any]:
    """Bytes hashes as the integer that the engine would have sent for them."""
    return _hashes(event, lambda key: int.from_bytes(key[-8:], "big") if isinstance(key, bytes) else key)


def _hashes(event: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    if "block_hashes" not in event:
        return event
    parent = event.get("parent_block_hash")
    changed = {**event, "block_hashes": [change(key) for key in event["block_hashes"]]}
    return changed if parent is None else {**changed, "parent_block_hash": change(parent)}


EVENTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "as sent": lambda event: event,
    "arrays": _maps_to_arrays,
    "sglang arrays": _sglang_arrays,
    "tagged": _tagged,
    "signed": _signed,
    "folded": _folded,
}


def encoded(payload: bytes, how: str, *, as_map: bool = False) -> bytes:
    """The same batch with its events in another encoding; `as_map`: the batch itself as a map."""
    at_s, events, rank = msgspec.msgpack.decode(payload)
    events = [EVENTS[how](event) for event in events]
    batch = {"ts": at_s, "events": events, "data_parallel_rank": rank} if as_map else [at_s, events, rank]
    return msgspec.msgpack.encode(batch)

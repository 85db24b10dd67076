"""A thread that reads a long body lets the event loop run in between, also where it runs native code."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deploy.compiled import MODULES
from router.core.dialects import OPENAI
from router.core.prompts import gil_release
from router.core.prompts.block_keys import BLOCK_BYTES, HASHED_BYTES, chain, chain_of
from router.core.prompts.json_fields import SLICE_BYTES, check_limits

pytestmark = pytest.mark.promise(
    "The thread that parses long bodies yields the interpreter to the event loop.", "clients"
)

CHAT = "/v1/chat/completions"
TURN = {"role": "user", "content": "x"}
CALLS = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}


def body(messages: list[dict[str, Any]], **more: object) -> bytes:
    """A chat request."""
    return json.dumps({"model": "m", "messages": messages, **more}).encode()


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows whenever others are let run."""
    taken: list[int] = []
    monkeypatch.setattr(gil_release, "release_gil", lambda: taken.append(1))
    return taken


def test_it_is_not_compiled() -> None:
    """Native code that calls native code lets nobody run."""
    assert "router/core/prompts/gil_release.py" not in MODULES


@pytest.mark.parametrize(
    ("data", "least"),
    [
        (body([TURN] * 20_000), 20_000 // 128),
        (body([CALLS] * 2_000), 2_000),
        (body([TURN], tools=[{"type": "function", "function": {"name": f"t{i}"}} for i in range(1_000)]), 1_000),
    ],
    ids=["texts", "calls", "tools"],
)
def test_prompts_of_many_parts(turns: list[int], data: bytes, least: int) -> None:
    """However a prompt is long, its reading stops often enough."""
    OPENAI.parse(CHAT, data)
    assert len(turns) >= least


def test_long_bodies_and_prompts(turns: list[int]) -> None:
    """Counting, measuring and hashing megabytes go by slices; what is short has no turn in it."""
    long = b"[" + b'{"a":[]},' * 400_000 + b"{}]"
    assert check_limits(long, 64, 1_000_000, 1_000_000) == ""
    assert len(turns) >= len(long) // SLICE_BYTES
    turns.clear()
    chain_of(OPENAI.parse(CHAT, body([{"role": "user", "content": "x" * (4 * HASHED_BYTES)}])), "m")
    assert len(turns) >= 4
    turns.clear()
    chain(b"x" * HASHED_BYTES, 1)
    assert turns == []


@pytest.mark.parametrize("size", [HASHED_BYTES, HASHED_BYTES + 1, 2 * HASHED_BYTES, 3 * HASHED_BYTES + BLOCK_BYTES + 7])
def test_slices_change_no_key(size: int) -> None:
    """A long prompt has the keys that it would have if it were hashed in one go."""
    text = bytes(i * 31 & 0xFF for i in range(1_000)) * (size // 1_000 + 1)
    text = text[:size]
    keys = chain(text[: BLOCK_BYTES * 3], 7)
    for at in range(3 * BLOCK_BYTES, size // BLOCK_BYTES * BLOCK_BYTES, BLOCK_BYTES):
        keys += chain(text[at : at + BLOCK_BYTES], keys[-1])
    assert chain(text, 7) == keys

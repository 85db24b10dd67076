"""Bodies of the two legs, as the request models of the installed engines read them."""

from __future__ import annotations

import json
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from router.core.disagg.bodies import decode_body, prefill_body
from router.core.disagg.splittable_requests import SPLIT
from router.core.types.disagg_types import KvConnector
from tests.real import install, install_sglang

SCRIPT = Path(__file__).with_name("leg_bodies.py")
TIMEOUT_S = 300.0
VENVS = {"vllm": install.VENV, "sglang": install_sglang.VENV_SGLANG}
ADDRESSES = {
    KvConnector.NIXL: "",
    KvConnector.MOONCAKE: "10.0.0.7:8998#e",
    KvConnector.OFFLOADING: "10.0.0.7:5710",
    KvConnector.SGLANG: "10.0.0.7:8998",
}
STREAM: dict[str, Any] = {"model": "m", "stream": True}
USAGE = {"stream_options": {"include_usage": True}}
MESSAGES = [{"role": "user", "content": "hi"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**STREAM, **USAGE, "messages": MESSAGES, "max_completion_tokens": 50, "stop": ["x"]},
    "/v1/completions": {**STREAM, **USAGE, "prompt": "hi", "max_tokens": 50, "min_tokens": 3, "stop_token_ids": [5]},
    "/v1/messages": {
        **STREAM,
        "messages": MESSAGES,
        "max_tokens": 5_000,
        "thinking": {"type": "enabled", "budget_tokens": 2_000},
        "stop_sequences": ["x"],
    },
    "/v1/responses": {**STREAM, "input": "hi", "store": False, "max_output_tokens": 40},
    "/generate": {"text": "hi", "stream": True, "sampling_params": {"max_new_tokens": 8}},
}


def _read(engine: str, bodies: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """What the engine's models make of bodies."""
    python = VENVS[engine] / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no {engine}: {python}")
    done = subprocess.run(
        [str(python), str(SCRIPT), engine],
        input=json.dumps(bodies),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    return [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("told ")]


@pytest.mark.parametrize("engine", sorted(SPLIT))
def test_engines_take_both_legs(engine: str) -> None:
    """Every path that takes the fields takes them as they are meant, whatever else the client asked for: the prefill
    leg does not stream and answers one token, the decode leg is the client's own request."""
    bodies, legs = [], []
    for handshake, path in product(KvConnector, sorted(SPLIT[engine])):
        if (handshake is KvConnector.SGLANG) is (engine == "sglang"):
            asked, address = json.dumps(ASKED[path]).encode(), ADDRESSES[handshake]
            legs.append((handshake, path))
            bodies.append((path, prefill_body(path, asked, handshake, "77", address, None).decode()))
            bodies.append((path, decode_body(asked, handshake, "77", address, None, b'{"opaque":1}').decode()))
    told = _read(engine, bodies)
    assert len(told) == len(bodies)
    for (handshake, path), first, second in zip(legs, told[::2], told[1::2], strict=True):
        assert (first["stream"], second["stream"]) == (False, True)
        if handshake is KvConnector.SGLANG:
            room = ("10.0.0.7", 8998, 77)
            for each in (first, second):
                assert (each["bootstrap_host"], each["bootstrap_port"], each["bootstrap_room"]) == room
            continue
        assert {first[name] for name in first if name.startswith("max_")} == {1}, path
        assert not first.get("min_tokens")
        assert first["kv_transfer_params"] != second["kv_transfer_params"]
        if handshake is KvConnector.NIXL:
            assert second["kv_transfer_params"] == {"opaque": 1}

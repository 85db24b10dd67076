"""Bodies of the two legs: what is the router's, what stays the client's, and what is not split."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.dialects.tenant_isolation import CHAT, COMPLETIONS, EMBEDDINGS, GENERATE, MESSAGES, RESPONSES
from router.core.disagg import bodies, splittable_requests
from router.core.types.disagg_types import KvConnector

VLLM, SGLANG = frozenset({"vllm"}), frozenset({"sglang"})
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
OURS = (
    "stream", "stream_options", "return_token_ids", "max_tokens", "max_completion_tokens", "max_output_tokens",
    "min_tokens", "ignore_eos", "stop", "stop_sequences", "stop_token_ids", "kv_transfer_params", "bootstrap_host",
    "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank", "bootstrap_pair_key", "decode_tp_size",
)  # fmt: skip
FIELDS = st.dictionaries(st.sampled_from(OURS) | st.text(max_size=12), JSON_VALUES, max_size=8)
ADDRESSES = {
    KvConnector.NIXL: "",
    KvConnector.MOONCAKE: "10.0.0.7:8998#engine-1",
    KvConnector.OFFLOADING: "10.0.0.7:5710",
    KvConnector.SGLANG: "10.0.0.7:8998",
}
ANSWER = {"id": "x", "choices": [{"index": 0, "finish_reason": "length"}]}


def _prefill(path: str, handshake: KvConnector, asked: dict[str, Any], rank: int | None = None) -> dict[str, Any]:
    body = json.dumps(asked).encode()
    made = bodies.prefill_body(path, body, handshake, "77", ADDRESSES[handshake], rank)
    told: dict[str, Any] = json.loads(made)
    return told


def _decode(handshake: KvConnector, asked: dict[str, Any], params: bytes = b"{}") -> dict[str, Any]:
    body = json.dumps(asked).encode()
    told: dict[str, Any] = json.loads(bodies.decode_body(body, handshake, "77", ADDRESSES[handshake], None, params))
    return told


@given(FIELDS, st.sampled_from(KvConnector), st.sampled_from((CHAT, COMPLETIONS, MESSAGES, RESPONSES)))
def test_a_prefill_leg_is_the_clients_request_but_for_our_fields(
    asked: dict[str, Any], handshake: KvConnector, path: str
) -> None:
    """Whatever a client says: its prompt and all else go on as they are; streams, limits and transfers are ours."""
    told = _prefill(path, handshake, asked)
    assert {name: value for name, value in told.items() if name not in OURS} == {
        name: value for name, value in asked.items() if name not in OURS
    }
    assert told["stream"] is False
    assert told.get("stream_options") is None
    assert not told.get("return_token_ids")
    if handshake is KvConnector.SGLANG:
        assert (told["bootstrap_host"], told["bootstrap_port"], told["bootstrap_room"]) == ("10.0.0.7", 8998, 77)
        return
    heeded = {CHAT: ("max_completion_tokens", "max_tokens"), RESPONSES: ("max_output_tokens",)}.get(
        path, ("max_tokens",)
    )
    assert next(told[name] for name in heeded if told.get(name) is not None) == 1
    assert not told.get("min_tokens") or path == RESPONSES
    assert told["kv_transfer_params"] != asked.get("kv_transfer_params")
    if handshake is KvConnector.MOONCAKE:
        assert [told.get(name) for name in ("stop", "stop_sequences", "stop_token_ids")] == [None] * 3


@given(FIELDS, st.sampled_from(KvConnector))
def test_a_decode_leg_differs_in_nothing_but_the_transfer(asked: dict[str, Any], handshake: KvConnector) -> None:
    """Limits, streams and all else are the client's; of transfers only ours are heard."""
    told = _decode(handshake, asked, b'{"a": 1}')
    rooms = OURS[OURS.index("bootstrap_host") :]
    ours = rooms if handshake is KvConnector.SGLANG else ("kv_transfer_params",)
    assert {name: value for name, value in told.items() if name not in ours} == {
        name: value for name, value in asked.items() if name not in ours
    }
    assert all(told[name] != "" for name in ours)


@pytest.mark.parametrize(
    ("handshake", "prefill", "decode"),
    [
        (
            KvConnector.NIXL,
            {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "remote_engine_id": None,
                "remote_block_ids": None,
                "remote_host": None,
                "remote_port": None,
            },
            {"opaque": [[1, 2], 3.0]},
        ),
        (
            KvConnector.MOONCAKE,
            {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "77"},
            {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "transfer_id": "77",
                "remote_bootstrap_addr": "http://10.0.0.7:8998",
                "remote_engine_id": "engine-1",
            },
        ),
        (
            KvConnector.OFFLOADING,
            {"remote_decoder": {"kv_request_id": "77"}},
            {"remote_prefiller": {"kv_request_id": "77", "remote_host": "10.0.0.7", "remote_port": 5710}},
        ),
    ],
)
def test_what_vllms_connectors_are_told(
    handshake: KvConnector, prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    """The fields of each connector, as its source reads them; NIXL's object is repeated as it came."""
    asked = {"messages": [], "kv_transfer_params": {"mine": 1}}
    assert _prefill(CHAT, handshake, asked)["kv_transfer_params"] == prefill
    answer = json.dumps({**ANSWER, "kv_transfer_params": {"opaque": [[1, 2], 3.0]}}).encode()
    params = bodies.kv_transfer_params(handshake, answer)
    assert params is not None
    assert _decode(handshake, asked, params)["kv_transfer_params"] == decode


def test_what_sglang_is_told() -> None:
    """Both legs have one room; a rank is told to both, since the room's number may say another one."""
    body = b'{"text": "x", "bootstrap_room": 5}'
    room = {"bootstrap_host": "fd00::7", "bootstrap_port": 8998, "bootstrap_room": 2**63 - 1}
    room |= {"bootstrap_pair_key": None, "decode_tp_size": None}
    id_ = str(2**63 - 1)
    prefill = json.loads(bodies.prefill_body(GENERATE, body, KvConnector.SGLANG, id_, "[fd00::7]:8998", 3))
    decode = json.loads(bodies.decode_body(body, KvConnector.SGLANG, id_, "[fd00::7]:8998", 3, b""))
    assert prefill == {"text": "x", "stream": False, **room, "disagg_prefill_dp_rank": 3}
    assert decode == {"text": "x", **room, "disagg_prefill_dp_rank": 3}


def test_a_client_names_no_rank_and_no_key() -> None:
    """Where the router names none: SGLang would wait for blocks of the rank that a client says, and keys are read
    together with the room."""
    body = b'{"text": "x", "disagg_prefill_dp_rank": 3, "bootstrap_pair_key": "k", "decode_tp_size": 8}'
    prefill = json.loads(bodies.prefill_body(GENERATE, body, KvConnector.SGLANG, "7", "10.0.0.7:8998", None))
    decode = json.loads(bodies.decode_body(body, KvConnector.SGLANG, "7", "10.0.0.7:8998", None, b""))
    for name in ("disagg_prefill_dp_rank", "bootstrap_pair_key", "decode_tp_size"):
        assert prefill[name] is None
        assert decode[name] is None


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({}, {"max_tokens": 1}),
        ({"max_tokens": 9}, {"max_tokens": 1}),
        ({"max_completion_tokens": 9}, {"max_completion_tokens": 1}),
        ({"max_tokens": 9, "max_completion_tokens": 9}, {"max_tokens": 1, "max_completion_tokens": 1}),
        ({"max_tokens": 9, "min_tokens": 5}, {"max_tokens": 1, "min_tokens": 0}),
    ],
)
def test_one_token_is_asked_for_as_the_body_says_it(asked: dict[str, Any], told: dict[str, Any]) -> None:
    """In the spelling that the client has; a least number of tokens does not stand against it."""
    made = _prefill(CHAT, KvConnector.NIXL, asked)
    assert {name: made[name] for name in made if "tokens" in name} == told


@pytest.mark.parametrize("params", [b"null", b"{}", b"[]", b'"x"', b"7", None, b"{"])
def test_a_prefill_without_blocks_is_known(params: bytes | None) -> None:
    """NIXL answers null where the prompt fills no block: the other engine computes alone."""
    rest = b"" if params is None else b',"kv_transfer_params":' + params
    assert bodies.kv_transfer_params(KvConnector.NIXL, b'{"id":"x"' + rest + b"}") is None


@pytest.mark.parametrize(
    "answer",
    [
        b'{"choices":[{"finish_reason":"stop"}]}',
        b'{"stop_reason": "end_turn"}',
        b'{"status":"completed"}',
        b'{"id":"x"',
    ],
)
def test_mooncakes_blocks_are_gone_when_the_model_stopped(answer: bytes) -> None:
    """Mooncake frees what did not end by its length, and the decoding engine would wait for minutes; so it is where the
    answer cannot be read."""
    assert bodies.kv_transfer_params(KvConnector.MOONCAKE, answer) is None
    assert bodies.kv_transfer_params(KvConnector.OFFLOADING, answer) == b""


@pytest.mark.parametrize(
    "answer",
    [
        b'{"choices":[{"finish_reason":"length","stop_reason":null,"message":{"content":"finish_reason"}}]}',
        b'{"stop_reason":"max_tokens","content":[{"type":"text","text":"a"}]}',
        b'{"status":"incomplete","output":[{"type":"message","status":"completed","content":[]}]}',
        b'{"status":"incomplete","output":[{"type":"reasoning","status":"completed"},{"stop_reason":"end_turn"}]}',
    ],
)
def test_mooncakes_blocks_are_there_when_the_limit_was_reached(answer: bytes) -> None:
    """As the answer itself says it: vLLM calls every message of a response completed."""
    assert bodies.kv_transfer_params(KvConnector.MOONCAKE, answer) == b""


@pytest.mark.parametrize(
    ("path", "body", "kinds", "may"),
    [
        (CHAT, {"messages": []}, VLLM, True),
        (CHAT, {"messages": [], "n": 1, "echo": False, "best_of": None}, VLLM, True),
        (COMPLETIONS, {"prompt": "x [1"}, VLLM, True),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, VLLM, True),
        (MESSAGES, {"messages": []}, VLLM, True),
        (RESPONSES, {"input": "x", "tools": [{"type": "function"}], "background": False}, VLLM, True),
        (GENERATE, {"text": "x", "sampling_params": {"n": 1}, "logprob_start_len": -1}, SGLANG, True),
        (CHAT, {"n": 2}, VLLM, False),
        (CHAT, {"n": 2}, SGLANG, False),
        (CHAT, {"best_of": 3}, VLLM, False),
        (CHAT, {"prompt_logprobs": 0}, VLLM, False),
        (COMPLETIONS, {"echo": True}, VLLM, False),
        (COMPLETIONS, {"use_beam_search": True}, VLLM, False),
        (COMPLETIONS, {"prompt": ["a", "b"]}, VLLM, False),
        (COMPLETIONS, {"prompt": [[1], [2]]}, VLLM, False),
        (COMPLETIONS, {"prompt_embeds": "x"}, VLLM, False),
        (RESPONSES, {"tools": [{"type": "mcp"}]}, VLLM, False),
        (RESPONSES, {"background": True}, VLLM, False),
        (RESPONSES, {"previous_response_id": "resp_1"}, VLLM, False),
        (GENERATE, {"text": "x", "sampling_params": {"n": 2}}, SGLANG, False),
        (GENERATE, {"text": ["x", "y"]}, SGLANG, False),
        (GENERATE, {"text": "x", "sampling_params": [{}]}, SGLANG, False),
        (GENERATE, {"text": "x", "logprob_start_len": 0}, SGLANG, False),
        (GENERATE, {"text": "x", "session_params": {}}, SGLANG, False),
        (GENERATE, {"text": "x"}, VLLM, False),
        (MESSAGES, {"messages": []}, SGLANG, False),
        (EMBEDDINGS, {"input": "x"}, VLLM, False),
        (CHAT, {"messages": []}, frozenset({"llama.cpp"}), False),
        (CHAT, {"messages": []}, VLLM | {"llama.cpp"}, False),
        (CHAT, {"messages": []}, frozenset(), False),
    ],
)
def test_what_may_be_split(path: str, body: dict[str, Any], kinds: frozenset[str], may: bool) -> None:
    """One prompt with one choice, on a path whose engines take the fields; not what their connectors refuse."""
    assert splittable_requests.can_disaggregate(path, json.dumps(body).encode(), kinds) is may


@pytest.mark.parametrize("batch", [b'["a","b"]', b"[[1],[2]]", b'[{"prompt_embeds":""}]'])
@pytest.mark.parametrize("space", [0, 1, 300])
def test_a_batch_is_known_whatever_space_is_in_it(batch: bytes, space: int) -> None:
    """JSON may have any number of spaces between its parts."""
    padded = batch.replace(b"[", b"[" + b" \n" * space, 1)
    assert not splittable_requests.can_disaggregate(COMPLETIONS, b'{"prompt":%b}' % padded, VLLM)
    assert not splittable_requests.can_disaggregate(GENERATE, b'{"input_ids":%b}' % padded, SGLANG)


@given(st.binary(max_size=64))
def test_what_cannot_be_read_is_not_split(body: bytes) -> None:
    """Nothing is raised, whatever the body is."""
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        assert splittable_requests.can_disaggregate(CHAT, body, VLLM) is False

"""How a request asks for a stream, and how a stream says that it is whole: as engines read and write it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from pydantic import TypeAdapter, ValidationError

from router.core.dialects import ANTHROPIC, OPENAI, PATHS, RESPONSES, SGLANG, Dialect
from router.core.prompts.json_fields import is_true
from router.core.types.placements import EndReason


@pytest.mark.parametrize(
    "reason", ["stop", "content-filter", "a b/c", "\u00e9", 'with "quotes"', "repetition_detection"]
)
def test_any_word_is_a_reason_to_finish(reason: str) -> None:
    """Engines have words of their own for it."""
    said = json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    assert OPENAI.find_ending(f"data: {said}\n\n".encode()) is EndReason.OK
    said = json.dumps({"text": "x", "meta_info": {"finish_reason": reason}})
    assert SGLANG.find_ending(f"data: {said}\n\n".encode()) is EndReason.OK


@pytest.mark.parametrize("reason", [None, "", "a word"])
def test_a_message_stop_behind_its_delta_is_the_end(reason: str | None) -> None:
    """vLLM has no word for some reasons to stop, and says null. Without the delta the stream is not whole."""
    told = json.dumps({"type": "message_delta", "delta": {"stop_reason": reason}})
    delta = f"event: message_delta\ndata: {told}\n\n".encode()
    stop = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    said = b'data: {"type":"content_block_delta","delta":{"text":"\\"message_delta\\""}}\n\n'
    assert ANTHROPIC.find_ending(said + delta + stop) is EndReason.OK
    assert ANTHROPIC.find_ending(said + delta) is ANTHROPIC.find_ending(said + stop) is None


@pytest.mark.parametrize("dialect", [OPENAI, ANTHROPIC, RESPONSES, SGLANG], ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("value", ["true", " 1", "1.0", "1e0", '"on"', '"TRUE"', '"Yes"', '"t"', '"1"'])
def test_a_stream_is_asked_for_in_many_ways(dialect: Dialect, value: str) -> None:
    """All that engines take for true."""
    body = f'{{"model":"m","max_tokens":1,"messages":[],"input":"x","prompt":"x","stream":{value}}}'.encode()
    path = next(path for path, each in PATHS.items() if each is dialect)
    assert dialect.parse(path, body).stream
    assert dialect.parse(path, body, keep=False).stream


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-2, 2) | st.floats(-2, 2, width=16) | st.text(max_size=5)
        | st.sampled_from(["yes", "No", "oN", "off", "T", "f", "0", "1.0", "true ", "\u212a"]),
        lambda inner: st.lists(inner, max_size=2),
        max_leaves=2,
    )
)  # fmt: skip
def test_a_flag_is_read_as_engines_read_it(value: object) -> None:
    """Pydantic decides there."""
    try:
        meant = TypeAdapter(bool | None).validate_python(value) or False
    except ValidationError:
        meant = False
    assert is_true(Raw(json.dumps(value).encode())) is meant

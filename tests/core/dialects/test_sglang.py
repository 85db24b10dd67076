import json
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.dialects import OPENAI
from router.core.dialects.sglang import SGLang, with_rank
from router.core.prompts.block_keys import BLOCK_BYTES, chain_of
from router.core.types.placements import Usage
from router.core.types.requests import RequestSpec, TemplateInput

SGLANG = SGLang()
# Answers as SGLang 0.5.23 gave them, shortened.
META: dict[str, Any] = {
    "id": "6e7b", "finish_reason": {"type": "length", "length": 3}, "prompt_tokens": 100, "weight_version": "default",
    "num_retractions": 0, "reasoning_tokens": 0, "completion_tokens": 3, "cached_tokens": 32,
    "cached_tokens_details": {"device": 32, "host": 0}, "dp_rank": 0, "e2e_latency": 0.07,
}  # fmt: skip
ANSWER = {"text": "w0 w1 w2", "output_ids": [7, 8, 9], "meta_info": META}
ABORT = {"type": "abort", "message": "Abort in waiting queue", "status_code": 503, "err_type": "ServiceUnavailable"}


def parse(**fields: Any) -> RequestSpec:
    """A parsed body."""
    return SGLANG.parse("/generate", json.dumps(fields).encode())


def text_of(**fields: Any) -> bytes:
    """The canonical bytes of a body whose prompt is known."""
    prompt = parse(**fields).prompt
    assert prompt is not None
    return prompt.text


def template_input(**fields: Any) -> TemplateInput | None:
    """What the engine makes token ids of."""
    return SGLANG.template_input("/generate", json.dumps(fields).encode())


def event(answer: dict[str, Any]) -> bytes:
    """A piece of a stream."""
    return b"data: " + json.dumps(answer).encode() + b"\n\n"


def ended(reason: dict[str, Any] | None) -> dict[str, Any]:
    """An answer with this finish reason."""
    return {**ANSWER, "meta_info": {**META, "finish_reason": reason}}


def test_a_request_is_read() -> None:
    """Prompt, stream, limits and session; usage is always in the stream; no model is named."""
    ask = parse(text="hello", sampling_params={"max_new_tokens": 9}, stream=True, session_id="s")
    assert (ask.model, ask.stream, ask.output_tokens_max, ask.session, ask.wants_usage) == (None, True, 9, "s", True)
    assert parse(text="hello").output_tokens_max == 128
    assert parse(text="hello", sampling_params=[{"max_new_tokens": 9}]).output_tokens_max == 128


@pytest.mark.parametrize("prompt", ["hello " * 400, ["one", "two"]])
def test_a_text_is_one_chain_with_a_completion(prompt: Any) -> None:
    """The same prompt through `/v1/completions` has the same keys, several prompts included."""
    completion = OPENAI.parse(
        "/v1/completions", json.dumps({"model": "m", "prompt": prompt, "cache_salt": "t"}).encode()
    )
    assert chain_of(parse(text=prompt, cache_salt="t"), "m") == chain_of(completion, "m")


@pytest.mark.parametrize("ids", [[1, 2, 70_000], [[1, 2], [70_000]]])
def test_ids_are_one_chain_with_a_completion(ids: Any) -> None:
    """Prompts given as token ids too; their bytes per token are known."""
    ask = parse(input_ids=ids)
    completion = OPENAI.parse("/v1/completions", json.dumps({"model": "m", "prompt": ids}).encode())
    assert ask.prompt == completion.prompt
    assert ask.prompt is not None
    assert ask.prompt.bytes_per_token == 4


def test_an_extended_prompt_extends_the_chain() -> None:
    """The keys of a prompt begin those of whatever continues it."""
    head = "word " * 600
    short, long = (chain_of(parse(text=text), "m") for text in (head, head + "more " * 300))
    whole = len(head) // BLOCK_BYTES
    assert short is not None
    assert long is not None
    assert long.keys[:whole] == short.keys[:whole]


@pytest.mark.parametrize(
    "apart",
    [
        {"cache_salt": "a"},
        {"extra_key": "a"},
        {"cache_salt": ["a"]},
        {"extra_key": ["a"]},
        {"cache_salt": "a", "extra_key": "b"},
    ],
)
def test_what_keeps_caches_apart(apart: dict[str, Any]) -> None:
    """Salt and extra key are part of the identity, and not mistaken for each other; empty ones are none."""
    others: list[dict[str, Any]] = [{}, {"cache_salt": "b"}, {"extra_key": "b"}, {"cache_salt": "b", "extra_key": "a"}]
    assert parse(text="x", **apart).salt not in [parse(text="x", **other).salt for other in others]
    assert parse(text="x", cache_salt="", extra_key=None).salt == b""


def test_an_adapter_is_named_beside_the_model() -> None:
    """SGLang takes an adapter besides a model; one for each of several prompts keeps caches apart."""
    asked = [parse(text="x", lora_path="ad1"), parse(text="x", lora_path="ad1", model="m")]
    assert [(ask.model, ask.adapter) for ask in asked] == [(None, "ad1"), ("m", "ad1")]
    plain = parse(text="x", lora_path=None, model="m")
    assert (plain.model, plain.adapter, plain.salt) == ("m", "", b"")
    several = parse(text=["x", "y"], lora_path=["ad1", None])
    assert (several.model, several.adapter) == (None, "")
    assert several.salt != plain.salt


def test_images_separate_prompts() -> None:
    """The same text with other images is another prompt; their bytes say nothing of bytes per token."""
    plain, one, other = (text_of(text="<image>x", image_data=data) for data in (None, "http://a/1.png", ["u2"]))
    assert len({plain, one, other}) == 3
    prompt = parse(text="<image>x", image_data=["u1", "u2"]).prompt
    assert prompt is not None
    assert (prompt.opaque_bytes, prompt.bytes_per_token) == (2_048, None)
    ids = parse(input_ids=[1, 2], image_data="u").prompt
    assert ids is not None
    assert (ids.size, ids.opaque_bytes, ids.bytes_per_token) == (1_032, 1_024, 4)
    assert parse(input_ids=[1, 2], image_data="u").prompt != parse(input_ids=[1, 2]).prompt
    assert text_of(text="x", image_data=[]) == text_of(text="x")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"text": 5},
        {"text": None, "input_ids": None},
        {"input_ids": [-1]},
        {"input_ids": ["a"]},
        {"input_ids": []},
        {"input_embeds": [[0.5]]},
        {"text": "and then", "session_params": {"id": "s1"}},
    ],
)
def test_unknown_prompts(body: dict[str, Any]) -> None:
    """Embeddings, sessions whose beginning the engine keeps, and what cannot be read are placed without a prompt."""
    assert parse(**body).prompt is None
    assert template_input(**body) is None


def test_what_token_ids_are_made_of() -> None:
    """One text with what the tokenizer adds, or one list of ids; everything else is not foretold exactly."""
    assert template_input(text="hi") == template_input(text=["hi"]) == TemplateInput(text="hi", add_special_tokens=True)
    ids = array("I", [1, 70_000]).tobytes()
    assert template_input(input_ids=[1, 70_000]) == template_input(input_ids=[[1, 70_000]]) == TemplateInput(ids=ids)
    assert template_input(text="hi", cache_salt="t") == TemplateInput(text="hi", add_special_tokens=True)
    for several in ({"text": ["a", "b"]}, {"input_ids": [[1], [2]]}, {"text": "a", "image_data": "u"}):
        assert template_input(**several) is None
    assert template_input(text="a", extra_key="k") is template_input(text=["a"], cache_salt=["t"]) is None


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_what_is_no_request_has_no_token_ids(body: bytes) -> None:
    """Nothing is raised for a body that cannot be read."""
    assert SGLANG.template_input("/generate", body) is None


def test_an_engine_keeps_its_session() -> None:
    """A session opened on one replica is a hint to go back there."""
    assert parse(text="and then", session_params={"id": "s1", "rid": "r"}).session == "s1"


def test_usage() -> None:
    """Counts stand in meta_info, of an answer and of a list of one; several answers say nothing certain."""
    for answer in (ANSWER, [ANSWER]):
        assert SGLANG.usage(json.dumps(answer).encode()) == Usage(100, 3, 32)
    assert SGLANG.usage(json.dumps([ANSWER, ANSWER]).encode()) is None
    assert SGLANG.usage(json.dumps({"meta_info": {"prompt_tokens": 5}}).encode()) == Usage(5, 0, None)
    assert SGLANG.usage(b'{"meta_info": {"prompt_tokens": 5, "cached_tokens": 9}}') == Usage(5, 0, 5)
    assert SGLANG.usage(b'{"meta_info": {"prompt_tokens": -5}}') is None


def test_usage_of_a_stream() -> None:
    """The last event has the counts, also where its text is so long that its beginning is not seen."""
    tail = event(ended(None)) + event(ANSWER) + b"data: [DONE]\n\n"
    assert SGLANG.stream_usage(tail) == Usage(100, 3, 32)
    long = event({**ANSWER, "text": 'a "quote" {brace} ' * 500}) + b"data: [DONE]\n\n"
    for cut in (6_000, 700):
        assert SGLANG.stream_usage(long[-cut:]) == Usage(100, 3, 32)
    assert SGLANG.stream_usage(long[-60:]) is None
    of_batch = event({**ANSWER, "index": 1}) + b"data: [DONE]\n\n"
    assert SGLANG.stream_usage(of_batch) is SGLANG.stream_usage(of_batch[30:]) is None


def test_errors_in_a_stream() -> None:
    """An error event, flat or nested, or a first event that ended with an error's status."""
    assert SGLANG.event_error(event({"error": {"message": "x", "code": 400, "retryable": False}})) == 400
    assert SGLANG.event_error(event({"error": {"message": "x"}})) == 500
    assert SGLANG.event_error(event({"error": "x"})) == 500
    assert SGLANG.event_error(event({"object": "error", "message": "x", "code": 503})) == 503
    assert SGLANG.event_error(event(ended(ABORT))) == 503
    assert SGLANG.event_error(event(ended({**ABORT, "status_code": None}))) is None
    assert SGLANG.event_error(event(ANSWER)) is None
    assert SGLANG.event_error(event({**ANSWER, "text": 'say "error" and "abort"'})) is None


@pytest.mark.parametrize("wrap", [lambda a: json.dumps(a).encode(), lambda a: json.dumps([ANSWER, a]).encode(), event])
def test_given_up(wrap: Any) -> None:
    """An answer ended by an abort is not a whole one, unless the request itself was at fault."""
    assert SGLANG.find_abort(wrap(ended(ABORT)))
    assert SGLANG.find_abort(wrap(ended({"type": "abort", "message": "Aborted", "status_code": None})))
    assert not SGLANG.find_abort(wrap(ended({**ABORT, "status_code": 400})))
    assert not SGLANG.find_abort(wrap(ANSWER))
    assert not SGLANG.find_abort(wrap({**ANSWER, "text": '"abort"'}))


def test_errors_are_flat() -> None:
    """The router's own errors look like SGLang's, with our stable code."""
    assert json.loads(SGLANG.error(404, "model_not_found", "no such model", "model")) == {
        "object": "error", "message": "no such model", "type": "Not Found", "param": "model", "code": "model_not_found",
    }  # fmt: skip
    assert json.loads(SGLANG.error(599, "x", "y"))["type"] == "Error"


@pytest.mark.parametrize("body", [b'{"text":"a}"}', b'{"text":"a", "routed_dp_rank": 7} \n', b"{ }", b"{}"])
def test_a_rank_is_spliced_in(body: bytes) -> None:
    """The body stays as it is but for the rank, which wins over one that the client asked for."""
    spliced = with_rank(body, 3)
    assert json.loads(spliced) == {**json.loads(body), "routed_dp_rank": 3}
    assert spliced.startswith(body.rstrip()[:-1])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = ["text", "input_ids", "image_data", "sampling_params", "lora_path", "cache_salt", "extra_key", "session_params"]


@given(st.dictionaries(st.sampled_from(NAMES), JSON))
@settings(deadline=None)
def test_no_object_is_refused(fields: dict[str, Any]) -> None:
    """Whatever the fields hold, the request is read, and with it at most one way to token ids."""
    body = json.dumps(fields).encode()
    assert SGLANG.parse("/generate", body).wants_usage
    made = SGLANG.template_input("/generate", body)
    assert made is None or (made.text is None) != (made.ids is None)

"""Requests that one engine may prefill and another one may decode.

vLLM answers a second choice from blocks that the first one has freed. A request for the log probabilities of its prompt
makes vLLM compute the prompt anew. Neither kind of request is split. SGLang's further samples would use the same
`bootstrap_room` again.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

from router.core.dialects.tenant_isolation import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES
from router.core.prompts import sliced_json
from router.core.prompts.json_fields import ABSENT, UNREADABLE, flag, has_value, number

VLLM, SGLANG = "vllm", "sglang"  # kinds of engines, as in /v1/models
SPLIT: dict[str, frozenset[str]] = {
    VLLM: frozenset((CHAT, COMPLETIONS, MESSAGES, RESPONSES)),
    SGLANG: frozenset((CHAT, COMPLETIONS, RESPONSES, GENERATE)),
}
"""Paths with bodies to which the fields can be added, by kind of engine."""


class DisaggFields(msgspec.Struct):
    """Fields that decide if a body may be split, and how its prefill stage is made to end."""

    prompt: Raw = ABSENT
    text: Raw = ABSENT
    input_ids: Raw = ABSENT
    input_embeds: Raw = ABSENT
    prompt_embeds: Raw = ABSENT
    n: Raw = ABSENT
    best_of: Raw = ABSENT
    use_beam_search: Raw = ABSENT
    echo: Raw = ABSENT
    prompt_logprobs: Raw = ABSENT
    logprob_start_len: Raw = ABSENT
    sampling_params: Raw = ABSENT
    session_params: Raw = ABSENT
    background: Raw = ABSENT
    previous_response_id: Raw = ABSENT
    tools: Raw = ABSENT
    max_tokens: Raw = ABSENT
    max_completion_tokens: Raw = ABSENT
    min_tokens: Raw = ABSENT
    stream_options: Raw = ABSENT
    return_token_ids: Raw = ABSENT
    stop: Raw = ABSENT
    stop_sequences: Raw = ABSENT
    stop_token_ids: Raw = ABSENT


class _Sampling(msgspec.Struct):
    n: Raw = ABSENT


class _Tool(msgspec.Struct):
    type: str = "function"


_decode_fields = msgspec.json.Decoder(DisaggFields).decode
_decode_sampling = msgspec.json.Decoder(_Sampling).decode
_decode_tools = msgspec.json.Decoder(list[_Tool]).decode
_BATCH = re.compile(rb"\[\s*[\[\"{]")


def read_fields(body: bytes) -> DisaggFields:
    """Return the fields of a body that `can_disaggregate` has read."""
    try:
        return sliced_json.read(_decode_fields, body)
    except UNREADABLE:
        return DisaggFields()


def can_disaggregate(path: str, body: bytes, kinds: frozenset[str]) -> bool:
    """True if one engine may prefill the prompt of this request and another may decode it, given the kinds of engines
    that serve its model. False if the body cannot be read."""
    if not kinds or not all(path in SPLIT.get(kind, ()) for kind in kinds):
        return False
    try:
        wishes = sliced_json.read(_decode_fields, body)
        if path == RESPONSES and not _is_plain_response(wishes):
            return False
        if path == GENERATE and has_value(wishes.sampling_params):
            wishes.n = _decode_sampling(wishes.sampling_params).n
        return _is_alone(wishes)
    except UNREADABLE:
        return False


def _is_alone(wishes: DisaggFields) -> bool:
    """True if the request has one prompt and one choice, and needs the prompt for its continuation only."""
    one = all(not has_value(wish) or number(wish) == 1 for wish in (wishes.n, wishes.best_of))
    no = all(not has_value(wish) or flag(wish) is False for wish in (wishes.echo, wishes.use_beam_search))
    prompts = (wishes.prompt, wishes.text, wishes.input_ids)
    whole = not any(_BATCH.match(memoryview(each)) for each in prompts)
    others = (wishes.prompt_logprobs, wishes.input_embeds, wishes.prompt_embeds, wishes.session_params)
    start = wishes.logprob_start_len
    return one and no and whole and not any(map(has_value, others)) and (not has_value(start) or number(start) == -1)


def _is_plain_response(wishes: DisaggFields) -> bool:
    """True if a Responses request is one pass through the model: no tools of the engine's own, no earlier response."""
    if has_value(wishes.background) and flag(wishes.background) is not False:
        return False
    if has_value(wishes.previous_response_id):
        return False
    return not has_value(wishes.tools) or all(tool.type == "function" for tool in _decode_tools(wishes.tools))

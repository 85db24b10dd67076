"""The input of the engine's template and tokenizer for a chat or completion request.

Only text is read. A request with images, sound, or other content that the engine expands by itself yields None. The
same holds for a request that brings its own template or truncates its prompt. Such a request is placed by estimate.
Messages come out in the form in which vLLM 0.32 validates them (entrypoints/openai/chat_completion/protocol.py): it
puts the fields of a tool call in the order of its types, and templates that print a call with `tojson` show that order.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, cast

import msgspec
from msgspec import Raw

from router.core.prompts import json_fields, sliced_json
from router.core.prompts.json_fields import ABSENT, UNREADABLE
from router.core.prompts.raw_prompts import Given, decode_items, only_text
from router.core.types.requests import TemplateInput

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
# Names that are arguments of the rendering itself; vLLM refuses them, or they would change the rendering.
RESERVED = frozenset(("chat_template", "tokenize", "messages", "conversation", "tools", "return_dict"))


class UnsupportedForTemplate(ValueError):
    """The engine's input for this request cannot be reproduced here. The message states the reason, without a word of
    the prompt."""


class ChatBody(msgspec.Struct):
    """Top level of a chat, a completion or an embedding. Raw fields are not decoded. Messages are decoded once for all
    readers, since they are nearly all of a long body."""

    messages: list[dict[str, Any]] | None = None
    model: Raw = ABSENT
    stream: Raw = ABSENT
    stream_options: Raw = ABSENT
    prompt: Raw = ABSENT
    input: Raw = ABSENT
    tools: Raw = ABSENT
    functions: Raw = ABSENT
    tool_choice: Raw = ABSENT
    documents: Raw = ABSENT
    reasoning_effort: Raw = ABSENT
    chat_template_kwargs: Raw = ABSENT
    add_generation_prompt: Raw = ABSENT
    continue_final_message: Raw = ABSENT
    add_special_tokens: Raw = ABSENT
    cache_salt: Raw = ABSENT
    extra_key: Raw = ABSENT
    lora_path: Raw = ABSENT
    prompt_cache_key: Raw = ABSENT
    metadata: Raw = ABSENT
    nvext: Raw = ABSENT
    client_metadata: Raw = ABSENT
    session_id: Raw = ABSENT
    max_tokens: Raw = ABSENT
    max_completion_tokens: Raw = ABSENT
    store: Raw = ABSENT
    echo: Raw = ABSENT
    logprobs: Raw = ABSENT
    top_logprobs: Raw = ABSENT
    # Any of these changes the prompt in ways that are not reproduced here.
    chat_template: Raw = ABSENT
    truncate_prompt_tokens: Raw = ABSENT
    prompt_logprobs: Raw = ABSENT  # vLLM computes such a request whole (sampling_params.skip_reading_prefix_cache)
    previous_response_id: Raw = ABSENT
    kv_transfer_params: Raw = ABSENT
    mm_processor_kwargs: Raw = ABSENT
    prompt_embeds: Raw = ABSENT
    suffix: Raw = ABSENT
    input_ids: Raw = ABSENT
    reasoning: Raw = ABSENT
    thinking: Raw = ABSENT


class FullChatBody(ChatBody, kw_only=True):
    """A body with its messages still JSON. The earlier decoded messages and these replace them."""

    messages: list[Raw] = []  # type: ignore[assignment]  # the list of decoded ones is put here before it is read


class Apart(ChatBody, kw_only=True):
    """A long body with its messages still JSON."""

    messages: list[Raw] | None = None  # type: ignore[assignment]  # decoded ones are put here before it is read


class LooseChatBody(ChatBody, kw_only=True):
    """A body with messages that no engine would take. All other fields are read."""

    messages: Raw = ABSENT  # type: ignore[assignment]  # their value does not matter


_elsewhere = attrgetter(*ChatBody.__struct_fields__[ChatBody.__struct_fields__.index("chat_template") :])
_BODY = msgspec.json.Decoder(ChatBody)
_APART = msgspec.json.Decoder(Apart)
_ODD = msgspec.json.Decoder(LooseChatBody)
decode_kept = msgspec.json.Decoder(FullChatBody).decode
_decode_objects = msgspec.json.Decoder(list[dict[str, Any]]).decode
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


def decode_openai(body: bytes) -> ChatBody:
    """Decode the body, with messages only if they are a list of objects. Raises InvalidBody if it is not a JSON
    object."""
    try:
        return _decode_body(body)
    except UNREADABLE:
        return json_fields.decode_body(_ODD, body)


def _decode_body(body: bytes) -> ChatBody:
    """Decode the body. The messages of a long one are decoded one by one. Raises UNREADABLE."""
    if len(body) < sliced_json.LONG_BYTES_MIN:
        return _BODY.decode(body)
    folded = sliced_json.fold(body)
    fields: Any = _APART.decode(folded.document)
    messages, fields.messages = fields.messages, None
    fields = folded.restore(fields)
    if messages is not None:
        fields.messages = list(folded.each(messages, sliced_json.object_of))
    return cast("ChatBody", fields)


def openai_input(path: str, body: bytes, fields: ChatBody | None) -> TemplateInput | None:
    """Return the engine's tokenizer input for a chat completion or a completion. None for any other request, or if the
    input is unknown."""
    if path.endswith("/embeddings"):
        return None
    try:
        fields = fields or _decode_body(body)
        if isinstance(fields, LooseChatBody):
            return None
        if any(json_fields.has_value(raw) for raw in _elsewhere(fields) if raw is not ABSENT):
            return None
        if _flag(fields.echo, default=False) and (
            json_fields.has_value(fields.logprobs) or json_fields.has_value(fields.top_logprobs)
        ):
            return None  # the request wants logprobs of the prompt
        return _completion(fields) if fields.messages is None else _chat(fields, fields.messages)
    except (*UNREADABLE, UnsupportedForTemplate):
        return None


def _chat(fields: ChatBody, messages: list[dict[str, Any]]) -> TemplateInput:
    if json_fields.has_value(fields.functions) or json_fields.has_value(fields.extra_key):
        raise UnsupportedForTemplate("functions, or an extra_key, which SGLang's events omit")
    return TemplateInput(
        messages=[chat_message(message) for message in messages],
        tools=_decode_objects(fields.tools) if json_fields.has_value(fields.tools) else None,
        tool_choice=sliced_json.value(fields.tool_choice) if json_fields.has_value(fields.tool_choice) else None,
        kwargs=template_kwargs(fields.chat_template_kwargs),
        reasoning_effort=_effort(fields.reasoning_effort),
        documents=_decode_objects(fields.documents) if json_fields.has_value(fields.documents) else None,
        add_generation_prompt=_flag(fields.add_generation_prompt, default=True),
        continue_final_message=_flag(fields.continue_final_message, default=False),
        add_special_tokens=_flag(fields.add_special_tokens, default=False),
    )


def _completion(fields: ChatBody) -> TemplateInput:
    text = only_text(fields.prompt)
    if text is not None:
        return TemplateInput(text=text, add_special_tokens=_flag(fields.add_special_tokens, default=True))
    given = Given()
    given.read(fields.prompt, decode_items)
    if given.texts or given.lists > 1 or (given.lists and given.flat) or not len(given.ids):
        raise UnsupportedForTemplate("token ids")
    return TemplateInput(ids=given.id_bytes())


def pack_ids(ids: Sequence[Any]) -> bytes:
    """Return token ids as uint32 little-endian. Raises UnsupportedForTemplate for an empty list, for several prompts,
    and for invalid ids."""
    if set(map(type, ids)) != {int}:
        raise UnsupportedForTemplate("token ids")
    try:
        made = array("I", ids)
    except OverflowError:
        raise UnsupportedForTemplate("token ids") from None
    if made.itemsize != 4 or array("H", [1]).tobytes()[0] != 1:  # integers here are not 4 bytes little-endian
        return b"".join(each.to_bytes(4, "little") for each in ids)
    return made.tobytes()


def template_kwargs(raw: Raw) -> dict[str, Any]:
    """Return `chat_template_kwargs`. Raises UnsupportedForTemplate if they would change more than the template's
    variables."""
    kwargs = _decode_object(raw) if json_fields.has_value(raw) else {}
    if RESERVED & kwargs.keys():
        raise UnsupportedForTemplate("chat_template_kwargs")
    return kwargs


def chat_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return one message, its content checked to be text and its tool calls in the order of vLLM's types."""
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            check_text(part)
    elif content is not None and not isinstance(content, str):
        raise UnsupportedForTemplate("content")
    if not isinstance(message.get("role"), str):
        raise UnsupportedForTemplate("role")
    calls = message.get("tool_calls")
    if calls is None:
        return message
    if not isinstance(calls, list):
        raise UnsupportedForTemplate("tool_calls")
    return message | {"tool_calls": [_call(each) for each in calls]}


def check_text(part: object) -> None:
    """Check that this part of a content is text. Raises UnsupportedForTemplate."""
    if isinstance(part, str):
        return
    if not isinstance(part, dict) or "uuid" in part:
        raise UnsupportedForTemplate("content part")
    kind = part.get("type")
    name = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if name is None or not isinstance(part.get(name), str):
        raise UnsupportedForTemplate("content part")


def _call(given: object) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(function, dict) or given.get("type", "function") != "function":
        raise UnsupportedForTemplate("tool call")
    made = {"id": given.get("id"), "function": in_order(function, ("arguments", "name")), "type": "function"}
    return made | {name: value for name, value in given.items() if name not in made}


def in_order(given: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Return the same fields, with those of these names that are present first."""
    return {name: given[name] for name in names if name in given} | dict(given)


def _flag(raw: Raw, *, default: bool) -> bool:
    if not raw:
        return default
    value = json_fields.flag(raw)
    if value is None:
        raise UnsupportedForTemplate("a flag")
    return value


def _effort(raw: Raw) -> str | float | None:
    return msgspec.json.decode(raw, type=str | float | None) if raw else None

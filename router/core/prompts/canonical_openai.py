"""Requests of the OpenAI dialect: read for placement, their prompts written as canonical bytes.

Nearly all requests have the right type in every field, and are read by one decoder that decodes no more than placement
needs. A body that it refuses is read field by field (`OpenAI.parse`): a wrong type in one field affects that field
only.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import msgspec
from msgspec import Raw

from router.core.prompts import agent_headers, gil_release, json_fields, sliced_json
from router.core.prompts.canonical import PIECES_MAX, US, Chat, Part, arguments, calls, canonical
from router.core.prompts.incremental_parse import BodyPrefixCache, KnownPrefix
from router.core.prompts.json_fields import ABSENT, UNREADABLE, has_value, is_text
from router.core.prompts.openai_fields import (
    QuickFields,
    RestFields,
    decode_long,
    decode_message,
    decode_quick,
    decode_rest,
)
from router.core.prompts.raw_prompts import TOKEN_ID_BYTES, Given, decode_items, decode_text
from router.core.prompts.template_chat import ChatBody, LooseChatBody, decode_kept, decode_openai
from router.core.types.requests import DecodedMessages, Heading, Prompt, RequestSpec

SEEN_AS = (b"openai", b"openai, kept")  # names of bodies in a `BodyPrefixCache`

ARGUMENTS = ("chat_template_kwargs", "reasoning_effort")
HEAD = ("functions", "documents", "chat_template", *ARGUMENTS)
_head_fields = attrgetter(*HEAD)
FIELDS = ("name", "tool_calls", "function_call", "reasoning", "reasoning_content")


def parse_quick(path: str, body: bytes, seen: BodyPrefixCache | None) -> RequestSpec | None:
    """Return the request if every field has the right type, as in nearly all requests, else None."""
    try:
        if seen is not None:
            ask = _parse_cached(path, body, seen)
            if ask is not None:
                return ask
        fields: QuickFields = decode_quick(body) if len(body) < sliced_json.LONG_BYTES_MIN else _long(body)
        if fields.messages is None:
            return _ask(fields, _given_prompt(fields.input if path.endswith("/embeddings") else fields.prompt))
    except UNREADABLE:
        return None
    try:
        return _ask(fields, _chat_prompt(fields, fields.messages))
    except UNREADABLE:
        return _ask(fields, None)


def _long(body: bytes) -> Any:  # noqa: ANN401 - as QuickFields, but a record of its own
    """Return the fields of a long body, its messages decoded one by one. Raises UNREADABLE."""
    folded = sliced_json.fold(body)
    fields: Any = decode_long(folded.document)
    messages, options = fields.messages, fields.stream_options
    fields.messages = None
    fields = folded.restore(fields)
    fields.stream_options = None
    if has_value(options):
        fields.stream_options = folded.restore(sliced_json.value(options))
        if not isinstance(fields.stream_options, dict):
            raise msgspec.ValidationError("stream_options")
    if messages is not None:
        fields.messages = list(folded.each(messages, sliced_json.object_of))
    return fields


def _ask(fields: QuickFields | RestFields, prompt: Prompt | None) -> RequestSpec:
    salt, options, stored = fields.cache_salt, fields.stream_options, fields.store
    most = fields.max_completion_tokens
    if most is None or most <= 0:
        most = fields.max_tokens
    adapter, adapters = json_fields.adapter_of(fields.lora_path)
    return RequestSpec(
        fields.model or None,
        prompt,
        fields.stream or False,
        (salt.encode(errors="surrogatepass") if salt else b"")
        + (bytes(fields.extra_key) if has_value(fields.extra_key) else b"")
        + adapters,
        fields.prompt_cache_key,
        most if most is not None and most > 0 else None,
        stored,
        fields.previous_response_id,
        json_fields.wants_usage(options),
        json_fields.metadata_of(fields.metadata),
        "",
        options,
        agent_headers.names_of(fields.nvext, fields.client_metadata, ABSENT, fields.session_id),
        adapter,
    )


def parse_and_keep(path: str, body: bytes, seen: BodyPrefixCache | None) -> RequestSpec | None:
    """Return a request of a known conversation with all of its messages, of which only the new ones are decoded, else
    None."""
    try:
        place = seen.find(body, SEEN_AS[1]) if seen is not None else None
        if seen is None or place is None:
            return None
        kept, said = decode_kept(place.rest), place.copy_known_messages()
        ask = _go_on(path, body, seen, place, said)
    except UNREADABLE:
        return None
    if ask is not None:
        kept.messages, ask.decoded, ask.new_bytes = said.messages, kept, len(place.rest)
    return ask


def _parse_cached(path: str, body: bytes, seen: BodyPrefixCache) -> RequestSpec | None:
    place = seen.find(body, SEEN_AS[0])
    return _go_on(path, body, seen, place, None) if place is not None else None


def _go_on(
    path: str, body: bytes, seen: BodyPrefixCache, place: KnownPrefix, said: DecodedMessages | None
) -> RequestSpec | None:
    """Return a request of a known conversation: only its new messages are read, and appended to `said` if decoded
    messages are kept. None if the new messages cannot be separated."""
    fields = decode_rest(place.rest)
    messages = place.new(fields.messages)
    # mm_processor_kwargs may follow messages that were read without them.
    if messages is None or has_value(fields.mm_processor_kwargs):
        return None
    chat = Chat(place.mark.beginning)
    chat.set_head(seen.get_or_render(_head_parts(fields), lambda: _build_heading(fields)))

    def write(raw: Raw) -> dict[str, Any]:
        message: dict[str, Any] = (
            decode_message(raw) if len(raw) < sliced_json.LONG_BYTES_MIN else sliced_json.object_of(raw)
        )
        _message(chat, message)
        return message

    prompt = seen.resume(chat, place, body, messages, write, lambda: prompt_of(path, decode_openai(body)), said)
    return _ask(fields, prompt)


def _head_parts(fields: QuickFields | RestFields) -> list[Raw]:
    return [fields.tools, fields.tool_choice, *_head_fields(fields)]


def _build_heading(fields: QuickFields | RestFields) -> Heading:
    chat = Chat()
    _head(chat, fields)
    return chat.get_heading()


def prompt_of(path: str, fields: ChatBody) -> Prompt | None:
    """Return the prompt of a chat, a completion or an embedding. None if it cannot be interpreted."""
    if isinstance(fields, LooseChatBody):
        return None
    try:
        if fields.messages is not None:
            return _chat_prompt(fields, fields.messages)
        return _given_prompt(fields.input if path.endswith("/embeddings") else fields.prompt)
    except UNREADABLE:
        return None


def _given_prompt(raw: Raw) -> Prompt | None:
    """Return the prompt of a string, strings, token ids, or lists of token ids. Several prompts are chained one after
    the other."""
    if not raw:
        return None
    try:
        if is_text(raw):
            text = sliced_json.utf8(sliced_json.read(decode_text, raw))
            return Prompt(text, len(text))
        found = Given()
        found.read(raw, decode_items)
        if found.texts:
            return Prompt(found.text(), found.first_text_bytes)
        text = found.id_bytes()
        return Prompt(text, len(text), bytes_per_token=TOKEN_ID_BYTES)
    except UNREADABLE:
        return None


def _chat_prompt(fields: ChatBody | QuickFields, messages: list[dict[str, Any]]) -> Prompt:
    gil_release.release_gil()
    chat = Chat()
    if has_value(fields.mm_processor_kwargs):
        chat.media = arguments(fields.mm_processor_kwargs)
    _head(chat, fields)
    _messages(chat, messages)
    return chat.prompt()


def _head(chat: Chat, fields: ChatBody | QuickFields | RestFields) -> None:
    if has_value(fields.tools):
        tools, choice = sliced_json.value(fields.tools), fields.tool_choice
        chat.tools(tools, json_fields.decode_as(str, choice) or json_fields.decode_as(dict, choice))
        if isinstance(tools, list) and tools and _has_cache_control(tools[-1]):
            chat.head_breakpoint()
    for name, raw in zip(HEAD, _head_fields(fields), strict=True):
        if not has_value(raw):
            continue
        if name == "reasoning_effort":
            chat.effort(sliced_json.value(raw))
        elif name in ARGUMENTS:
            chat.argument(name, arguments(raw))
        else:
            chat.head(name, canonical(raw))


def _messages(chat: Chat, messages: list[dict[str, Any]]) -> None:
    at = chat.texts(messages)
    while at < len(messages):
        _message(chat, messages[at])
        gil_release.release_gil()
        at = chat.texts(messages, at + 1)


def _message(chat: Chat, message: dict[str, Any]) -> None:
    role, content = message.get("role"), message.get("content")
    if len(message) == 2 and isinstance(content, str) and isinstance(role, str):
        chat.text(role, content)
        return
    fields = [(name, _field(name, message[name])) for name in FIELDS if message.get(name)]  # "" and [] are ignored
    breakpoints = _breakpoints(message, content) if chat.begins else ()
    chat.message(_string(message.get("role", "")), _parts(content), fields, breakpoints)


def _breakpoints(message: dict[str, Any], content: object) -> list[int]:
    """Return the numbers of the content's parts after which a `cache_control` stands, as clients of Anthropic proxies
    set it."""
    parts = content if isinstance(content, list) else [content]
    return [
        n
        for n, part in enumerate(parts, 1)
        if _has_cache_control(part) or (n == len(parts) and _has_cache_control(message))
    ]


def _has_cache_control(given: object) -> bool:
    return isinstance(given, dict) and given.get("cache_control") is not None


def _field(name: str, value: object) -> bytes:
    return calls(value) if name == "tool_calls" else msgspec.json.encode(value)


def _parts(content: object) -> list[Part]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise msgspec.ValidationError("content")
    parts: list[Part] = []
    for part in content:
        parts.append(_text_or(part))
        if not len(parts) % PIECES_MAX:
            gil_release.release_gil()
    return parts


def _text_or(part: object) -> Part:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    return _render_object_part(part, None)


def _string(value: object) -> str:
    if isinstance(value, str):
        return value
    raise msgspec.ValidationError("role")


def content_parts(content: str | list[Raw] | None) -> list[Part]:
    """Return the parts of a message's content: texts, and the identities of other parts. Raises UNREADABLE."""
    if content is None:
        return []
    return [content] if isinstance(content, str) else [_part(raw) for raw in content]


def _part(raw: Raw) -> Part:
    part = sliced_json.value(raw)
    return part if isinstance(part, str) else _render_object_part(part, raw)


def _render_object_part(part: object, raw: Raw | None) -> Part:
    """Return a content part that is an object: its text, or the identity of its image, or else its JSON."""
    if not isinstance(part, dict):
        raise msgspec.ValidationError("content part")
    kind, text, image = part.get("type", ""), part.get("text"), part.get("image_url")
    if not isinstance(kind, str) or not (text is None or isinstance(text, str)):
        raise msgspec.ValidationError("content part")
    if isinstance(text, str) and kind in ("text", "input_text", "output_text", "refusal", ""):
        return text
    url, how = image, part.get("detail")
    if isinstance(image, dict):
        url, how = image.get("url"), image.get("detail")
    if not isinstance(url, str) or not url:
        return msgspec.json.encode(part) if raw is None else bytes(raw)
    identity = sliced_json.utf8(url)
    return identity + US + how.encode() if isinstance(how, str) and how and how != "auto" else identity

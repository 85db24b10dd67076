"""Fields of the OpenAI dialect's requests that placement needs, and their decoders.

They are separate from the module that makes prompts of them (canonical_openai.py), because that module may be compiled
(deploy/compiled.py) and msgspec decodes only into Structs that Python itself made.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from router.core.prompts.json_fields import ABSENT


class RestFields(msgspec.Struct):
    """A body with the right type in all fields. Its messages are still JSON."""

    messages: list[Raw] = []
    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    tools: Raw = ABSENT
    tool_choice: Raw = ABSENT
    functions: Raw = ABSENT
    documents: Raw = ABSENT
    chat_template: Raw = ABSENT
    chat_template_kwargs: Raw = ABSENT
    reasoning_effort: Raw = ABSENT
    mm_processor_kwargs: Raw = ABSENT
    cache_salt: str | None = None
    extra_key: Raw = ABSENT
    lora_path: Raw = ABSENT
    prompt_cache_key: str | None = None
    metadata: Raw = ABSENT
    nvext: Raw = ABSENT
    client_metadata: Raw = ABSENT
    session_id: Raw = ABSENT
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    store: bool | None = None
    previous_response_id: str | None = None


class QuickFields(RestFields, kw_only=True):
    """A body like `RestFields` with its messages decoded, or with the prompt of a completion or an embedding."""

    messages: list[dict[str, Any]] | None = None  # type: ignore[assignment]  # no code reads it through the base class
    prompt: Raw = ABSENT
    input: Raw = ABSENT


class LongFields(RestFields, kw_only=True):
    """A long body like `QuickFields`. Every field that may be long is still JSON."""

    messages: list[Raw] | None = None  # type: ignore[assignment]  # no code reads it through the base class
    stream_options: Raw = ABSENT  # type: ignore[assignment]  # the same
    prompt: Raw = ABSENT
    input: Raw = ABSENT


decode_long = msgspec.json.Decoder(LongFields).decode
decode_quick = msgspec.json.Decoder(QuickFields).decode
decode_rest = msgspec.json.Decoder(RestFields).decode
decode_message = msgspec.json.Decoder(dict[str, Any]).decode

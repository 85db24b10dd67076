"""The fields of the OpenAI dialect's requests that placement needs, and their decoders.

Apart from what makes prompts of them (canonical_openai.py), which may be compiled (deploy/compiled.py): msgspec decodes
into Structs as Python made them.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from router.core.prompts.bodies import ABSENT


class RestFields(msgspec.Struct):
    """A body whose fields all have the right type; its messages are still JSON."""

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

    messages: list[dict[str, Any]] | None = None  # type: ignore[assignment]  # nothing is asked of the base
    prompt: Raw = ABSENT
    input: Raw = ABSENT


class LongFields(RestFields, kw_only=True):
    """A long body like `QuickFields`, with whatever may be long still JSON."""

    messages: list[Raw] | None = None  # type: ignore[assignment]  # nothing is asked of the base
    stream_options: Raw = ABSENT  # type: ignore[assignment]  # likewise
    prompt: Raw = ABSENT
    input: Raw = ABSENT


decode_long = msgspec.json.Decoder(LongFields).decode
decode_quick = msgspec.json.Decoder(QuickFields).decode
decode_rest = msgspec.json.Decoder(RestFields).decode
decode_message = msgspec.json.Decoder(dict[str, Any]).decode

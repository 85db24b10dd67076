"""Fields of a Responses request. canonical_responses.py reads them for placement, template_responses.py for
templates."""

from __future__ import annotations

import msgspec
from msgspec import Raw

from router.core.prompts.json_fields import ABSENT


class ResponsesBody(msgspec.Struct):
    """The top level of a request. Each field may have any type, and is decoded by its reader."""

    model: Raw = ABSENT
    stream: Raw = ABSENT
    input: Raw = ABSENT
    instructions: Raw = ABSENT
    tools: Raw = ABSENT
    tool_choice: Raw = ABSENT
    reasoning: Raw = ABSENT
    truncation: Raw = ABSENT
    chat_template_kwargs: Raw = ABSENT
    mm_processor_kwargs: Raw = ABSENT
    prompt: Raw = ABSENT
    previous_input_messages: Raw = ABSENT
    previous_response_id: Raw = ABSENT
    kv_transfer_params: Raw = ABSENT
    cache_salt: Raw = ABSENT
    prompt_cache_key: Raw = ABSENT
    metadata: Raw = ABSENT
    nvext: Raw = ABSENT
    client_metadata: Raw = ABSENT
    session_id: Raw = ABSENT
    max_output_tokens: Raw = ABSENT
    store: Raw = ABSENT


BODY = msgspec.json.Decoder(ResponsesBody)

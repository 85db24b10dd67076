"""Interface of a replica's own /tokenize, as vLLM 0.32 (entrypoints/serve/tokenize/protocol.py) and SGLang 0.5.23
accept it."""

from __future__ import annotations

import json
from typing import Any

from router.core.prompts.template_chat import UnsupportedForTemplate
from router.core.types.requests import TemplateInput
from router.tokenization.chat_templates import SGLANG


def ask_body(given: TemplateInput, model: str, engine: str) -> dict[str, Any]:
    """Return the body for /tokenize. Raises UnsupportedForTemplate for prompts that /tokenize would tokenize
    differently from the engine's own API."""
    if given.text is not None:
        return {"model": model, "prompt": given.text, "add_special_tokens": given.add_special_tokens}
    body: dict[str, Any] = {"model": model, "messages": [_message(message) for message in given.messages or []]}
    if given.tools:
        body["tools"] = given.tools
    if engine == SGLANG:
        if given.api != "chat":
            raise UnsupportedForTemplate(f"sglang {given.api}")
        return body | _drop_none(
            chat_template_kwargs=given.kwargs or None,
            reasoning_effort=given.reasoning_effort,
            tool_choice=given.tool_choice,
            continue_final_message=given.continue_final_message or None,
        )
    _check_vllm(given)
    kwargs = dict(given.kwargs)
    if given.reasoning_effort is not None:
        kwargs["reasoning_effort"] = given.reasoning_effort
        kwargs.setdefault("enable_thinking", given.reasoning_effort != "none")
    if given.documents is not None:
        kwargs["documents"] = given.documents
    return body | {
        "add_generation_prompt": given.add_generation_prompt,
        "continue_final_message": given.continue_final_message,
        "add_special_tokens": given.add_special_tokens,
        **_drop_none(chat_template_kwargs=kwargs or None),
    }


def _check_vllm(given: TemplateInput) -> None:
    messages = given.messages or []
    if given.api == "messages" and (given.thinking_off or any(each["role"] == "system" for each in messages[1:])):
        raise UnsupportedForTemplate("the result depends on the engine's chat template")
    if given.api == "responses" and any("tool_calls" in message for message in messages):
        raise UnsupportedForTemplate("/tokenize orders the fields of calls differently than /v1/responses")


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with the arguments of its tool calls as text, which /tokenize requires."""
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_call(each) for each in message["tool_calls"]]}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    return call | {
        "function": function | {"arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}
    }


def _drop_none(**fields: object) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}

"""Chat template of a model: compiled once, rendered as transformers renders it (utils/chat_template_utils.py, 5.x).

A model may have several templates by name; `tool_use` is used for requests with tools. To continue the final message,
its text is marked, and the rendered text is cut at the mark.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.core.prompts.engine_messages import Rendering, Traits, for_sglang, for_vllm
from router.core.types.requests import TemplateInput
from router.tokenization.sandbox import CannotRender, compile_template
from router.tokenization.template_traits import refuses_inline_system, sglang_wants_parts, vllm_wants_parts

VLLM, SGLANG = "vllm", "sglang"
EFFORTS = ("low", "medium", "high", "xhigh", "max")
CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    """Templates of one model by name; `tool_use`, if present, is used for requests with tools."""

    def __init__(self, sources: Mapping[str, str], special: Mapping[str, Any]) -> None:
        """`special`: the special tokens that the template sees, such as `bos_token`. Raises CannotRender if a template
        does not compile."""
        self._sources = dict(sources)
        self._special = dict(special)
        self._compiled = {name: compile_template(source) for name, source in sources.items()}
        system_first = any(map(refuses_inline_system, sources.values()))
        self._traits = {name: _traits(source, system_first=system_first) for name, source in sources.items()}
        self._effort_off: str | None = None

    def fit_and_render(self, given: TemplateInput, engine: str, defaults: Mapping[str, Any]) -> str:
        """Return the prompt's text. Raises CannotRender, and UnsupportedForTemplate if the engine's behaviour is
        unknown."""
        return self.render(self.fit(given, engine, defaults))

    def fit(self, given: TemplateInput, engine: str, defaults: Mapping[str, Any]) -> Rendering:
        """Return the input as this engine would pass it to the template. Raises UnsupportedForTemplate."""
        traits = self._traits[self._name(given.tools is not None)][SGLANG if engine == SGLANG else VLLM]
        if engine == SGLANG:
            return for_sglang(given, traits, defaults)
        if given.thinking_off:
            traits = Traits(traits.parts, traits.developer, traits.system_first, self._effort_when_off(defaults))
        return for_vllm(given, traits, defaults)

    def render(self, given: Rendering) -> str:
        """Render the text before tokenisation. Raises CannotRender."""
        if given.continue_final_message and given.add_generation_prompt:
            raise CannotRender("continue_final_message and add_generation_prompt")
        if not given.messages and not given.suffix:
            raise CannotRender("no messages")
        messages = given.messages
        if given.continue_final_message:
            messages = [*messages[:-1], _append_continue_tag(messages[-1])]
        name = self._name(given.tools is not None)
        variables = {**self._special, "documents": None, **given.kwargs}
        variables |= {
            "messages": messages,
            "tools": given.tools,
            "add_generation_prompt": given.add_generation_prompt,
        }
        try:
            text = str(self._compiled[name].render(variables))
        except Exception as error:  # a template is a program and may fail in any way, here as in the engine
            raise CannotRender(f"{type(error).__name__} in the chat template") from error
        return _cut_at_tag(text, given.messages[-1]) if given.continue_final_message else text

    def _name(self, tools: bool) -> str:
        if tools and "tool_use" in self._compiled:
            return "tool_use"
        if "default" not in self._compiled:
            raise CannotRender("no chat template")
        return "default"

    def _effort_when_off(self, defaults: Mapping[str, Any]) -> str:
        """Return the reasoning effort for disabled thinking: `none`, or `low` if the template refuses `none` or treats
        it like any other effort (vLLM's _probe_disabled_thinking_effort)."""
        if self._effort_off is None:
            none = self._try_effort("none", defaults)
            heeded = none is not None and all(self._try_effort(effort, defaults) != none for effort in EFFORTS)
            self._effort_off = "none" if heeded else "low"
        return self._effort_off

    def _try_effort(self, effort: str, defaults: Mapping[str, Any]) -> str | None:
        given = TemplateInput(messages=[{"role": "user", "content": "Hi"}], reasoning_effort=effort)
        try:
            return self.fit_and_render(given, VLLM, defaults)
        except CannotRender:
            return None


def _traits(source: str, *, system_first: bool) -> dict[str, Traits]:
    developer = '"developer"' in source or "'developer'" in source
    vllm = Traits(vllm_wants_parts(source), developer, system_first)
    return {VLLM: vllm, SGLANG: Traits(sglang_wants_parts(source))}


def _append_continue_tag(message: dict[str, Any]) -> dict[str, Any]:
    """Return the final message with a mark after its text, so that the template's text after it can be cut off."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + CONTINUE_TAG}
    blocks = list(content or ())
    for index in range(len(blocks) - 1, -1, -1):
        if "text" in blocks[index]:
            blocks[index] = {**blocks[index], "text": blocks[index]["text"] + CONTINUE_TAG}
            return {**message, "content": blocks}
    raise CannotRender("no text to continue")


def _cut_at_tag(text: str, last: dict[str, Any]) -> str:
    """Cut at the mark as transformers does: if the template trims white space after the message, so does the cut."""
    content = last["content"]
    if not isinstance(content, str):
        content = next(block["text"] for block in reversed(content) if "text" in block)
    at = text.rfind(CONTINUE_TAG.strip())
    if at < 0 or content.strip() not in text:
        raise CannotRender("the template changes the final message")
    return text[:at] if text.startswith(CONTINUE_TAG, at) else text[:at].rstrip()

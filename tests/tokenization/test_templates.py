"""Chat templates: rendered as the engine would, in a sandbox, and what they ask for."""

from __future__ import annotations

import contextlib

import pytest

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from router.core.types.requests import TemplateInput  # noqa: E402
from router.tokenization.chat_templates import ChatTemplate  # noqa: E402
from router.tokenization.sandbox import CannotRender  # noqa: E402

HI = TemplateInput(messages=[{"role": "user", "content": "Hello, world"}])


def rendered(template: str, given: TemplateInput, engine: str = "vllm") -> str:
    """By the engine's ways."""
    made = ChatTemplate({"default": template}, {"bos_token": "<s>", "eos_token": "</s>"})
    return made.render(made.fit(given, engine, {}))


def test_names_of_transformers_are_there() -> None:
    """tojson escapes nothing, loops can be left, generation marks vanish, dates can be printed."""
    template = (
        "{{ bos_token }}{{ messages[0] | tojson }}{% for m in messages %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% break %}{% endfor %}{% if strftime_now('%Y')|int > 2000 %}ok{% endif %}"
    )
    given = TemplateInput(messages=[{"role": "user", "content": "<é&>"}])
    assert rendered(template, given) == '<s>{"role": "user", "content": "<é&>"}<é&>ok'


def test_the_sandbox_is_one() -> None:
    """A template reaches nothing but what it is given."""
    for escape in ("{{ ''.__class__ }}", "{{ messages.append(1) }}", "{{ '{0.__class__}'.format(messages) }}"):
        with contextlib.suppress(CannotRender):
            assert "class" not in rendered(escape, HI)


MACRO, END = "{% macro s(c) %}{% for i in c %}{% endfor %}{% endmacro %}", "{% endfor %}"
CONTENT_LOOPS = [
    ("{% for m in messages %}{{ m.content }}{% endfor %}", "string", "string"),
    ("{% for m in messages %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}", "openai", "openai"),
    ("{% for x in messages[1:] %}{% for c in x['content'] | list %}{% endfor %}{% endfor %}", "openai", "string"),
    (
        "{% set ms = messages %}{% for x in ms %}{% set content = x.content %}{% for c in content %}{% endfor %}" + END,
        "openai",
        "string",
    ),
    (
        MACRO + "{% for x in messages %}{{ s(x.content) }}{% endfor %}",
        "openai",
        "string",
    ),
    (
        MACRO + "{% for x in messages %}{{ s([1]) }}{% endfor %}",
        "string",
        "string",
    ),
    ("{% for m in messages %}{{ m.content }}<image>{% endfor %}", "string", "openai"),
]


@pytest.mark.parametrize(("template", "vllm", "sglang"), CONTENT_LOOPS)
def test_a_loop_over_content_asks_for_parts(template: str, vllm: str, sglang: str) -> None:
    """Each engine's own way to see that a template takes parts."""
    given = TemplateInput(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}]}])
    made = ChatTemplate({"default": template}, {})
    for engine, wanted in (("vllm", vllm), ("sglang", sglang)):
        assert isinstance(made.fit(given, engine, {}).messages[0]["content"], list) == (wanted == "openai")


def test_a_final_message_is_continued_where_the_template_ends_it() -> None:
    """What the template puts behind it is cut off; white space that it trims is."""
    trimming = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    for content, wanted in (("I am", "[hi][I am"), ("I am ", "[hi][I am")):
        last = {"role": "assistant", "content": content}
        given = TemplateInput(
            messages=[{"role": "user", "content": "hi"}, last], add_generation_prompt=False, continue_final_message=True
        )
        assert rendered(trimming, given) == wanted
        assert rendered(trimming.replace(" | trim", ""), given) == f"[hi][{content}"
    with pytest.raises(CannotRender):
        rendered("{% for m in messages %}x{% endfor %}", given)


def test_thinking_switched_off_is_the_effort_that_the_template_heeds() -> None:
    """`none` where that changes the prompt, else `low` (vLLM's Messages API)."""
    given = TemplateInput(messages=HI.messages, thinking_off=True, api="messages")
    assert rendered("{{ reasoning_effort }}", given) == "none"
    assert rendered("{{ 'max' if reasoning_effort in ('none', 'max') else reasoning_effort }}", given) == "low"
    assert (
        rendered("{% if reasoning_effort == 'none' %}{{ raise_exception('') }}{% endif %}{{ reasoning_effort }}", given)
        == "low"
    )


def test_a_template_for_tools_is_taken_for_tools() -> None:
    """Of several templates, the one named tool_use."""
    made = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    tools = [{"type": "function", "function": {"name": "f"}}]
    for given, wanted in ((HI, "plain"), (TemplateInput(messages=HI.messages, tools=tools), "tools")):
        assert made.render(made.fit(given, "vllm", {})) == wanted

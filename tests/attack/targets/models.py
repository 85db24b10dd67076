"""A model's own files, and what requests bring into its chat template."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import msgspec

from router.core.dialects import PATHS, InvalidBody
from router.core.prompts.template_chat import UnsupportedForTemplate
from router.tokenization.chat_templates import SGLANG, VLLM, ChatTemplate
from router.tokenization.engine_tokenize import ask_body
from router.tokenization.sandbox import CannotRender
from router.tokenization.tokenizers import CannotLoad, ModelFolder
from tests.attack.target import Target
from tests.attack.targets.bodies import DEPTH_MAX, WORDS
from tests.core.prompts.test_nesting import nests_deeper

FILES = ("tokenizer_config.json", "special_tokens_map.json", "config.json", "chat_template.json", "chat_template.jinja")
TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "tools": "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m['role'] }}]"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for c in m.content or [] %}{{ c.text }}{% endfor %}"
    "{% endif %}{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}{% endfor %}",
    "strict": "{% if messages[0].role == 'system' %}{{ messages[0].content + '' }}{% set messages = messages[1:] %}"
    "{% endif %}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}",
}


def model_files(data: bytes) -> None:
    """The same bytes as each file of a model's folder beside the tokenizer: a template, or the documented errors."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tokenizer.json").write_bytes(b"{}")
        for file in FILES:
            (folder / file).write_bytes(data)
            with suppress(CannotLoad, CannotRender):
                read = ModelFolder(folder)
                assert isinstance(read.explain_template_unused(), str)
                templates, special = read.templates(), read.special()
                assert all(isinstance(each, str) for each in (*templates, *templates.values(), *special.values()))
                if templates:
                    ChatTemplate(templates, special)
            (folder / file).unlink()


@cache
def _templates() -> tuple[ChatTemplate, ...]:
    return tuple(ChatTemplate({"default": source}, {"bos_token": "<s>"}) for source in TEMPLATES.values())


def template_inputs(data: bytes) -> None:
    """What a body on every path brings into a chat template, of each engine, and into an engine's /tokenize."""
    if nests_deeper(data, DEPTH_MAX):
        return
    for path, dialect in PATHS.items():
        try:
            decoded = dialect.parse(path, data).decoded
        except InvalidBody:
            continue
        given = dialect.template_input(path, data, decoded)
        assert given == dialect.template_input(path, data), f"{path}: read anew it is another"
        if given is None:
            continue
        assert sum(each is not None for each in (given.ids, given.text, given.messages)) == 1
        for engine in (VLLM, SGLANG):
            with suppress(UnsupportedForTemplate):
                msgspec.json.encode(ask_body(given, "m", engine))
            if given.messages is None:
                continue
            for template in _templates():
                with suppress(CannotRender, UnsupportedForTemplate):
                    assert isinstance(template.fit_and_render(given, engine, {}), str)


JINJA = (
    b"{% for m in messages %}", b"{% endfor %}", b"{{ m.content }}", b"{% if ", b"{% endif %}",
    b"{% set x = messages %}", b"{% macro f(c) %}", b"{% endmacro %}", b"{% generation %}", b"{% endgeneration %}",
    b"| tojson", b"raise_exception('x')",
)  # fmt: skip
CONFIG = (
    b'"chat_template":',
    b'"name":"default"',
    b'"template":"',
    b'"bos_token":',
    b'"content":"<s>"',
    b'"model_type":',
)

TARGETS = (
    Target(model_files, (*CONFIG, *JINJA), bytes_max=1_500, steps=(400_000, 20_000), held_bytes=(16 << 20, 40_000)),
    Target(template_inputs, WORDS, steps=(200_000, 4_000), held_bytes=(8 << 20, 4_000)),
)

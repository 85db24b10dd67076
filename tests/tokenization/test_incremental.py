"""Texts that grow at their end: only what is new is encoded, and no id is another for that."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from router.core.types.requests import TemplateInput  # noqa: E402
from router.tokenization.encoder import Model, PromptEncoder  # noqa: E402
from router.tokenization.incremental import IncrementalEncoder, cuts_of  # noqa: E402
from router.tokenization.tokenizers import Encoder, FastTokenizer, HfTokenizer  # noqa: E402

CELL = 16  # characters; so few that short texts have many cells
BEGIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TEMPLATES = {
    "plain": BEGIN + "{{ m.content }}" + END,
    "reasoning of the last turn only": "{% set ns = namespace(last=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + BEGIN
    + "{% if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    + "{{ m.content.split('</think>')[-1] }}"
    + END,
    "counted before": "{{ messages | length }} messages" + BEGIN + "{{ m.content }}" + END,
    "the last is marked": BEGIN + "{{ m.content }}{{ ' (last)' if loop.last }}" + END,
    "trimmed": BEGIN + "{{ m.content | trim }}" + END,
    "no turns": "{% for m in messages %}{{ m.content }}{% endfor %}",
}


class Counting:
    """An encoder that counts the characters that it is given."""

    name = "counting"

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.characters = 0

    def encode(self, text: str, *, special: bool) -> bytes:
        """Count and encode."""
        self.characters += len(text)
        return self._encoder.encode(text, special=special)


PIECES = st.sampled_from(
    [
        "<|bos|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|im_",
        "start|>",
        " ",
        "  ",
        "\n",
        "a",
        "the ",
        " é",
        "漢",
        "👩‍👩‍👧",
        "12",
    ]
)
GROWTH = st.lists(st.tuples(st.integers(0, 5), st.lists(PIECES, min_size=1, max_size=25).map("".join)), max_size=12)


def texts_of(growth: list[tuple[int, str]]) -> list[str]:
    """Texts that go on where one of the latest ones ended, or a little before that."""
    texts = [""]
    for back, more in growth:
        before = texts[-1 - back % len(texts)]
        texts.append(before[: len(before) - back] + more)
    return texts


@pytest.fixture(scope="session")
def normalizing_json(tokenizer_json: str) -> str:
    """A tokenizer that writes spaces as Llama's do, and puts one before each piece of text."""
    made = json.loads(tokenizer_json)
    made["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "_"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "_"},
        ],
    }
    return json.dumps(made)


@given(growth=GROWTH)
@settings(deadline=None, max_examples=150)
@pytest.mark.parametrize("kind", ["fastokens", "tokenizers", "normalizing"])
def test_no_id_is_another_for_what_is_remembered(
    tokenizer_json: str, normalizing_json: str, kind: str, growth: list[tuple[int, str]]
) -> None:
    """Texts that grow, fork and come again have the ids of the library without a memory, however little is kept."""
    source = normalizing_json if kind == "normalizing" else tokenizer_json
    if kind == "fastokens":
        pytest.importorskip("fastokens")
    whole = HfTokenizer(source)
    encoder: Encoder = FastTokenizer(source, 1 << 20) if kind == "fastokens" else whole
    for bytes_max in (1 << 20, 2_000):
        remembering = IncrementalEncoder(
            encoder, cuts_of(source, ["<|im_start|> <|im_end|>"]), bytes_max, cell_characters=CELL
        )
        texts = texts_of(growth)
        for text in [*texts, *texts]:
            assert remembering.encode(text, special=False) == whole.encode(text, special=False)
            assert remembering.encode(text, special=True) == whole.encode(text, special=True)


TOKEN = st.text("<|ab", min_size=1, max_size=4)


@given(
    tokens=st.lists(st.tuples(TOKEN, st.booleans()), min_size=1, max_size=4, unique_by=lambda each: each[0]),
    flag=st.sampled_from(["", "", "", "rstrip", "lstrip", "single_word"]),
    growth=st.lists(st.tuples(st.integers(0, 3), st.text("<|ab ", min_size=1, max_size=30)), max_size=6),
)
@settings(deadline=None, max_examples=300)
def test_added_tokens_of_any_kind_are_cut_at_where_that_changes_nothing(
    tokens: list[tuple[str, bool]], flag: str, growth: list[tuple[int, str]]
) -> None:
    """Tokens that overlap, contain each other, take white space or look around themselves change no id."""
    vocabulary = {letter: at for at, letter in enumerate("<|ab Ġ")}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    flags = {flag: True} if flag else {}
    made.add_tokens([tokenizers.AddedToken(text, normalized=normalized, **flags) for text, normalized in tokens])
    source = str(made.to_str())
    whole = HfTokenizer(source)
    remembering = IncrementalEncoder(
        whole, cuts_of(source, [text for text, _ in tokens]), 1 << 20, cell_characters=CELL
    )
    for text in [*texts_of(growth), *texts_of(growth)]:
        assert remembering.encode(text, special=False) == whole.encode(text, special=False)


def test_cuts_are_tokens_that_nothing_overlaps() -> None:
    """Of a chat's tokens those that its template writes; none that another may reach into, none of odd tokenizers."""

    def cuts(*tokens: dict[str, Any]) -> list[str]:
        added = [{"special": True, "normalized": False} | token for token in tokens]
        return cuts_of(json.dumps({"added_tokens": added, "model": {"vocab": {}}}), ["<s> [I] |> <|x|>"])

    names = [{"content": text} for text in ("<s>", "[I]", "</s>")]
    assert cuts(*names) == ["<s>", "[I]"]
    assert cuts(*names, {"content": "a<s"}) == ["[I]"]
    assert cuts({"content": "|>"}, {"content": "<|x|>"}) == ["<|x|>"]
    assert cuts(*names, {"content": "<pad>", "lstrip": True}) == []
    assert cuts(*names, {"content": "<pad>", "single_word": True}) == []
    assert cuts({"content": "<s>", "normalized": True}) == []


def talk(turns: int, words: str = "some words of it ") -> TemplateInput:
    """A conversation's turn; reasoning stands with each answer."""
    said: list[dict[str, Any]] = []
    for number in range(turns):
        said.append({"role": "user", "content": f" {number} {words * 20}"})
        said.append({"role": "assistant", "content": f"{number} yes ", "reasoning_content": f"{number} {words * 5}"})
    return TemplateInput(messages=said[:-1])


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_templates_may_change_what_was_said_before(
    tmp_path: Path, tokenizer_json: str, template: str, engine: str
) -> None:
    """Whatever a later message changes in earlier text, the ids are those of the whole text, turn after turn."""
    (tmp_path / "tokenizer.json").write_text(tokenizer_json)
    (tmp_path / "chat_template.jinja").write_text(template)
    model = Model(str(tmp_path), 1 << 20)
    model.encoder = IncrementalEncoder(model.encoder._encoder, model.encoder._cuts, 1 << 20, cell_characters=256)
    whole = tokenizers.Tokenizer.from_str(tokenizer_json)
    for turns in (1, 2, 3, 5, 4, 8, 9, 10, 9, 10):
        rendered = model.render_prompt(talk(turns), engine, {})
        wanted = array("I", whole.encode(rendered.begun.text, add_special_tokens=False).ids).tobytes()
        assert model.ids(talk(turns), engine, {}) == wanted


def test_only_what_is_new_is_encoded(tokenizer_json: str) -> None:
    """A long text's next turn costs its new part, and what stands behind the last cut, wherever cells end."""
    counting = Counting(HfTokenizer(tokenizer_json))
    encoder = IncrementalEncoder(counting, ["<|im_start|>"], 1 << 20, cell_characters=1_000)
    turns = [f"<|im_start|>{number} {'some words ' * 30}<|im_end|>\n" for number in range(100)]
    spent = []
    for count in (96, 97, 98, 99):
        before = counting.characters
        encoder.encode("".join(turns[:count]), special=False)
        spent.append(counting.characters - before)
    assert spent[0] == sum(map(len, turns[:96]))
    assert max(spent[1:]) < 3 * len(turns[0])
    assert encoder.begin("".join(turns)).unread < 1_000 + 3 * len(turns[0])


async def test_a_long_conversation_goes_on_without_a_thread(tmp_path: Path, tokenizer_json: str) -> None:
    """Its first turn is made in a thread; the next one, of which little is new, where it is asked for."""
    (tmp_path / "tokenizer.json").write_text(tokenizer_json)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES["plain"])
    prompts = PromptEncoder({"m": str(tmp_path)}, deadline_s=60, offload_bytes_min=20_000)
    assert await prompts.prepare("m")
    first, second = talk(60), talk(61)
    assert await prompts.encode(first, "m", "vllm", new_bytes=100_000) is not None
    wanted = await prompts.encode(second, "m", "vllm")
    prompts.close()  # a job would fail from now on
    assert await prompts.encode(second, "m", "vllm", new_bytes=1_000) == wanted
    with pytest.raises(RuntimeError):
        await prompts.encode(second, "m", "vllm", new_bytes=100_000)
    with pytest.raises(RuntimeError):  # what is put around a text is not remembered with it
        await prompts.encode(replace(second, add_special_tokens=True), "m", "vllm", new_bytes=1_000)
    with pytest.raises(RuntimeError):
        await prompts.encode(talk(61, "other words, and more of them "), "m", "vllm", new_bytes=1_000)

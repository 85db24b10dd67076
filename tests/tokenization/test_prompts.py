"""Prompts to token ids: right, remembered, in time, and never an exception."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from array import array
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from router.core.types.requests import TemplateInput  # noqa: E402
from router.tokenization import tokenizers as own  # noqa: E402
from router.tokenization.encoder import PromptEncoder  # noqa: E402
from router.tokenization.probes import PROMPTS  # noqa: E402
from tests.tokenization.conftest import SPECIAL  # noqa: E402

CHATML = (
    "{{ bos_token }}{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HI = TemplateInput(messages=[{"role": "user", "content": "Hello, world"}])
SECRET = "a word that must not be logged"
Ask = Callable[[str, dict[str, Any]], Any]


@pytest.fixture
def model(tmp_path: Path, tokenizer_json: str) -> Path:
    """A model's folder."""
    return folder(tmp_path / "model", tokenizer_json)


def folder(path: Path, tokenizer_json: str, template: str = CHATML, **config: object) -> Path:
    """Write one."""
    path.mkdir()
    (path / "tokenizer.json").write_text(tokenizer_json)
    (path / "chat_template.jinja").write_text(template)
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<|bos|>"}, **config}))
    return path


@pytest.fixture
async def prompts(model: Path) -> AsyncIterator[PromptEncoder]:
    """With the model `m`, loaded."""
    made = PromptEncoder({"m": str(model)}, deadline_s=20)
    assert await made.prepare("m")
    yield made
    made.close()


def ids_of(tokenizer_json: str, text: str, *, special: bool = False) -> bytes:
    """By the library that models are published with."""
    made = tokenizers.Tokenizer.from_str(tokenizer_json)
    return array("I", made.encode(text, add_special_tokens=special).ids).tobytes()


async def test_a_chat_becomes_the_ids_of_its_rendered_text(prompts: PromptEncoder, tokenizer_json: str) -> None:
    """Template and special tokens come from the model's folder; the ids are those of `tokenizers`."""
    text = "<|bos|><|im_start|>user\nHello, world<|im_end|>\n<|im_start|>assistant\n"
    assert await prompts.encode(HI, "m", "vllm") == ids_of(tokenizer_json, text)


async def test_texts_and_ids_need_no_template(prompts: PromptEncoder, tokenizer_json: str) -> None:
    """A completion's text is encoded with or without BOS as asked; ids are taken as they are."""
    for special in (False, True):
        given = TemplateInput(text="once <|im_end|> upon", add_special_tokens=special)
        assert await prompts.encode(given, "m", "vllm") == ids_of(tokenizer_json, given.text or "", special=special)
    assert await prompts.encode(TemplateInput(ids=b"\1\0\0\0"), "unknown", "vllm") == b"\1\0\0\0"


async def test_sglang_puts_its_special_tokens_around_every_text(prompts: PromptEncoder, tokenizer_json: str) -> None:
    """Around texts whatever is asked, around chats never."""
    given = TemplateInput(text="once", add_special_tokens=False)
    assert await prompts.encode(given, "m", "sglang") == ids_of(tokenizer_json, "once", special=True)
    chat = TemplateInput(messages=HI.messages, add_special_tokens=True)
    assert await prompts.encode(chat, "m", "sglang") == await prompts.encode(HI, "m", "sglang")


async def test_every_probing_prompt_can_be_made(prompts: PromptEncoder) -> None:
    """The check at start compares each of them."""
    for name, given in PROMPTS.items():
        assert await prompts.encode(given, "m", "vllm"), name


async def test_sglang_continues_a_message_behind_the_rendered_text(prompts: PromptEncoder, tokenizer_json: str) -> None:
    """The assistant's beginning is encoded by itself, without BOS."""
    said = {"role": "assistant", "content": "I am"}
    given = TemplateInput(messages=[*(HI.messages or []), said], continue_final_message=True)
    hi = await prompts.encode(HI, "m", "sglang")
    assert hi is not None
    assert await prompts.encode(given, "m", "sglang") == hi + ids_of(tokenizer_json, "I am")


@pytest.mark.parametrize("library", ["fastokens", "tokenizers"])
def test_what_is_remembered_is_what_would_be_encoded(tokenizer_json: str, library: str) -> None:
    """Conversations that grow, fork and repeat have the ids of a tokenizer without memory, however little it may
    remember."""
    whole = own.HfTokenizer(tokenizer_json)
    random_ = random.Random(5)
    words = [*SPECIAL, " ", "  ", "\n", "a", "the", " é", "漢", "👩‍👩‍👧", "12", "<|im", "_end|>", "'s"]
    for bytes_max in (0, 2_000, 1 << 20):
        if library == "fastokens":
            pytest.importorskip("fastokens")
            encoder: own.Encoder = own.FastTokenizer(tokenizer_json, bytes_max)
        else:
            encoder = own.SegmentedTokenizer(whole, bytes_max)
        texts = [""]
        for _ in range(200):
            texts.append(random_.choice(texts[-10:]) + "".join(random_.choices(words, k=9)))
            special = random_.random() < 0.2
            assert encoder.encode(texts[-1], special=special) == whole.encode(texts[-1], special=special)


def test_a_tokenizer_whose_parts_are_not_the_whole_is_not_cut(tokenizer_json: str) -> None:
    """An added token that swallows the white space in front of it makes segments wrong: found when it is loaded."""
    changed = json.loads(tokenizer_json)
    changed["added_tokens"][2]["lstrip"] = True
    whole = own.HfTokenizer(json.dumps(changed))
    encoder = own.load(json.dumps(changed), 1 << 20)
    for text in ("x   <|im_end|>", *own.PROBES):
        assert encoder.encode(text, special=False) == whole.encode(text, special=False)


def test_a_model_that_fastokens_gets_wrong_is_left_to_tokenizers(
    tokenizer_json: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One probing text with other ids, or a refusal, is enough."""
    pytest.importorskip("fastokens")
    assert own.load(tokenizer_json, 1 << 20).name == "fastokens"
    right = own.FastTokenizer.encode
    monkeypatch.setattr(own.FastTokenizer, "encode", lambda self, text, special: right(self, text, special=special)[4:])
    assert own.load(tokenizer_json, 1 << 20).name == "tokenizers, by segments"


def test_memory_is_bounded() -> None:
    """The least recently used goes first."""
    memory = own.SegmentCache(3 * (own.SEGMENT_OVERHEAD_BYTES + 10))
    for key in (b"a", b"b", b"c"):
        memory.put(key, bytes(10))
    assert memory.get(b"a") is not None
    memory.put(b"d", bytes(10))
    memory.put(b"e", bytes(1_000_000))
    assert [key for key in (b"a", b"b", b"c", b"d", b"e") if memory.get(key)] == [b"a", b"c", b"d"]
    assert memory.size_bytes == 3 * (own.SEGMENT_OVERHEAD_BYTES + 10)


async def test_a_late_prompt_is_placed_by_estimate_and_done_all_the_same(model: Path) -> None:
    """Past its deadline a prompt is None; the work is finished by a thread."""
    prompts = PromptEncoder({"m": str(model)}, deadline_s=0.0, offload_bytes_min=0, threads=1)
    assert await prompts.prepare("m")
    given = TemplateInput(messages=[{"role": "user", "content": "x" * 300_000}])
    assert await prompts.encode(given, "m", "vllm") is None
    assert prompts.counts()["late"] == 1
    await asyncio.get_running_loop().run_in_executor(prompts._threads, lambda: None)  # after it, in its only thread
    assert prompts.counts()["encoded"] == 1
    prompts.close()


async def test_a_tokenizer_that_is_still_being_read_makes_nobody_wait(model: Path) -> None:
    """A request that comes first is placed by estimate."""
    prompts = PromptEncoder({"": str(model)}, deadline_s=0.0)
    assert await prompts.encode(HI, "any model", "vllm") is None
    assert await prompts.prepare("any model")
    assert await prompts.encode(HI, "any model", "vllm") is not None
    prompts.close()


@pytest.mark.parametrize(
    "template", ["{{ raise_exception(messages[0].content) }}", "{{ messages[0].nothing.at_all }}", "{{ 1 / 0 }}"]
)
async def test_a_template_that_fails_is_none_and_logged_once_without_the_prompt(
    tmp_path: Path, tokenizer_json: str, template: str, caplog: pytest.LogCaptureFixture
) -> None:
    """However often it fails, and whatever it says of the prompt."""
    prompts = PromptEncoder({"m": str(folder(tmp_path / "bad", tokenizer_json, template))}, deadline_s=20)
    given = TemplateInput(messages=[{"role": "user", "content": SECRET}])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert await prompts.encode(given, "m", "vllm") is None
    assert prompts.counts() == {"failed": 3}
    assert len(caplog.records) == 1
    assert SECRET not in caplog.text
    prompts.close()


@pytest.mark.parametrize(
    "missing", ["no folder", "no template", "no template for it", "broken JSON", "broken template"]
)
async def test_what_is_missing_costs_the_exactness_only(tmp_path: Path, tokenizer_json: str, missing: str) -> None:
    """A folder that is not there, or is broken, makes prompts unknown, not requests fail."""
    path = folder(tmp_path / "model", tokenizer_json, "{% if %}" if missing == "broken template" else CHATML)
    if missing == "no folder":
        path = tmp_path / "nowhere"
    elif missing == "no template":
        (path / "chat_template.jinja").unlink()
    elif missing == "no template for it":
        (path / "config.json").write_text('{"model_type": "gpt_oss"}')
    elif missing == "broken JSON":
        (path / "tokenizer.json").write_text("{")
    prompts = PromptEncoder({"m": str(path)}, deadline_s=20)
    assert await prompts.encode(HI, "m", "vllm") is None
    assert await prompts.encode(HI, "another", "vllm") is None
    assert prompts.counts() == {"failed": 1, "unknown": 1}
    prompts.close()


async def test_a_lone_surrogate_is_none(prompts: PromptEncoder) -> None:
    """No tokenizer takes what is not Unicode."""
    assert await prompts.encode(TemplateInput(text="\ud800"), "m", "vllm") is None


def answering(prompts: PromptEncoder, asked: list[dict[str, Any]]) -> Ask:
    """A replica's /tokenize, as another instance of the same code would answer."""

    async def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert path == "/tokenize"
        asked.append(body)
        await asyncio.sleep(0)
        given = TemplateInput(
            messages=body.get("messages"),
            text=body.get("prompt"),
            tools=body.get("tools"),
            kwargs=body.get("chat_template_kwargs") or {},
            add_special_tokens=body["add_special_tokens"],
            add_generation_prompt=body.get("add_generation_prompt", True),
            continue_final_message=body.get("continue_final_message", False),
        )
        ids = await prompts.encode(given, "m", "vllm")
        return {"tokens": list(array("I", ids))} if ids else {"error": {"message": SECRET}}

    return ask


async def test_without_a_tokenizer_the_replica_is_asked_once(prompts: PromptEncoder) -> None:
    """The same prompt at the same time is one question, and none later."""
    asked: list[dict[str, Any]] = []
    asking = PromptEncoder({}, deadline_s=20)
    ask = answering(prompts, asked)
    both = await asyncio.gather(*(asking.encode(HI, "m", "vllm", ask) for _ in range(2)))
    assert [*both, await asking.encode(HI, "m", "vllm", ask)] == [await prompts.encode(HI, "m", "vllm")] * 3
    assert len(asked) == 1
    asking.close()


@pytest.mark.parametrize("config", [{}, {"config.json": '{"model_type": "deepseek_v32"}'}, {"tekken.json": "{}"}])
async def test_chats_of_a_model_without_a_chat_template_are_asked_of_the_replica(
    prompts: PromptEncoder, tmp_path: Path, tokenizer_json: str, config: dict[str, str]
) -> None:
    """Texts are made here, and compared; nobody finds a difference where nothing is made."""
    path = folder(tmp_path / "other", tokenizer_json)
    if not config:
        (path / "chat_template.jinja").unlink()
    for name, text in config.items():
        (path / name).write_text(text)
    chatless, asked = PromptEncoder({"m": str(path)}, deadline_s=20), list[dict[str, Any]]()
    ask = answering(prompts, asked)
    why = await chatless.chatless("m")
    assert ("no chat template" in why) is (not config)
    assert why
    assert await chatless.verify("m", "vllm", ask) is None
    assert not any("messages" in body for body in asked)
    asked.clear()
    assert await chatless.encode(HI, "m", "vllm", ask) == await prompts.encode(HI, "m", "vllm")
    text = TemplateInput(text="a text", add_special_tokens=True)
    assert await chatless.encode(text, "m", "vllm", ask) == await prompts.encode(text, "m", "vllm")
    assert len(asked) == 1
    assert await prompts.chatless("m") == await chatless.chatless("another") == ""
    chatless.close()


async def test_a_replica_that_is_slow_refuses_or_is_gone_costs_the_exactness_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Late, at most so many at a time, refused, unreachable, or answering nonsense: None."""
    hold = asyncio.Event()

    async def slow(path: str, body: dict[str, Any]) -> dict[str, Any]:
        await hold.wait()
        return {"tokens": [7]}

    async def gone(path: str, body: dict[str, Any]) -> dict[str, Any]:
        raise OSError(SECRET)

    async def nonsense(path: str, body: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": ["x", -1], "error": SECRET}

    asking = PromptEncoder({}, deadline_s=0.0, asks_max=2)
    texts = [TemplateInput(text=f"text {number}") for number in range(5)]
    assert [await asking.encode(given, "m", "vllm", slow) for given in texts[:3]] == [None] * 3
    assert asking.counts()["late"] == 3
    hold.set()
    while asking.counts()["asked"] < 2:
        await asyncio.sleep(0)
    assert await asking.encode(texts[0], "m", "vllm", slow) == b"\7\0\0\0"
    for ask in (gone, nonsense):
        await asking.encode(texts[3], "m", "vllm", ask)
        while asking._asking:
            await asyncio.sleep(0)
    assert asking.counts()["failed"] == 2
    assert SECRET not in caplog.text
    asking.close()


async def test_verifying_names_the_first_token_that_differs(
    prompts: PromptEncoder, model: Path, tmp_path: Path, tokenizer_json: str
) -> None:
    """The same files agree; another template given to the engine by a flag is found, as is a replica that is gone."""
    ask = answering(prompts, [])
    assert await prompts.verify("m", "vllm", ask) is None
    other = PromptEncoder(
        {"m": str(folder(tmp_path / "other", tokenizer_json, CHATML.replace("m.role", "'the ' + m.role")))}
    )
    line = await other.verify("m", "vllm", ask)
    assert line is not None
    assert line.startswith("prompt 'one message' differs at token 2: ")
    other.close()

    async def gone(path: str, body: dict[str, Any]) -> dict[str, Any]:
        raise OSError

    assert await prompts.verify("m", "vllm", gone) == "the replica does not answer /tokenize: network error"
    assert prompts.counts() != {}


def test_templates_are_found_where_models_keep_them(tmp_path: Path, tokenizer_json: str) -> None:
    """In a file, in the configuration, or several by name."""
    path = folder(tmp_path / "model", tokenizer_json, chat_template=[{"name": "tool_use", "template": "T"}])
    assert own.ModelFolder(path).templates() == {"tool_use": "T", "default": CHATML}
    (path / "chat_template.jinja").unlink()
    (path / "tokenizer_config.json").write_text('{"chat_template": "C", "eos_token": "</s>", "unk_token": null}')
    assert own.ModelFolder(path).templates() == {"default": "C"}
    assert own.ModelFolder(path / "tokenizer.json").special() == {"eos_token": "</s>"}

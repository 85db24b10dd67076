"""Input of the cost benchmark: a tokenizer of real size, text that tokenizes like code, and conversations.

No model is fetched. A byte-level BPE of VOCABULARY entries is trained on the standard library's sources. That takes
half a minute once, and the result is kept in the temporary folder, together with its template, which is ChatML with
tools. The cost of an encoder depends on how text splits into words and how deep merges go. Code costs more than prose
in both respects.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

MODEL = "cost"
VOCABULARY = 32_768
CORPUS_BYTES_MAX = 16_000_000
TEXT_BYTES_MAX = 8_000_000
RECIPE = 1
START, END, STOP = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
TEMPLATE = """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% else %}{% set system = '' %}{% endif %}
{%- if tools %}
    {{- '<|im_start|>system\\n' + system + '\\n\\n# Tools\\n\\nYou may call these functions:\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif system %}
    {{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{ '\\n' + message.content }}{% endif %}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{number}",
            "description": "Reads a part of a file and returns its lines, numbered from the first one asked for.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "first": {"type": "integer"}, "lines": {"type": "integer"}},
                "required": ["path"],
            },
        },
    }
    for number in range(8)
]


def sources(bytes_max: int) -> Iterator[str]:
    """Yield the standard library's modules in the order of their names, up to `bytes_max` bytes."""
    taken = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        taken += len(text.encode())
        if taken > bytes_max:
            return
        yield text


def tokenizer_folder(vocabulary: int = VOCABULARY, corpus_bytes_max: int = CORPUS_BYTES_MAX) -> Path:
    """Return a folder with a tokenizer and a template; trained by the first call, reused by later ones."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}.{sys.version_info[2]}"
    name = f"warmroute-cost-{os.getuid()}-{RECIPE}-{vocabulary}-{corpus_bytes_max}-{version}"
    folder = Path(tempfile.gettempdir()) / name
    if not (folder / "tokenizer.json").exists():
        made = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        _train(made, vocabulary, corpus_bytes_max)
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(made)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} is owned by another user")
    return folder


def _train(folder: Path, vocabulary: int, corpus_bytes_max: int) -> None:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    # The words into which GPT-4's family of tokenizers splits text: digits by threes, and spaces that stay with words.
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(sources(corpus_bytes_max), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (STOP, START, END)])
    config = {"chat_template": TEMPLATE, "eos_token": END, "pad_token": STOP, "bos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))


@cache
def _lines() -> list[str]:
    return "".join(sources(TEXT_BYTES_MAX)).splitlines(keepends=True)


def body_of(messages: list[dict[str, Any]], *, tools: bool) -> bytes:
    """Return the body of a chat request as an agent sends it."""
    body = {"model": MODEL, "messages": messages, "stream": True, "max_tokens": 512}
    return json.dumps(body | ({"tools": TOOLS} if tools else {}), ensure_ascii=False).encode()


class ConversationGenerator:
    """Conversations of given lengths, the same for the same seed; no two share more than their system prompt."""

    def __init__(self, bytes_per_token: float, seed: int = 1) -> None:
        self.bytes_per_token = bytes_per_token
        self._seed = seed
        self._lines = _lines()

    def text(self, name: str, tokens: int) -> str:
        """Return about `tokens` tokens of source code, a few lines from each of many places."""
        rng = random.Random(f"{self._seed} {name}")
        wanted, parts, size = int(tokens * self.bytes_per_token), [], 0
        while size < wanted:
            first = rng.randrange(len(self._lines))
            part = "".join(self._lines[first : first + 12])
            parts.append(part)
            size += len(part)
        return "".join(parts)[:wanted]

    def messages(self, name: str, first: int, count: int, tokens_each: int) -> list[dict[str, Any]]:
        """Return messages `first` to `first + count` of a conversation; the roles alternate, a user first."""
        return [
            {"role": ("user", "assistant")[n % 2], "content": self.text(f"{name} {n}", tokens_each)}
            for n in range(first, first + count)
        ]

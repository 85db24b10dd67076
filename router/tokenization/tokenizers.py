"""Tokenizers of a model's folder: text to token ids, as uint32 little-endian, the bytes from which block keys are made.

`fastokens` encodes 100,000 tokens in milliseconds, `tokenizers` in hundreds of milliseconds. `fastokens` is used if it
accepts the model and agrees with `tokenizers` on probing texts; otherwise `tokenizers` is used.

A conversation grows at its end, and agents repeat long beginnings. Added tokens (`<|im_end|>`) cut a text into segments
that a byte-pair encoder never looks across, so ids are remembered per segment. Turn n+1 then costs only its new part,
and forks and shared system prompts are found as well. For `tokenizers` this module does it, if the probing texts show
that the ids of the parts are those of the whole. `fastokens` does it itself. Its memory is off if beginnings of texts
are remembered (incremental.py), because it encodes a segment in only twice the time that remembering it takes.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import msgspec
from xxhash import xxh3_128_digest

from router.config.files import expand_path
from router.tokenization.optional_tokenizers import MissingExtra, library

# Models with chats that vLLM 0.32 renders by its own code (renderers/registry.py, online_renderer.py).
OWN_RENDERERS = frozenset(("gpt_oss", "deepseek_v32", "deepseek_v4", "kimi_k3", "inkling", "cohere2_moe"))
SEGMENT_OVERHEAD_BYTES = 200  # CPython's cost of a remembered segment: key, entry and place in the order
# Kinds of text on which encoders are known to differ: spaces, digits, scripts, combining marks and look-alikes.
PROBES = (
    "",
    "Hello, world! It's 2024-11-05, 10:30pm; pi=3.14159265358979",
    "  leading, trailing  \n\n\n\ttabs\t\t and \r\n line ends \n ",
    "def f(x):\n    return {k: v for k, v in x.items() if v != 0x1F}\n\n\n        # deep\n",
    "naïve café Ünïcödé e\u0301 \u212b \ufb01 ½ ² ⅷ",
    "漢字かな交じり文、한국어 텍스트, русский, العربية, हिन्दी, ไทย",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪 \u200b\u200d\ufeff",
    "<s> </s> <|im_start|>user <|im_end|> <|endoftext|> [INST] <unk> <pad> <|eot_id|>",
    "a" * 300 + "1234567890" * 30 + " " * 100 + "!" * 50,
    "https://example.org/a?b=c&d=%20#e {\"json\": [1, 2.5e-3, null, true]} \\n \\u00e9 'll 're 'VE",
)


class CannotLoad(ValueError):
    """Raised if there is no usable tokenizer, for the reason in the message."""


class Encoder(Protocol):
    """Turns text into ids, as uint32 little-endian. Safe in several threads."""

    name: str

    def encode(self, text: str, *, special: bool) -> bytes:
        """Return the ids of a text; with `special`, including those that the tokenizer puts around any text, such as
        BOS."""


def load(json_text: str, cache_bytes_max: int) -> Encoder:
    """Return the fastest encoder that is correct. Raises CannotLoad, and MissingExtra if neither library is
    installed."""
    try:
        slow = HfTokenizer(json_text)
    except MissingExtra:
        return FastTokenizer(json_text, cache_bytes_max)  # without `tokenizers` no comparison is possible
    texts = probes(slow.added)
    try:
        fast = FastTokenizer(json_text, cache_bytes_max)
        if _agree(fast, slow, texts):
            return fast
    except (CannotLoad, MissingExtra, AttributeError):  # AttributeError: fastokens is too old
        pass
    parts = SegmentedTokenizer(slow, cache_bytes_max)
    return parts if _agree(parts, slow, texts) and _agree(parts, slow, texts) else slow


def probes(added: Iterable[str]) -> list[str]:
    """Return texts to compare encoders on: each separately, and all around some of the added tokens."""
    some = sorted(added, key=len)[:40]
    joints = [f"x {token}{text[:40]}  {token} y" for token, text in zip(some, PROBES * 4, strict=False)]
    chat = "".join(f"{token}{text}{token}\n{text}" for token, text in zip(some or [""], PROBES, strict=False))
    return [*PROBES, *joints, chat, "".join(PROBES)]


def _agree(one: Encoder, other: Encoder, texts: Iterable[str]) -> bool:
    """True if two encoders agree. Each text is encoded twice, so that remembered ids are compared as well."""
    return all(
        one.encode(text, special=special) == one.encode(text, special=special) == other.encode(text, special=special)
        for text in texts
        for special in (False, True)
    )


class FastTokenizer:
    """The `fastokens` library, with its own memory of segments."""

    name = "fastokens"

    def __init__(self, json_text: str, cache_bytes_max: int) -> None:
        try:
            self._tokenizer = library("fastokens").Tokenizer.from_json_str(json_text)
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            self._tokenizer.enable_segment_cache(cache_bytes_max)
        except MissingExtra:
            raise
        except Exception as error:  # any error means that fastokens does not accept this model
            raise CannotLoad(f"fastokens: {error}") from error

    def forget_segments(self) -> None:
        """Stop remembering segments."""
        self._tokenizer.enable_segment_cache(0)

    def encode(self, text: str, *, special: bool) -> bytes:
        """Encode one text, as a batch: that form makes no Python object per id."""
        ids: bytes = self._tokenizer.encode_batch_flat([text], add_special_tokens=special)[0]
        return ids


class HfTokenizer:
    """The `tokenizers` library, without a memory."""

    name = "tokenizers"

    def __init__(self, json_text: str) -> None:
        """Raises CannotLoad if the JSON is no tokenizer."""
        module = library("tokenizers")
        try:
            self._tokenizer = module.Tokenizer.from_str(json_text)
        except Exception as error:  # the library raises plain Exceptions
            raise CannotLoad(f"tokenizers: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.added: list[str] = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]

    def encode(self, text: str, *, special: bool) -> bytes:
        """Encode the whole text anew."""
        return array("I", self._tokenizer.encode(text, add_special_tokens=special).ids).tobytes()


class SegmentedTokenizer:
    """The `tokenizers` library with a memory of the segments between added tokens."""

    name = "tokenizers, by segments"

    def __init__(self, whole: HfTokenizer, cache_bytes_max: int) -> None:
        self._whole = whole
        self._memory = SegmentCache(cache_bytes_max)
        longest_first = sorted(whole.added, key=len, reverse=True)
        self._cut = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def encode(self, text: str, *, special: bool) -> bytes:
        """Encode segment by segment, each with the added token in front of it."""
        if special or self._cut is None:
            return self._whole.encode(text, special=special)
        ends = [found.start() for found in self._cut.finditer(text)]
        starts = [0, *ends]
        return b"".join(self._segment(text[start:end]) for start, end in zip(starts, [*ends, len(text)], strict=True))

    def _segment(self, text: str) -> bytes:
        key = xxh3_128_digest(text.encode())
        known = self._memory.get(key)
        if known is None:
            known = self._whole.encode(text, special=False)
            self._memory.put(key, known)
        return known


class SegmentCache:
    """Bytes by key, bounded in bytes; the least recently used are dropped. Threads may share it."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self.size_bytes = 0

    def get(self, key: bytes) -> bytes | None:
        """Return the value of the key; None if it was dropped."""
        with self._lock:
            found = self._entries.get(key)
            if found is not None:
                self._entries.move_to_end(key)
            return found

    def replace(self, key: bytes, value: bytes) -> None:
        """Store a value in place of the one that the key has."""
        with self._lock:
            gone = self._entries.pop(key, None)
            if gone is not None:
                self.size_bytes -= len(gone) + SEGMENT_OVERHEAD_BYTES
        self.put(key, value)

    def put(self, key: bytes, value: bytes) -> None:
        """Store a value, and drop others that no longer fit."""
        size_bytes = len(value) + SEGMENT_OVERHEAD_BYTES
        with self._lock:
            if size_bytes > self._bytes_max or key in self._entries:
                return
            self._entries[key] = value
            self.size_bytes += size_bytes
            while self.size_bytes > self._bytes_max:
                _, gone = self._entries.popitem(last=False)
                self.size_bytes -= len(gone) + SEGMENT_OVERHEAD_BYTES


class ModelFolder:
    """Files of a model that define how prompts are made."""

    def __init__(self, path: Path) -> None:
        """`path` is a folder or a `tokenizer.json`. Raises CannotLoad if there is no tokenizer."""
        file = path if path.is_file() else path / "tokenizer.json"
        if not file.is_file():
            raise CannotLoad(f"{path} has no tokenizer.json")
        self.path = file.parent
        self.tokenizer_json = _text(file)
        self._config = self._read("tokenizer_config.json")

    def templates(self) -> dict[str, str]:
        """Return chat templates by name; `default` is the usual one. As in transformers, a file takes precedence over
        the configuration. Raises CannotLoad."""
        given = self._config.get("chat_template") or self._read("chat_template.json").get("chat_template")
        found: dict[str, str] = {}
        if isinstance(given, str):
            found = {"default": given}
        elif isinstance(given, list):
            found = dict(_parse_named_template(each) for each in given)
        more = sorted((self.path / "additional_chat_templates").glob("*.jinja"))
        found |= {file.stem: _text(file) for file in more}
        default = self.path / "chat_template.jinja"
        return found | ({"default": _text(default)} if default.is_file() else {})

    def special(self) -> dict[str, Any]:
        """Return special tokens by name, as templates see them, such as `bos_token`."""
        merged = {**self._read("special_tokens_map.json"), **self._config}
        named = {name: _content(value) for name, value in merged.items() if name.endswith("_token")}
        return {name: value for name, value in named.items() if value is not None}

    def explain_template_unused(self) -> str:
        """Return the reason that engines do not use the chat template of this model; "" if they do."""
        kind = str(self._read("config.json").get("model_type", ""))
        if kind in OWN_RENDERERS:
            return f"engines render {kind} without a template"
        return "engines use mistral_common for it" if (self.path / "tekken.json").is_file() else ""

    def _read(self, name: str) -> dict[str, Any]:
        try:
            return msgspec.json.decode((self.path / name).read_bytes(), type=dict[str, Any])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise CannotLoad(f"{name} cannot be decoded: {error}") from error


def _text(file: Path) -> str:
    """Return the text of a file. Raises CannotLoad."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise CannotLoad(f"{file.name} cannot be decoded: {error}") from error


def _parse_named_template(given: object) -> tuple[str, str]:
    """Return name and source of one of several templates. Raises CannotLoad."""
    if isinstance(given, dict):
        name, source = given.get("name"), given.get("template")
        if isinstance(name, str) and isinstance(source, str):
            return name, source
    raise CannotLoad("a chat template in the configuration has no name or no text")


def _content(token: object) -> str | None:
    """Return the text of a special token, which may be given as an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


HUB_FILES = (
    "tokenizer.json",
    "*config.json",
    "special_tokens_map.json",
    "*.jinja",
    "chat_template.json",
    "tekken.json",
)


def download(source: str) -> Path:
    """Return a local path unchanged. A name at the model hub (`NAME@REVISION`, or `NAME` for its newest) is downloaded
    through huggingface_hub, which has its own cache. Raises CannotLoad."""
    try:
        path = expand_path(source)
        if path.exists():
            return path
    except OSError as error:  # no such user, or a name that is too long for any file
        raise CannotLoad(f"{source}: {error.strerror}") from error
    try:
        hub = library("huggingface_hub")
    except MissingExtra:
        raise CannotLoad(f"{source} is not a local folder, and huggingface_hub is not installed") from None
    try:
        name, _, revision = source.partition("@")
        return Path(hub.snapshot_download(name, revision=revision or None, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # any kind of error: no such model, no network, no permission
        raise CannotLoad(f"{source} is not a local folder and cannot be downloaded: {type(error).__name__}") from error

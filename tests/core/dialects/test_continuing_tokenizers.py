"""Where a stream is continued, held against the detokenizer that vLLM uses, for the two families of tokenizers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

tokenizers = pytest.importorskip("tokenizers")

CORPUS = ["the cat sat on the mat", "漢字 and 🙂🚀 and é", '{"a": [1, 2]}\n\n\tfor x in y:'] * 3


def byte_level() -> Any:
    """As GPT-2's, Llama 3's and Qwen's: every token is bytes."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    return made


def byte_fallback() -> Any:
    """As Llama 2's and Gemma's: words with their blank before them, and single bytes for what is in none."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", "\u2581the", "\u2581cat", "s", "at", "é", "\u2581\u2581", "!", "\n"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    decoders = tokenizers.decoders
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def spoken(tokenizer: Any, prompt: list[int], ids: list[int]) -> list[str]:
    """The text that comes with each token, as vLLM's FastIncrementalDetokenizer makes it."""
    stream = tokenizers.decoders.DecodeStream(ids=prompt, skip_special_tokens=True)
    return [stream.step(tokenizer, id_) or "" for id_ in ids]


def cut_characters(tokenizer: Any, rng: random.Random) -> list[int]:
    """Ids of whole tokens, and of characters whose bytes are a token each."""
    size, ids = tokenizer.get_vocab_size(), list[int]()
    spelled = byte_ids(tokenizer)
    while len(ids) < 24:
        if rng.random() < 0.5:
            ids += [spelled[byte] for byte in rng.choice("é漢🙂🚀").encode()]
        else:
            whole = rng.randrange(size)
            ids += [whole] if "\ufffd" not in tokenizer.decode([whole]) else []
    return ids


def byte_ids(tokenizer: Any) -> list[int]:
    """The id of each byte."""
    if (first := tokenizer.token_to_id("<0x00>")) is not None:
        return [first + byte for byte in range(256)]
    alike = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's table: others are moved behind 255
    signs = {byte: chr(byte) for byte in alike}
    signs |= {byte: chr(256 + n) for n, byte in enumerate(each for each in range(256) if each not in signs)}
    return [tokenizer.token_to_id(signs[byte]) for byte in range(256)]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_points(make: Callable[[], Any]) -> None:
    """Behind a token that brought text another detokenizer, which has all before it as its prompt, says the very text
    that the first one goes on with, however characters are cut. Behind half a character it need not."""
    tokenizer, rng = make(), random.Random(7)
    points = elsewhere = 0
    for _ in range(60):
        prompt, ids = cut_characters(tokenizer, rng), cut_characters(tokenizer, rng)
        whole = spoken(tokenizer, prompt, ids)
        for at in range(1, len(ids)):
            rest = "".join(spoken(tokenizer, prompt + ids[:at], ids[at:]))
            same = rest == "".join(whole[at:])
            if whole[at - 1]:
                assert same, (ids, at)
                points += 1
            else:
                elsewhere += not same
    assert points > 200
    assert elsewhere

"""A small tokenizer for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

SPECIAL = ["<|bos|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="session")
def tokenizer_json() -> str:
    """A small byte-level BPE, as most models have one, that puts BOS around a text."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([Path(__file__).with_name("test_prompts.py").read_text()], trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|bos|> $A", pair=None, special_tokens=[("<|bos|>", 0)]
    )
    return str(made.to_str())

"""Make tiny chat models on this machine, without a hub: `python tiny_model.py DIR[=SPREAD] ...` in `.venv-engines`.

Theory: what a router can see of an engine does not depend on what the model says. So random weights do, as
long as the tokenizer is a real byte-level BPE (trained on the standard library's sources) and the template
a real one: then bytes per token, block boundaries and cached counts behave as in production. Same Python,
same bytes: the corpus is that Python's standard library, the seed is fixed, and the training is
deterministic. HIDDEN and LAYERS in the environment make a larger, slower one (512 and 12: 1,900 tokens take
1.3 s of one core). SPREAD is the standard deviation of the weights: with the usual 0.02 and one matrix for both
embeddings the model says one word again and again, whatever it was asked; with 0.2 and two matrices each answer
depends on its whole prompt, so that a test can tell by the answer whether the model has read the prompt's KV blocks.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VOCABULARY = 4096
POSITIONS_MAX = 8192
CORPUS_BYTES_MAX = 8_000_000
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] or '' }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def corpus() -> Iterator[str]:
    """The standard library's top-level modules, in the order of their names, up to CORPUS_BYTES_MAX bytes."""
    taken = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        taken += len(text)
        if taken > CORPUS_BYTES_MAX:
            return
        yield text


def trained_tokenizer() -> Any:
    """The byte-level BPE, trained, with its template: a PreTrainedTokenizerFast."""
    # Found in .venv-engines only, where this file is run.
    from tokenizers import (  # type: ignore[import-not-found]
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        trainers,
    )
    from transformers import PreTrainedTokenizerFast  # type: ignore[import-not-found]

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[0],
        model_max_length=POSITIONS_MAX,
    )
    fast.chat_template = TEMPLATE
    return fast


def save_weights(folder: Path, hidden: int, layers: int, spread: float | None) -> None:
    """Random weights from a fixed seed, in bfloat16; `spread` is their standard deviation, None the usual one."""
    import torch  # type: ignore[import-not-found]
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 2,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=POSITIONS_MAX,
        tie_word_embeddings=spread is None,
        initializer_range=spread or 0.02,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def main() -> int:
    """Write a model into each DIR, its weights with the standard deviation SPREAD, and say its size."""
    tokenizer = trained_tokenizer()
    for word in sys.argv[1:]:
        name, _, spread = word.partition("=")
        folder = Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(folder)
        hidden, layers = int(os.environ.get("HIDDEN", "64")), int(os.environ.get("LAYERS", "2"))
        save_weights(folder, hidden, layers, float(spread) if spread else None)
        size_bytes = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{folder}: {size_bytes} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())

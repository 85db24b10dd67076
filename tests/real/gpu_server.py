"""One real vLLM replica on a GPU, with CPU memory behind it, serving a model without weights of its own.

Theory: what a router sees of an engine does not depend on what the model says, so weights are vLLM's dummies and only
the shape is real: it decides how many bytes a block has, and so what a load moves. The KV pool and the memory behind it
are made so small that both evict all the time. vLLM is the one of this very Python (`python -m pip install vllm`), and
several replicas share the GPU: each is told how much it may use, so that none measures what others leave.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.real.tiny_model import POSITIONS_MAX, VOCABULARY, trained_tokenizer
from tests.real.vllm_server import ENVIRONMENT, MODEL, Replica

BLOCK_TOKENS = 16
READY_TIMEOUT_S = 170.0
CPU_ONLY = ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS", "VLLM_ENABLE_V1_MULTIPROCESSING")


@dataclass(frozen=True)
class Shape:
    """The shape of a Llama, and the part of the GPU that it may use."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    between: int
    context: int
    gpu_share: float

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of keys and values, which are of bfloat16 and heads of 128."""
        return BLOCK_TOKENS * 2 * self.layers * self.kv_heads * 128 * 2


SMALL = Shape(hidden=1_024, layers=8, heads=8, kv_heads=8, between=2_048, context=4_096, gpu_share=0.06)
LARGE = Shape(hidden=4_096, layers=32, heads=32, kv_heads=8, between=14_336, context=20_000, gpu_share=0.4)


def lay_model(folder: Path, shape: Shape) -> Path:
    """A folder with the tokenizer of the tests and a configuration of this shape, made once."""
    if not (folder / "tokenizer.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        trained_tokenizer().save_pretrained(folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.between,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": max(POSITIONS_MAX, shape.context),
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


class GpuReplica(Replica):
    """A vLLM server that keeps in CPU memory what its GPU evicts."""

    homes = ("HF_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "VLLM_CACHE_ROOT")
    caches = ()

    def __init__(
        self, name: str, folder: Path, model: Path, shape: Shape, gpu_blocks: int, cpu_blocks: int, **extra: Any
    ) -> None:
        """`extra` is more of `kv_connector_extra_config`; events describe themselves unless it says otherwise."""
        super().__init__(name, folder, gpu_blocks)
        self.model, self.shape, self.cpu_blocks = model, shape, cpu_blocks
        sizes = {"cpu_bytes_to_use": cpu_blocks * shape.block_bytes, "self_describing_kv_events": True}
        self.extra = sizes | extra
        self.context = min(shape.context, (gpu_blocks - 2) * BLOCK_TOKENS)
        self.environment = {key: value for key, value in ENVIRONMENT.items() if key not in CPU_ONLY}
        # Of all that a text server needs, the one thing that wants FlashInfer where it is not installed.
        self.environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        if path := os.environ.get("PYTHONPATH"):
            self.environment["PYTHONPATH"] = path

    def command(self) -> list[str]:
        """The command line, as an operator would write it, but for weights, eager mode and sizes."""
        connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
        return [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(self.model), "--load-format", "dummy"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", MODEL),
            *("--dtype", "bfloat16", "--max-model-len", str(self.context), "--enforce-eager"),
            *("--max-num-seqs", "16", "--max-num-batched-tokens", str(max(2_048, self.context))),
            *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(self.kv_blocks)),
            *("--gpu-memory-utilization", str(self.shape.gpu_share)),
            *("--kv-cache-memory-bytes", str((self.kv_blocks + 1) * self.shape.block_bytes)),
            *("--enable-prefix-caching", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
            *("--kv-events-config", self.events_config(enable_kv_cache_events=True)),
            *("--kv-transfer-config", json.dumps(connector | {"kv_connector_extra_config": self.extra})),
        ]

    def wait_ready(self) -> float:
        """As `Replica.wait_ready`, with less patience."""
        return self.running().wait_ready(self.serving, READY_TIMEOUT_S)

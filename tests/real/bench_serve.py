"""vLLM's own load generator, `vllm bench serve`, against anything that answers `/v1/completions` as vLLM does.

Arrivals are Poisson at a given rate, so a slow router gets no fewer requests than a fast one. The generator draws the
prompts from a seed: the same seed gives every router the same prompts at the same moments.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.real.install import REPO, VENV, model_dir
from tests.real.vllm_server import ENVIRONMENT, MODEL

TIMEOUT_S = 600.0
PERCENTILES = "50,90,99"


@dataclass(frozen=True)
class Load:
    """A workload of the generator's data set `prefix_repetition`; lengths in tokens."""

    prefixes: int
    prefix_tokens: int
    suffix_tokens: int
    answer_tokens: int
    per_s: float
    requests: int

    def words(self) -> list[str]:
        """Its flags."""
        name = "--prefix-repetition"
        return [
            *("--dataset-name", "prefix_repetition", "--num-prompts", str(self.requests)),
            *("--request-rate", f"{self.per_s:g}", f"{name}-num-prefixes", str(self.prefixes)),
            *(f"{name}-prefix-len", str(self.prefix_tokens), f"{name}-suffix-len", str(self.suffix_tokens)),
            *(f"{name}-output-len", str(self.answer_tokens)),
        ]


@dataclass(frozen=True)
class Told:
    """What the generator told of one run. Times in seconds."""

    completed: int
    failed: int
    ttft_p50_s: float
    ttft_p90_s: float
    e2e_p90_s: float
    output_tokens_per_s: float
    answer_tokens: int


def bench(url: str, load: Load, seed: int, file: Path) -> Told:
    """Run it once; the document that it writes is kept in `file`. AssertionError with its last words if it fails."""
    command = [
        *(str(VENV / "bin" / "vllm"), "bench", "serve", "--backend", "openai", "--base-url", url),
        *("--model", MODEL, "--tokenizer", str(model_dir()), "--seed", str(seed), "--ignore-eos", *load.words()),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", PERCENTILES, "--disable-tqdm"),
        *("--save-result", "--result-dir", str(file.parent), "--result-filename", file.name),
    ]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    scratch = file.parent / "bench-home"
    scratch.mkdir(exist_ok=True)
    homes = {key: str(scratch) for key in ("HF_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "VLLM_CACHE_ROOT")}
    done = subprocess.run(
        command,
        cwd=REPO,
        env={**kept, **ENVIRONMENT, **homes},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, "\n".join(done.stdout.splitlines()[-40:])
    said: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return Told(
        said["completed"],
        said["failed"],
        said["p50_ttft_ms"] / 1e3,
        said["p90_ttft_ms"] / 1e3,
        said["p90_e2el_ms"] / 1e3,
        said["output_throughput"],
        said["total_output_tokens"],
    )

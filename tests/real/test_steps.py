"""The engine model's step times beside real vLLM on this CPU: half of a grid of bursts is foretold by the other half.

The model has twelve layers of 512, so that its steps take longer than the requests' way to them; its tokenizer is the
tiny model's. Times are CPU seconds of the process that computes, with one thread: what else the machine does counts
little.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from loadtest.kernels import steps_command
from loadtest.kernels.steps import ANSWER_TOKENS, GOAL, PROMPTS, STREAMS, cells_of
from tests.real.install import VENV, installed, model_dir
from tests.real.vllm_server import BLOCK_TOKENS, CONTEXT_TOKENS_MAX, MODEL, SEQUENCES_MAX, Replica, serving
from tests.support.figures import figure

HIDDEN, LAYERS = 512, 12
LAG_MS = 15.0  # of some 35 that the shortest prompt takes
REPEATS = int(os.environ.get("WARMROUTE_STEPS_REPEATS", "1"))
"""Bursts of each cell; `make evidence` has more, and the whole grid."""
GRID = ((64, 192, 448), (1, 2, 4, 8)) if REPEATS == 1 else (PROMPTS, STREAMS)
"""Tokens of a prompt, and prompts of a burst."""
WEIGHTS = (
    "from tiny_model import save_weights; import pathlib, sys; save_weights(pathlib.Path(sys.argv[1]), {}, {}, None)"
)
pytestmark = [pytest.mark.figures, pytest.mark.timeout(3_600.0)]


class LayeredReplica(Replica):
    """vLLM with the larger model."""

    # In 32 bits, because CPUs without instructions for bfloat16 compute that ten times as slowly.
    weights, dtype = "layered", "float32"


def make_weights() -> None:
    """The model's folder, unless it is there: the tiny model's tokenizer, and random weights."""
    folder = model_dir(name=LayeredReplica.weights)
    if (folder / "model.safetensors").exists():
        return
    shutil.copytree(model_dir(), folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    words = [str(VENV / "bin" / "python"), "-c", WEIGHTS.format(HIDDEN, LAYERS), str(folder)]
    subprocess.run(words, check=True, cwd=Path(__file__).parent, timeout=600.0)


@pytest.fixture
def replica(folder: Path, figures: Callable[[str], None]) -> Iterator[Replica]:
    """One replica of it."""
    if not installed():
        pytest.fail("vLLM is not installed: python -m tests.real.install", pytrace=False)
    make_weights()
    for (started,) in serving([LayeredReplica("layered", folder)], figures):
        yield started


def core_of(replica: Replica) -> int:
    """The process of the replica that computes, a child of the one that serves."""
    parent = replica.running().process.pid
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if "EngineCor" in (folder / "comm").read_text() and parent == int(
                (folder / "stat").read_text().rpartition(")")[2].split()[1]
            ):
                return int(folder.name)
    raise AssertionError(f"{replica.name} has no process that computes")


def test_half_of_a_grid_is_foretold(replica: Replica, folder: Path) -> None:
    """Every cell is measured and foretold; how far off the model is on the half that was not fitted is told."""
    file = folder / "steps.json"
    words = [replica.url, "--model", MODEL, "--json", str(file), "--repeats", str(REPEATS), "--lag-ms", str(LAG_MS)]
    words += ["--prompts", *map(str, GRID[0]), "--streams", *map(str, GRID[1])]
    words += ["--pid", str(core_of(replica)), "--block-tokens", str(BLOCK_TOKENS), "--sequences", str(SEQUENCES_MAX)]
    assert steps_command.main([*words, "--batched-tokens", str(CONTEXT_TOKENS_MAX)]) == 0
    document = json.loads(file.read_text())

    assert len(document["cells"]) == len(cells_of(*GRID, ANSWER_TOKENS))
    assert all(cell["ttft_s"] > 0 and cell["tpot_s"] > 0 for cell in document["cells"])
    for name in ("ttft", "tpot"):
        figure(
            f"model's step times beside vLLM's, {name}, relative error at most",
            GOAL,
            document["foretold"][f"{name}_most"],
        )

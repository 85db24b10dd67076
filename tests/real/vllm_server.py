"""One real vLLM replica on the CPU, bound to loopback, serving the tiny model.

Theory: flags and environment are those under which vLLM 0.32 on a CPU behaves, to a router, as it does on a
GPU. Blocks are of 32 tokens because CPU attention takes only multiples of 32; prompt token details are on
because usage says `cached_tokens` only then; KV events go to an ipc:// socket because vLLM connects,
instead of binding, to a plain tcp:// address. Nothing is fetched: hubs are offline and statistics off.
"""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from math import nan
from pathlib import Path
from typing import TypeVar

import pytest

from loadtest.common.processes import free_ports
from tests.real.install import REPO, VENV, caches, installed, model_dir
from tests.real.processes import Server

MODEL = "tiny"
BLOCK_TOKENS = 32
CONTEXT_TOKENS_MAX = 4096
KV_BLOCKS = 1024
SEQUENCES_MAX = 16
# Tokens of an answer that must come in many chunks: vLLM puts several into one if its API server waits for a core.
STREAM_TOKENS = 1_000
# A start is 19 s of CPU (measured), and two start at a time.
READY_TIMEOUT_S = 400.0  # a limit for what hangs; mostly 30 to 60, and 145 were seen
PROBE_TIMEOUT_S = 2.0

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # The engine's process computes itself, as it does on one GPU. On a CPU it has a worker process by default, to bind
    # that to cores, and the worker's imports are a quarter of a start's CPU.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_SERVER_DEV_MODE": "1",
    # By default 5 s: a machine that stands still for longer, as ones with two cores do under two engines, closes
    # connections with requests on them.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",
}


def get(url: str) -> tuple[int, str]:
    """Status and body of a GET; status 0 when nothing answers."""
    try:
        with urllib.request.urlopen(url, timeout=PROBE_TIMEOUT_S) as response:
            return int(response.status), response.read().decode()
    except urllib.error.HTTPError as answered:
        with answered:
            return answered.code, answered.read().decode()
    except OSError:
        return 0, ""


def sample(url: str, metric: str) -> float:
    """One sample of a /metrics page, summed over labels; 0 when it does not answer."""
    status, text = get(f"{url}/metrics")
    pattern = rf"^{re.escape(metric)}(?:\{{[^}}]*\}})? (\S+)$"
    return sum(float(value) for value in re.findall(pattern, text, re.MULTILINE)) if status == 200 else 0.0


AnyReplica = TypeVar("AnyReplica", bound="Replica")


class Replica:
    """A vLLM server that can be killed and started again on the same port."""

    environment = ENVIRONMENT
    weights, dtype = "tiny", "bfloat16"
    running_metric = "vllm:num_requests_running"
    core_name = "VLLM::EngineCor"
    """How names of processes that compute begin; Linux keeps 15 bytes of a name."""
    homes: tuple[str, ...] = ("HF_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
    """Variables with a folder of the server's own."""
    caches: tuple[str, ...] = ("VLLM_CACHE_ROOT",)
    """Variables with the folder that all servers have in common (install.py)."""

    def __init__(self, name: str, folder: Path, kv_blocks: int = KV_BLOCKS, buffer_steps: int | None = None) -> None:
        """`buffer_steps` is how many batches of events a replay holds; None: vLLM's own 10,000."""
        self.name = name
        self.kv_blocks = kv_blocks
        self.buffer_steps = buffer_steps
        self.folder = folder
        self.port, self.replay_port = free_ports(2)
        self.url = f"http://127.0.0.1:{self.port}"
        self.events_endpoint = f"ipc://{folder}/{name}.kv"
        self.server: Server | None = None

    def events_config(self, **own: bool) -> str:
        """How it publishes KV events, as `--kv-events-config` takes it."""
        replay = f"tcp://127.0.0.1:{self.replay_port}"
        steps = {} if self.buffer_steps is None else {"buffer_steps": self.buffer_steps}
        endpoints = {"endpoint": self.events_endpoint, "replay_endpoint": replay, "topic": "kv-events"}
        return json.dumps({"publisher": "zmq", **endpoints, **own, **steps})

    def command(self) -> list[str]:
        """The command line, as an operator would write it."""
        return [
            *(str(VENV / "bin" / "vllm"), "serve", str(model_dir(name=self.weights))),
            *("--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", MODEL),
            *("--dtype", self.dtype, "--max-model-len", str(CONTEXT_TOKENS_MAX), "--enforce-eager"),
            *("--max-num-seqs", str(SEQUENCES_MAX), "--max-num-batched-tokens", str(CONTEXT_TOKENS_MAX)),
            *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(self.kv_blocks)),
            *("--enable-prefix-caching", "--enable-prompt-tokens-details", "--enable-server-load-tracking"),
            # A log of polls would hide what matters at the end of it.
            "--disable-uvicorn-access-log",
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
            *("--kv-events-config", self.events_config(enable_kv_cache_events=True)),
        ]

    def start(self) -> None:
        """Start it and return at once; the old process, if any, must have ended."""
        scratch = self.folder / f"{self.name}-home"
        scratch.mkdir(exist_ok=True)
        homes = {key: str(scratch) for key in self.homes} | {key: str(caches()) for key in self.caches}
        # The tests' own interpreter must not leak into the engine's.
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
        log = self.folder / f"{self.name}.log"
        self.server = Server(self.name, self.command(), log, {**kept, **self.environment, **homes}, REPO)

    def running(self) -> Server:
        """Its process; AssertionError when it was never started."""
        assert self.server is not None, f"{self.name} was not started"
        return self.server

    def wait_ready(self) -> float:
        """Wait for /health and return the seconds it took; NotServing with the end of the log otherwise."""
        took_s = self.running().wait_ready(lambda: get(f"{self.url}/health")[0] == 200, READY_TIMEOUT_S)
        self.running().deprioritize(self.core_name)
        return took_s

    def serving(self) -> bool:
        """Whether its process lives and /health says so."""
        return self.running().process.poll() is None and get(f"{self.url}/health")[0] == 200

    def gauge(self, metric: str) -> float:
        """As `sample`."""
        return sample(self.url, metric)

    def told(self, metric: str, label: str = "") -> float:
        """A metric, summed over the samples with this label; nan, which equals nothing, when it does not answer."""
        status, text = get(f"{self.url}/metrics")
        pattern = rf"^{re.escape(metric)}\{{[^}}]*{re.escape(label)}[^}}]*\}} (\S+)$"
        return sum(map(float, re.findall(pattern, text, re.MULTILINE))) if status == 200 else nan

    def restart(self) -> float:
        """Kill what is left, start it on the same port, return the seconds until it serves."""
        self.kill()
        self.start()
        return self.wait_ready()

    def kill(self) -> None:
        """SIGKILL the whole tree and see it gone."""
        if self.server is not None:
            self.server.kill()


def serving(replicas: list[AnyReplica], figures: Callable[[str], None]) -> Iterator[list[AnyReplica]]:
    """These replicas, started together and ready; killed whole when nobody needs them any more."""
    try:
        for replica in replicas:
            replica.start()
        for replica in replicas:
            figures(f"start: {replica.name} {replica.url} ready after {replica.wait_ready():.0f} s of waiting")
        yield replicas
    finally:
        for replica in replicas:
            replica.kill()


def vllm_servers(
    names: Sequence[str], folder: Path, figures: Callable[[str], None], kv_blocks: int = KV_BLOCKS
) -> Iterator[list[Replica]]:
    """vLLM servers of these names, `serving`. The test fails where vLLM is not installed."""
    if not installed():
        pytest.fail("vLLM is not installed: python -m tests.real.install", pytrace=False)
    yield from serving([Replica(name, folder, kv_blocks) for name in names], figures)

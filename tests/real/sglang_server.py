"""One real SGLang replica on the CPU, bound to loopback, serving the tiny model.

Theory: as vllm_server.py. Attention runs on torch's own operators, since the kernels are not there. Pages are of 16
tokens: SGLang's default is 1. Without `--sleep-on-idle` an idle scheduler burns a whole core. Its events go out on a
port of loopback (`bind`, or it would connect); it has no `/kv_event_sources` and tells of them on `/server_info`.
"""

from __future__ import annotations

from pathlib import Path

from loadtest.common.processes import free_port
from tests.real.install import model_dir
from tests.real.install_sglang import VENV_SGLANG
from tests.real.vllm_server import CONTEXT_TOKENS_MAX, MODEL, SEQUENCES_MAX, Replica
from tests.support.installing import python_of

PAGE_TOKENS = 16
KV_PAGES = 1024

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "SGLANG_HOST_IP": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
}


class SGLangReplica(Replica):
    """An SGLang server that can be killed and started again on the same port."""

    environment = ENVIRONMENT
    running_metric = "sglang:num_running_reqs"
    homes = ("HOME", "HF_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
    caches = ()

    def __init__(self, name: str, folder: Path, kv_blocks: int = KV_PAGES, buffer_steps: int | None = None) -> None:
        """`buffer_steps` is how many batches of events a replay holds; None: SGLang's own 10,000."""
        super().__init__(name, folder, kv_blocks, buffer_steps)
        self.events_endpoint = f"tcp://127.0.0.1:{free_port()}"

    def command(self) -> list[str]:
        """The command line, as an operator would write it."""
        return [
            *(
                str(python_of(VENV_SGLANG)),
                "-m",
                "sglang.launch_server",
                "--model-path",
                str(model_dir(name=self.weights)),
            ),
            *("--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", MODEL),
            *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
            *("--dtype", self.dtype, "--context-length", str(CONTEXT_TOKENS_MAX)),
            *("--max-running-requests", str(SEQUENCES_MAX), "--max-total-tokens", str(self.kv_blocks * PAGE_TOKENS)),
            *("--page-size", str(PAGE_TOKENS), "--enable-metrics", "--enable-cache-report", "--sleep-on-idle"),
            *("--skip-server-warmup", "--log-level", "warning", "--kv-events-config", self.events_config(bind=True)),
        ]

"""One real SGLang replica on the CPU that prefills for others, decodes what others have prefilled, or does both.

Theory: as sglang_server.py, with float32 and the attentive model as in nixl_server.py. A prefilling engine has a
bootstrap server, at which decoding ones learn where its scheduler listens; rooms, pages' addresses and aborts go from
scheduler to scheduler by ZeroMQ, and the pages themselves are written by Mooncake's transfer engine, here by TCP on
loopback. What a CPU lacks for it: host_memory.py; and the prefilling engine runs without its overlapping scheduler,
which waits for CUDA events (disaggregation/prefill.py).

The transfer engine binds its two ports, one for its peers' handshakes and one for data, to every interface, whatever
the address that it tells them; all else is on loopback.
"""

from __future__ import annotations

from pathlib import Path

from loadtest.common.processes import free_port
from tests.real.sglang_server import ENVIRONMENT, SGLangReplica

KV_PAGES = 8192


class SplitSGLangReplica(SGLangReplica):
    """An SGLang server of one role that can be killed and started again on the same ports."""

    weights, dtype = "attentive", "float32"

    def __init__(self, name: str, folder: Path, mode: str) -> None:
        """`mode` is prefill, decode or null, as `--disaggregation-mode` takes it."""
        super().__init__(name, folder, KV_PAGES)
        self.mode = mode
        self.bootstrap_port = free_port()
        self.environment = {**ENVIRONMENT, "MC_TCP_BIND_ADDRESS": "127.0.0.1"}

    def command(self) -> list[str]:
        """The command line, as an operator would write it."""
        both = ["--disaggregation-mode", self.mode, "--disaggregation-transfer-backend", "mooncake_tcp"]
        own = {
            "prefill": ["--disaggregation-bootstrap-port", str(self.bootstrap_port), "--disable-overlap-schedule"],
            "decode": ["--disaggregation-decode-retraction-backup", "cpu_tensor"],
            "null": [],
        }[self.mode]
        return [*super().command(), *([] if self.mode == "null" else both), *own]

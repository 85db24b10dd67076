"""Settings from all sources, checked together: every problem is reported at once.

Later sources win: defaults, the YAML file, the environment, flags. A field `limits.body_bytes_max` is
`limits: {body_bytes_max: ...}` in the file, `WARMROUTE_LIMITS_BODY_BYTES_MAX` in the environment, and `--set
limits.body_bytes_max=...` on the command line. An unknown key is an error, and the message names the nearest valid one.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints
from urllib.parse import urlsplit

import msgspec

from router.cli.config_sources import FILE_BYTES_MAX, flatten, from_env, read_file
from router.config.allowed_networks import is_address
from router.config.api_keys import APPEND_ONLY, OFF
from router.config.file_contents import recording
from router.config.files import read_at_most
from router.config.former_settings import FormerNames, rename_keys, rename_value
from router.config.origins import origin_problems
from router.config.runtime import RuntimeConfig, resolve
from router.config.schema import SECRETS, DiscoverySettings, InsightsSettings, Settings, SettingsError, field_keys
from router.config.suggestions import describe_mismatch, nearest, removed_value, unknown_setting
from router.config.url_maps import (
    base_urls,
    continue_problems,
    event_problems,
    model_problems,
    objective_problems,
    peer_problems,
    split_problems,
    token_problems,
    url_problems,
)
from router.core.dialects.tool_normalization import REPAIRS
from router.core.disagg.disagg_policy import DisaggPolicy
from router.core.placement.policies import POLICIES
from router.core.types.disagg_types import KvConnector
from router.engines.discovery import POOLS_MAX, SOURCES
from router.former_names import SETTING_VALUES, SETTINGS
from router.peering.validation import shared_problems
from router.prewarm.prefixes import file_problems
from router.telemetry.tracing import problems as tracing_problems

PROBLEMS_MAX = 200  # problems that are listed one by one
ADDRESS_KEYS = ("replicas", "disagg.prefill", "disagg.decode")  # settings with base URLs of replicas
TEXTS_OR_NUMBERS = ("discovery.port",)  # text settings with values that YAML may read as a number
DISABLED_VALUES = (
    "insights.history_policy",
    "upstream.stream_failover",
)  # settings for which YAML reads the value `off` as false


def load(
    file: Path | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    former: FormerNames | None = None,
) -> Settings:
    """Return settings from all sources, as `load_config` does."""
    return load_config(file, env, overrides, former).settings


def load_config(
    file: Path | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    former: FormerNames | None = None,
    sources: dict[str, str] | None = None,
) -> RuntimeConfig:
    """Return the configuration by settings from all sources. `overrides` maps dotted keys to values. `former` gets the
    former names that were given, and `sources` the source of each given setting. Blocks the thread. Raises
    SettingsError with every problem."""
    problems: list[str] = []
    used: dict[str, str] = {}
    given = _merge_sources(file, env or {}, overrides or {}, problems, used)
    settings: Settings = _build(Settings, "", {key: value for key, (value, _) in given.items()})
    config = None
    with recording():
        problems += _check(settings)
        try:
            config = resolve(settings)
        except SettingsError as error:
            problems += error.problems
    if config is None or problems:
        raise SettingsError(_first(problems, PROBLEMS_MAX, "problems"))
    if config.keys is not None:
        used |= {f"auth.keys_file: {name}": now for name, now in config.keys.former.items()}
    if former is not None:
        former.replace(used)
    if sources is not None:
        sources |= {key: source for key, (_, source) in given.items()}
    return config


def _merge_sources(
    file: Path | None,
    env: Mapping[str, str],
    overrides: Mapping[str, Any],
    problems: list[str],
    used: dict[str, str],
) -> dict[str, tuple[Any, str]]:
    """Return the given settings by dotted key, each with its source: `file`, `environment` or `flag`. `used` gets the
    former names that were given."""
    keys = field_keys()
    flat: dict[str, tuple[Any, str]] = {}
    read = flatten(read_file(file, problems), keys, problems, used) if file else {}
    flat |= {key: (value, "file") for key, value in read.items()}
    flat |= {key: (value, "environment") for key, value in from_env(env, keys, problems, used).items()}
    for key, value in rename_keys(overrides, SETTINGS, problems, used).items():
        if key in keys:
            flat[key] = value, "flag"
        else:
            problems.append(unknown_setting(key, keys))
    values = {}
    for key, (raw, source) in flat.items():
        raw = rename_value(key, raw, SETTING_VALUES.get(key, {}), used)
        if key in TEXTS_OR_NUMBERS and type(raw) is int:
            raw = str(raw)
        if key in DISABLED_VALUES and raw is False:
            raw = OFF
        if not _is_text(raw):
            problems.append(f"'{key}': must not contain NUL or bytes that are not UTF-8")
            continue
        try:
            value = _convert(raw, keys[key])
        except msgspec.ValidationError:
            mismatch = removed_value(key, raw) or describe_mismatch(keys[key], raw, secret=key in SECRETS)
            problems.append(f"'{key}': {mismatch}")
        else:
            values[key] = base_urls(value) if key in ADDRESS_KEYS else value, source
    return values


def _first(problems: list[str], most: int, what: str) -> list[str]:
    """Return the first `most` problems, and a line with the number of the others."""
    left = len(problems) - most
    return problems if left <= 0 else [*problems[:most], f"and {left:,} more {what}"]


def _is_text(value: object) -> bool:
    """Return False for text that no setting may contain: NUL, which ends a path, and lone surrogates, as which Python
    decodes bytes of the environment that are not UTF-8."""
    texts = [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else []
    return not any(isinstance(text, str) and _NO_TEXT.search(text) for text in texts)


_NO_TEXT = re.compile("[\0\ud800-\udfff]")


def _convert(value: Any, type_: Any) -> Any:  # noqa: ANN401 - any setting, of its own type
    """Check type and limits. Strings from flags and the environment are converted to the setting's type."""
    if isinstance(value, str) and type_ == tuple[str, ...]:
        value = [part.strip() for part in value.split(",") if part.strip()]
    return msgspec.convert(value, type_, strict=not isinstance(value, str))


def _build(type_: Any, prefix: str, values: Mapping[str, Any]) -> Any:  # noqa: ANN401 - any settings class
    arguments: dict[str, Any] = {}
    for name, hint in get_type_hints(type_).items():
        if dataclasses.is_dataclass(hint):
            arguments[name] = _build(hint, f"{name}.", values)
        elif prefix + name in values:
            arguments[name] = values[prefix + name]
    return type_(**arguments)


def _check(settings: Settings) -> list[str]:
    """Return the problems of values that have the right type, except those that `resolve` finds."""
    problems = []
    if not settings.listen.host or not settings.listen.admin_host:
        problems.append("'listen.host', 'listen.admin_host': must not be empty; use 0.0.0.0 for all addresses")
    problems += url_problems(settings.replicas)
    problems += _check_discovery(settings.discovery)
    if settings.routing.policy not in POLICIES:
        policy = settings.routing.policy
        problems.append(f"'routing.policy': unknown policy '{policy}'{nearest(policy, POLICIES)}")
    if settings.log.level not in ("debug", "info", "warning", "error"):
        problems.append(f"'log.level': '{settings.log.level}' must be one of debug, info, warning, error")
    if settings.log.format not in ("auto", "json", "text"):
        problems.append(f"'log.format': '{settings.log.format}' must be auto, json or text")
    problems += shared_problems(settings.peering)
    problems += _check_insights(settings.insights)
    events, tokens = settings.events, settings.tokens
    problems += event_problems(events.endpoints, events.topics, events.bind)
    problems += peer_problems(settings.p2p.endpoints)
    problems += _check_disagg(settings)
    problems += token_problems(tokens.sources, tokens.template_kwargs)
    listen, upstream = settings.listen, settings.upstream
    if listen.reuse_port and not hasattr(socket, "SO_REUSEPORT"):
        problems.append("'listen.reuse_port': this system does not have SO_REUSEPORT")
    problems += origin_problems(listen.cors_origins)
    problems += _check_extproc(settings)
    problems += continue_problems(upstream.stream_failover_models)
    problems += tracing_problems(settings.tracing.endpoint)
    problems += file_problems("prewarm.prefixes_file", settings.prewarm.prefixes_file)
    if settings.limits.total_body_bytes_max < settings.limits.body_bytes_max:
        problems.append("'limits.total_body_bytes_max': must be at least 'limits.body_bytes_max'")
    paths = settings.api.passthrough
    if len(set(paths)) < len(paths):
        problems.append("'api.passthrough': a path is duplicated")
    for path in paths:
        if not re.fullmatch(r"/[\w./-]+", path):
            problems.append(f"'api.passthrough': '{path}' is not a plain path such as /tokenize")
    return problems


_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")  # RFC 1123, as in Kubernetes
_OBJECT_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_PORT_NAME = re.compile(r"(?=.*[a-z])(?!.*--)[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?")  # RFC 6335 section 5.1
_HOST_NAME = re.compile(r"(?=.{1,254}$)([A-Za-z0-9_]([-A-Za-z0-9_]{0,61}[A-Za-z0-9_])?)(\.[A-Za-z0-9_-]{1,63})*\.?")


def _check_disagg(settings: Settings) -> list[str]:
    """Return the problems of the settings of disaggregated prefill."""
    policy, connector = settings.routing.policy, settings.disagg.kv_connector
    others = settings.discovery.source != "static" or settings.admin.replicas_allowed
    problems = split_problems(settings.disagg, () if others else settings.replicas)
    if connector and connector not in tuple(KvConnector):
        known = ", ".join(KvConnector)
        problems.append(f"'disagg.kv_connector': '{connector}' must be one of {known}{nearest(connector, KvConnector)}")
    if connector and policy in POLICIES and not isinstance(POLICIES[policy](), DisaggPolicy):
        problems.append(f"'disagg.kv_connector': needs a policy for disaggregated prefill such as warm, not '{policy}'")
    return problems


def _check_discovery(discovery: DiscoverySettings) -> list[str]:
    """Return the problems of the settings of replica discovery."""
    source, port, problems = discovery.source, discovery.port, model_problems(discovery.models)
    if source not in SOURCES:
        problems.append(f"'discovery.source': unknown source '{source}'{nearest(source, SOURCES)}")
    if discovery.scheme not in ("http", "https"):
        problems.append(f"'discovery.scheme': '{discovery.scheme}' must be http or https")
    number = port.isascii() and port.isdigit() and 0 < int(port[:6]) < 1 << 16
    if port and not number and not _PORT_NAME.fullmatch(port):
        problems.append(f"'discovery.port': '{port}' must be a port number or the name of a container port")
    for name in discovery.namespaces:
        if not _LABEL.fullmatch(name):
            problems.append(f"'discovery.namespaces': '{name}' is not a valid namespace name")
    if len(set(discovery.namespaces)) < len(discovery.namespaces):
        problems.append("'discovery.namespaces': a namespace is duplicated")
    if discovery.dns_name and not _HOST_NAME.fullmatch(discovery.dns_name):
        problems.append(f"'discovery.dns_name': '{discovery.dns_name}' is not a name such as vllm.default.svc")
    if source == "dns" and not discovery.dns_name:
        problems.append("'discovery.dns_name': is required with discovery.source dns")
    if source == "dns" and not number:
        problems.append(f"'discovery.port': must be a number with discovery.source dns, not '{port}'")
    if source == "kubernetes":
        problems += _check_kubernetes(discovery)
    return problems + _check_pools(discovery)


def _check_pools(discovery: DiscoverySettings) -> list[str]:
    """Return the problems of `discovery.pools`."""
    pools, problems = discovery.pools, []
    if not pools:
        return []
    if discovery.source != "kubernetes":
        problems.append(f"'discovery.pools': needs discovery.source kubernetes, not '{discovery.source}'")
    for pool in pools:
        namespace, slash, name = pool.rpartition("/")
        if not _OBJECT_NAME.fullmatch(name) or (slash and not _LABEL.fullmatch(namespace)):
            problems.append(f"'discovery.pools': '{pool}' must be the name of an InferencePool or namespace/name")
    if len(set(pools)) < len(pools):
        problems.append("'discovery.pools': a pool is duplicated")
    if len(pools) > POOLS_MAX:
        problems.append(f"'discovery.pools': {len(pools)} pools are given, at most {POOLS_MAX}")
    for key, value in (("selector", discovery.selector), ("port", discovery.port)):
        if value:
            problems.append(
                f"'discovery.{key}': '{value}' conflicts with discovery.pools, which define it; remove one of them"
            )
    if len(discovery.namespaces) > 1:
        hint = "otherwise write pools as namespace/name"
        problems.append(
            f"'discovery.namespaces': must have at most one namespace if discovery.pools has plain names; {hint}"
        )
    return problems


def _check_kubernetes(discovery: DiscoverySettings) -> list[str]:
    problems = []
    if discovery.kubeconfig:
        why = ""
        try:
            if Path(discovery.kubeconfig).is_fifo():  # the client reads it again, on the event loop
                why = "is a pipe, but a kubeconfig is read more than once"
            else:
                read_at_most(discovery.kubeconfig, FILE_BYTES_MAX)
        except OSError as error:
            why = error.strerror or str(error)
        if why:
            problems.append(f"'discovery.kubeconfig': {discovery.kubeconfig}: {why}")
    client = importlib.util.find_spec("kubernetes")  # does not import the package, which is slow
    places = client.submodule_search_locations if client is not None else None
    if not any(Path(place, "aio").is_dir() for place in places or ()):
        why = "needs the official client, 36 or newer: pip install '.[kubernetes]'"
        problems.append(f"'discovery.source': kubernetes {why}")
    return problems


def _check_extproc(settings: Settings) -> list[str]:
    """Return the problems of the picker's settings."""
    extproc, problems = settings.extproc, []
    problems += objective_problems(extproc.objectives)
    if not extproc.host:
        problems.append("'extproc.host': must not be empty; use 0.0.0.0 for all addresses")
    if settings.listen.mode == "proxy":
        return problems
    if any(importlib.util.find_spec(name) is None for name in ("grpc", "grpc_health")):
        problems.append(f"'listen.mode': {settings.listen.mode} needs gRPC: pip install '.[gateway]'")
    for url in settings.replicas:
        host = (urlsplit(url).hostname or "") if "://" in url else ""
        if not is_address(host):
            problems.append(
                f"'replicas': '{url}': a gateway needs IP addresses such as http://10.0.0.1:8000, not names"
            )
    return problems


def _check_insights(insights: InsightsSettings) -> list[str]:
    """Return the problems of the settings of repairs, and of headers that describe requests."""
    problems = []
    for name in insights.normalize_tools:
        if name not in REPAIRS:
            problems.append(f"'insights.normalize_tools': unknown repair '{name}'{nearest(name, REPAIRS)}")
    if insights.history_policy not in APPEND_ONLY:
        known = ", ".join(APPEND_ONLY)
        problems.append(f"'insights.history_policy': '{insights.history_policy}' must be one of {known}")
    elif insights.history_policy != OFF and not insights.enabled:
        problems.append("'insights.history_policy': needs 'insights.enabled', which records conversations")
    if insights.step_header and not _HEADER.fullmatch(insights.step_header):
        problems.append(f"'insights.step_header': '{insights.step_header}' is not a valid header name")
    return problems


_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # RFC 9110 section 5.6.2

"""Reading the settings again while the router runs (SIGHUP), from the same file, environment and flags.

Files that settings name (certificates, keys, tokens) are checked every `listen.file_watch_interval_s`, and a change has
the same effect as SIGHUP. A mounted Secret can thus be replaced without a signal to the router. The settings file
itself is not checked, because its author wants to check it first.

Settings with a problem change nothing. Otherwise those in RELOADABLE are applied at once, and files that settings name
are read again even if no setting changed. Current requests are not affected. Those in RESTART_REQUIRED stay as they
were, and a warning names those that changed; a restart as a lame duck costs no request. Every setting is in exactly one
of the two sets; one of ON_OFF_SETTINGS is reloadable unless it is turned on or off.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

from router.config.files import wait_until_settled
from router.config.schema import Settings, SettingsError, field_keys

log = logging.getLogger(__name__)

# Applied by `ControlPlane.reload` and `HttpFrontend.reload`, or read whenever they are needed (drain_s,
# metrics_on_main).
RELOADABLE = frozenset(
    (
        "replicas", "allow_empty",
        "listen.metrics_on_main", "listen.cors_origins", "listen.file_watch_interval_s", "listen.keepalive_s",
        "listen.lame_duck_s", "listen.drain_s",
        "listen.tls_certificate", "listen.tls_key", "listen.tls_client_ca", "listen.connections_max",
        "listen.connections_per_client_max", "listen.head_timeout_s", "listen.body_bytes_per_s_min",
        "listen.body_timeout_s", "listen.send_timeout_s",
        "extproc.tls_certificate", "extproc.tls_key", "extproc.tls_client_ca",
        "admin.token", "admin.token_file", "admin.replicas_allowed", "admin.connections_max",
        "admin.connections_per_client_max",
        "auth.keys_file", "auth.isolate", "auth.receipts",
        "admission.in_flight_max", "admission.engine_waiting_max", "admission.queue_requests_max",
        "admission.queue_bytes_max", "admission.queue_timeout_s", "admission.defer_max_s", "admission.tenant_share_max",
        "peering.redis_url_file", "peering.password_file", "peering.tls_ca", "peering.tls_certificate",
        "peering.tls_key",
        "upstream.api_key", "upstream.api_key_file",
        "upstream.tls_ca", "upstream.tls_certificate", "upstream.tls_key",
        "upstream.connect_timeout_s", "upstream.first_byte_timeout_s", "upstream.idle_timeout_s",
        "upstream.stall_timeout_s", "upstream.slow_start_s", "upstream.keepalive_s", "upstream.retries_max",
        "upstream.retry_on_timeout", "upstream.retry_ratio", "upstream.retry_floor_per_s",
        "upstream.stream_failover", "upstream.stream_failover_models", "upstream.drain_migrate_after_s",
        "disagg.prefill_grace_s",
        "limits.body_bytes_max", "limits.total_body_bytes_max", "limits.body_budget_timeout_s",
        "limits.buffered_response_bytes_max",
        "limits.json_parts_max", "limits.json_values_max", "limits.parse_queue_bytes_max",
        "limits.parse_queue_timeout_s",
        "api.passthrough", "api.unknown_models", "api.ask_usage", "api.receipts",
        "log.level", "log.requests",
        "insights.normalize_tools", "insights.history_policy",
        "prewarm.prefixes_file", "prewarm.templates", "prewarm.tokens_max", "prewarm.block_readiness",
        "prewarm.timeout_s",
    )
)  # fmt: skip
# Settings of sockets and processes, and of parts that are built once: index, tokenizers, probe sessions and event
# followers.
RESTART_REQUIRED = frozenset(
    (
        "discovery.pools",
        "discovery.source", "discovery.namespaces", "discovery.selector", "discovery.port", "discovery.scheme",
        "discovery.kubeconfig", "discovery.dns_name", "discovery.dns_interval_s", "discovery.resync_s",
        "discovery.loopback", "discovery.replicas_max", "discovery.scale_from_zero", "discovery.models",
        "extproc.host", "extproc.port", "extproc.health_port", "extproc.fallbacks_max", "extproc.objectives",
        "extproc.response_sample_ratio", "extproc.streams_max", "extproc.stream_s_max", "extproc.keepalive_s",
        "extproc.conformance",
        "listen.mode", "listen.host", "listen.port", "listen.admin_host", "listen.admin_port",
        "listen.reuse_port",
        "admin.history_path", "admin.history_bytes_max", "admin.history_days_max",
        "auth.secret", "auth.secret_file", "auth.secret_before", "auth.secret_before_file", "auth.tenants_max",
        "routing.policy", "routing.index_bytes_max", "routing.default_cache_blocks", "routing.kv_tokens_max",
        "routing.remembered_prompts_max",
        "probe.interval_s", "probe.timeout_s", "probe.models_interval_s", "probe.models_max", "probe.metrics",
        "probe.metrics_interval_s", "probe.api_key", "probe.page_bytes_max",
        "events.enabled", "events.endpoints", "events.bind", "events.topics", "events.poll_s",
        "events.replay_timeout_s", "events.fallback_delay_s", "events.pending_wait_s", "events.queue_bytes_max",
        "events.blocks_max",
        "events.index_bytes_max", "events.request_full_reports",
        "tiers.enabled", "tiers.kv_bytes_per_token", "tiers.cpu_gb_per_s", "tiers.storage_gb_per_s",
        "tiers.shared_gb_per_s",
        "p2p.port", "p2p.endpoints", "p2p.gb_per_s", "p2p.probe_interval_s", "p2p.timeout_s", "p2p.cooldown_s",
        "disagg.kv_connector", "disagg.prefill", "disagg.decode", "disagg.port", "disagg.endpoints",
        "disagg.probe_interval_s",
        "disagg.hosts",
        "tokens.sources", "tokens.template_kwargs", "tokens.ask_replicas", "tokens.verify",
        "tokens.verify_interval_s", "tokens.deadline_s", "tokens.cache_bytes_max",
        "limits.offload_bytes_min", "limits.response_ids_max", "limits.recent_decisions_max", "limits.json_depth_max",
        "log.format",
        "peering.redis_url", "peering.password", "peering.fleet", "peering.router_id", "peering.timeout_s",
        "peering.expected_routers",
        "peering.replicas_in_common",
        "snapshot.path", "snapshot.interval_s", "snapshot.bytes_max", "snapshot.age_max_s",
        "snapshot.readiness_wait_s", "snapshot.from_peers",
        "metrics.former_names",
        "tracing.endpoint", "tracing.sample_ratio", "tracing.service_name", "tracing.queue_spans_max",
        "insights.enabled", "insights.excerpts", "insights.memory_bytes_max", "insights.prompt_bytes_max",
        "insights.blocks_max", "insights.diff_budget_ms_per_s", "insights.inspections_per_s_max",
        "insights.replay_window_s",
        "insights.templates_max", "insights.groups_max", "insights.steps_max", "insights.step_header",
        "insights.step_field", "insights.grafana_url",
    )
)  # fmt: skip
# Settings that decide, by being empty or not, how parts are built: with TLS, with keys.
ON_OFF_SETTINGS = frozenset(
    (
        "extproc.tls_certificate", "extproc.tls_client_ca",
        "listen.tls_certificate", "listen.tls_client_ca", "auth.keys_file", "peering.redis_url_file", "upstream.tls_ca",
        "upstream.tls_certificate",
    )
)  # fmt: skip

# Live settings that name files, which are checked for changes.
FILES = (
    "extproc.tls_certificate", "extproc.tls_key", "extproc.tls_client_ca",
    "listen.tls_certificate", "listen.tls_key", "listen.tls_client_ca", "admin.token_file", "auth.keys_file",
    "peering.redis_url_file", "peering.password_file", "peering.tls_ca", "peering.tls_certificate", "peering.tls_key",
    "upstream.api_key_file", "upstream.tls_ca", "upstream.tls_certificate", "upstream.tls_key",
    "prewarm.prefixes_file",
)  # fmt: skip
OFF_S = 10.0  # interval of checks for a change of `listen.file_watch_interval_s`, while it is 0

REFUSED = "new configuration is invalid: the old one remains active"


@dataclasses.dataclass(frozen=True, slots=True)
class SettingsChange:
    """Result of reading the settings again."""

    settings: Settings  # the settings now in force
    applied: tuple[str, ...]  # keys of settings that changed and were applied
    kept: tuple[str, ...]  # keys of settings that changed and need a restart


def change(old: Settings, new: Settings) -> SettingsChange:
    """Return the old settings, with those that are live taken from the new ones."""
    settings, applied, kept = old, list[str](), list[str]()
    for key in field_keys():
        was, wanted = _get(old, key), _get(new, key)
        if was == wanted:
            continue
        if key in RELOADABLE and not (key in ON_OFF_SETTINGS and bool(was) != bool(wanted)):
            applied.append(key)
            settings = _replace_setting(settings, key, wanted)
        else:
            kept.append(key)
    return SettingsChange(settings, tuple(applied), tuple(kept))


def refuse_empty(old: Settings, new: Settings) -> None:
    """Raise SettingsError if the new settings would remove all replicas or all keys, for example because their file is
    empty or truncated."""
    if new.allow_empty:
        return
    problems = []
    hint = "to confirm, set 'allow_empty: true'"
    if old.replicas and not new.replicas:
        problems.append(f"'replicas': the new settings have no replicas, the old ones have {len(old.replicas)}; {hint}")
    if old.auth.keys_file and not new.auth.keys_file:
        problems.append(f"'auth.keys_file': missing in the new settings, so requests would need no key; {hint}")
    if problems:
        raise SettingsError(problems)


def _get(settings: Settings, key: str) -> Any:  # noqa: ANN401 - any setting
    return reduce(getattr, key.split("."), settings)


def _replace_setting(settings: Settings, key: str, value: Any) -> Settings:  # noqa: ANN401 - any setting
    section, dot, name = key.partition(".")
    inner = dataclasses.replace(getattr(settings, section), **{name: value}) if dot else value
    return dataclasses.replace(settings, **{section: inner})


FileStat = tuple[str, int, int, int]


def files_of(settings: Settings) -> tuple[str, ...]:
    """Return the paths of the files that these settings name and that may change while the router runs."""
    return tuple(filter(None, (str(_get(settings, key)) for key in FILES)))


def _looks_of(files: tuple[str, ...]) -> tuple[FileStat, ...]:
    """Return for each file its path, inode, time of change in ns and size in bytes; zeros for a missing file."""
    looks = list[FileStat]()
    for path in files:
        try:
            found = Path(path).stat()  # follows links: Kubernetes replaces the link to a folder of mounted files
            looks.append((path, found.st_ino, found.st_mtime_ns, found.st_size))
        except OSError:
            looks.append((path, 0, 0, 0))
    return tuple(looks)


class FileDebouncer:
    """Reports a change of files once, when two checks in a row have found the same state. A file that is half written,
    or a certificate with a key that is about to follow, is left until it is complete."""

    def __init__(self, looks: tuple[FileStat, ...]) -> None:
        """`looks` are those of the files that are in force."""
        self._last = self._known = looks

    def has_settled(self, looks: tuple[FileStat, ...]) -> bool:
        """True if these looks, the newest, are of files that have changed and stay so."""
        still, self._last = looks == self._last, looks
        if not still or looks == self._known:
            return False
        self._known = looks
        return True


class Reloader:
    """Reads the settings again on request, one reload at a time."""

    def __init__(
        self,
        settings: Settings,
        read: Callable[[], Settings],
        apply: Callable[[Settings], None],
        told: Callable[[str], None],
        *,
        file: Path | None = None,
    ) -> None:
        """`settings`: the settings in force. `read`: raises SettingsError. `apply`: may raise it too, before it has
        changed anything. `told`: called with the result, `ok` or `refused`. `file`: the settings file, if there is one;
        it is read when no process writes to it."""
        self.settings = settings
        self._file = file
        self._read = read
        self._apply = apply
        self._told = told
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Request a reload soon; several requests until then count as one."""
        self._asked.set()

    async def watch(self) -> None:
        """Serve such requests, and changes of files, until cancelled."""
        looking = asyncio.create_task(self._look_at_files())
        try:
            while True:
                await self._asked.wait()
                self._asked.clear()
                await self.reload()
        finally:
            looking.cancel()

    async def _look_at_files(self) -> None:
        """Request a reload when files have changed. Threads check them, because a file's volume may hang."""
        loop = asyncio.get_running_loop()
        changes = FileDebouncer(await loop.run_in_executor(None, _looks_of, files_of(self.settings)))
        while True:
            interval_s = self.settings.listen.file_watch_interval_s
            await asyncio.sleep(interval_s or OFF_S)
            if not interval_s:
                continue
            now = await loop.run_in_executor(None, _looks_of, files_of(self.settings))
            if changes.has_settled(now):
                log.info(
                    "files of the settings have changed",
                    extra={"event": "config_files_changed", "fields": {"files": len(now)}},
                )
                self.ask()

    def _read_settled(self) -> Settings:
        if self._file is not None:
            wait_until_settled(self._file)
        return self._read()

    async def reload(self) -> None:
        """Read and apply once. A thread reads the settings and their files; applying takes one turn of the event
        loop."""
        try:
            new = await asyncio.get_running_loop().run_in_executor(None, self._read_settled)
            refuse_empty(self.settings, new)
            found = change(self.settings, new)
            self._apply(found.settings)
        except SettingsError as error:
            for problem in error.problems:
                log.error(REFUSED, extra={"event": "config_rejected", "fields": {"problem": problem}})  # noqa: TRY400 - no trace
            self._told("refused")
            return
        except Exception:  # a bug, which must not stop the router
            log.exception("bug: reload of the settings failed", extra={"event": "bug"})
            self._told("refused")
            return
        self.settings = found.settings
        if found.kept:
            log.warning(
                "changed settings need a restart",
                extra={"event": "config_needs_restart", "fields": {"settings": list(found.kept)}},
            )
        log.info(
            "configuration reloaded",
            extra={"event": "config_reloaded", "fields": {"changed": list(found.applied)}},
        )
        self._told("ok")

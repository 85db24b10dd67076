"""A router whose settings file is written again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from router.cli.config_loader import load_config
from router.config.reload import Reloader
from router.router_server import RouterServer
from tests.support.fakes import FakeEngine


class Running:
    """A router that has its settings from a file."""

    def __init__(self, app: RouterServer, reloader: Reloader, file: Path) -> None:
        self.app, self.reloader, self.file = app, reloader, file

    async def set(self, *engines: FakeEngine | str, **settings: Any) -> None:
        """Write the file, and have it read again."""
        write(self.file, *engines, **settings)
        await self.reloader.reload()

    async def replicas_are(self, *engines: FakeEngine) -> None:
        """Wait until these are known, and probe them."""
        while set(self.app.router.fleet.members) != {engine.url for engine in engines}:
            await asyncio.sleep(0.001)
        await self.app.control.probe_now()

    async def metric(self, name: str) -> float | None:
        """As it is scraped."""
        for line in (await self.app.control.metrics.page_in_slices()).decode().splitlines():
            series, _, value = line.rpartition(" ")
            if series == name:
                return float(value)
        return None


def write(file: Path, *engines: FakeEngine | str, **settings: Any) -> None:
    """A settings file."""
    urls = [engine if isinstance(engine, str) else engine.url for engine in engines]
    sections: dict[str, Any] = {"replicas": urls}
    # A test that fails while streams run says why, instead of waiting for their ends until it is cut off.
    base = {"listen__port": 0, "listen__admin_port": 0, "listen__drain_s": 2.0, "probe__interval_s": 3600.0}
    for key, value in (base | settings).items():
        section, _, name = key.partition("__")
        sections.setdefault(section, {})[name] = value
    file.write_text(json.dumps(sections))


@asynccontextmanager
async def running(file: Path, *engines: FakeEngine | str, **settings: Any) -> AsyncIterator[Running]:
    """A router in front of these engines, every replica probed once."""
    write(file, *engines, **settings)
    config = load_config(file)
    async with RouterServer(config) as app:
        await app.control.probe_now()
        reloader = Reloader(config.settings, lambda: load_config(file), app.apply, app.control.count_reload)
        yield Running(app, reloader, file)


def of(section: object, *names: str) -> list[float]:
    """These times of a section."""
    return [getattr(section, f"{name}_timeout_s", None) or getattr(section, f"{name}_s") for name in names]


def in_force(router: Running) -> dict[str, Any]:
    """What parts of the router hold that was given to them by settings."""
    http, control = router.app.http, router.app.control
    upstream, proxy, server, reader = http.upstream, http.proxy, http._server, http.reader
    lines, retries = reader.forwarding, proxy._attempts.limits
    return {
        "engines": (of(upstream.limits, "connect", "first_byte", "idle", "keepalive"), upstream.whole_bytes_max),
        "retries": (retries.retries_max, retries.retry_on_timeout),
        "budget": (http._budget.ratio, http._budget.floor_per_s),
        "answers": (proxy.receipts, http._routes._inference, http._routes._metrics_here),
        "credentials": (lines._own_lines, lines._kept, http._callers.admin_token, control.admin_token()),
        "clients": (server.limits, server._slots.limits),
        "pages": (server.cors._named if server.cors is not None else None, http._routes.cors is server.cors),
        "operators": (control.admin.server.limits, control.admin.server._slots.limits),
        "bodies": (reader._limits.json_parts_max, reader._limits.json_values_max, reader.turns.bytes_max),
        "waits": reader.turns.wait_s,
        "models": (reader._api.unknown_models, reader._api.ask_usage, reader._failover, reader._failover_models),
        "prompts": (reader._insights.history_policy, reader._repairs_wanted),
        "keys": [(keys.tenants if keys is not None else None) for keys in (http._callers.keys, control.keys)],
        "admission": control.admission._admission._limits,
        "standing": (control.router._stall_timeout_s, control.router.fitness.slow_start_s),
        "replicas": (control.replicas._urls, control._additions.allowed),
        "prewarm": control.warmer.settings,
        "silence": (http._continuations.silence_s_max, http.legs.linger_s),
        # Looked up when it is needed.
        "later": (http._settings.listen.drain_s, http._settings.upstream.drain_migrate_after_s),
        "at the end": router.reloader.settings.listen.lame_duck_s,
        "between looks": router.reloader.settings.listen.file_watch_interval_s,
    }

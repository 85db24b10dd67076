"""Settings read again while the router runs: what comes of them, and that nothing under way notices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from router.config.reload import change
from router.config.schema import Settings, field_keys, get_setting, reloadable_keys
from router.telemetry import logs
from tests.config.reloaded import in_force, running
from tests.support.fakes import FakeEngine
from tests.support.keyring import Keyring

RELOADABLE = reloadable_keys()
ON_OFF = {key for key, mark in RELOADABLE.items() if mark.is_on_off}
# Files; those of secrets are none of them, as salts are for ever.
NAMED = {key for key in field_keys() if key.endswith("_file") or ".tls_" in key} - {
    "auth.secret_file",
    "auth.secret_before_file",
}


def other_than(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value / 2 or 1.0
    return value + (("x",) if isinstance(value, tuple) else "x")


def having(settings: Settings, key: str, value: Any) -> Settings:
    """The same but for one."""
    section, _, name = key.partition(".")
    if not name:
        return dataclasses.replace(settings, **{key: value})
    return dataclasses.replace(settings, **{section: dataclasses.replace(getattr(settings, section), **{name: value})})


def test_files_are_live() -> None:
    """Files are live, so that a certificate or a key is replaced without a restart."""
    assert ON_OFF <= NAMED <= RELOADABLE.keys()


@pytest.mark.parametrize("key", sorted(field_keys()))
def test_what_is_live_changes_and_nothing_else(key: str) -> None:
    """One changed setting is taken over or kept out, by its table, and named; every other stays as it was."""
    old = having(Settings(), key, "there") if key in ON_OFF else Settings()
    new = having(old, key, other_than(get_setting(old, key)))
    found = change(old, new)
    assert found.settings == (new if key in RELOADABLE else old)
    assert (found.applied, found.kept) == (((key,), ()) if key in RELOADABLE else ((), (key,)))


@pytest.mark.promise("A reload switches neither authentication nor TLS off or on.", "admin")
@pytest.mark.parametrize("key", sorted(ON_OFF))
def test_a_switch_needs_a_restart(key: str) -> None:
    """What is turned on or off stays as it was, and is named."""
    off, on = Settings(), having(Settings(), key, "there")
    for old, new in ((off, on), (on, off)):
        found = change(old, new)
        assert (found.settings, found.applied, found.kept) == (old, (), (key,))


def wanted_of(keys: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Each of these settings with another value than its own; two underscores stand for a dot."""
    given = {"admin.token": "t" * 16, "admin.replicas_allowed": ["http://127.0.0.1:8000"], "log.level": "debug"}
    given["listen.connections_max"] = 100  # any system may open so many
    given |= {"upstream.stream_failover": "exact", "upstream.stream_failover_models": ["m=exact"]}
    given |= {
        "upstream.api_key": "k",
        "api.passthrough": ["/only"],
        "listen.cors_origins": ["http://a"],
        "api.ask_usage": False,
        "api.unknown_models": "pass",
    }
    given |= {"insights.normalize_tools": ["sort_tools"], "insights.history_policy": "warn"}
    for key in keys:
        yield key.replace(".", "__"), given[key] if key in given else other_than(get_setting(Settings(), key))


async def test_what_is_live_is_in_force(
    tmp_path: Path, engine: FakeEngine, other: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each live setting that changes changes what some part of the router goes by; and after a reload every part holds
    what it would hold had it been started with these settings."""
    Keyring(tmp_path, acme={})
    settings: dict[str, Any] = {"auth__keys_file": str(tmp_path / "keys.yaml"), "auth__secret": "s" * 32}
    log = [(Settings().log.level, Settings().log.requests)]
    monkeypatch.setattr(logs, "configure", lambda level, *, requests: log.append((level, requests)))
    async with running(tmp_path / "a", engine, **settings) as router:
        before = in_force(router)
        await router.set(engine, other, **settings)
        assert in_force(router)["replicas"] != before["replicas"]
        for name, value in wanted_of(sorted(RELOADABLE.keys() - NAMED - {"replicas", "allow_empty"})):
            before, logged = in_force(router), log[-1]
            settings[name] = value
            await router.set(engine, other, **settings)
            assert in_force(router) != before or log[-1] != logged, name
        assert log[-1] == ("debug", False)
        reloaded = in_force(router)
    async with running(tmp_path / "b", engine, other, **settings) as router:
        assert in_force(router) == reloaded

"""Settings that were removed, in every source, and settings that this system cannot have."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path

import pytest

from router.cli.config_loader import load
from router.config.api_keys import Keys, KeysError, entry_of, make_key
from router.config.schema import SettingsError, field_keys
from router.former_names import REMOVED, REMOVED_VALUES

KEY = "listen.workers"
SAID = "listen.workers was removed: start several routers with listen.reuse_port and peering.redis_url"


def test_a_removed_setting_is_refused_with_its_replacement(tmp_path: Path) -> None:
    """In the file, the environment and the flags: with any value, and never as a typing error of another setting."""
    file = tmp_path / "warmroute.yaml"
    file.write_text("listen: {workers: 1}\n")
    with pytest.raises(SettingsError) as refused:
        load(file, {"WARMROUTE_LISTEN_WORKERS": "1"}, {KEY: "1"})
    assert refused.value.problems == [SAID, f"unknown environment variable 'WARMROUTE_LISTEN_WORKERS': {SAID}", SAID]


def test_no_setting_is_removed_and_there() -> None:
    """What a table says of removed settings is true."""
    assert not REMOVED.keys() & field_keys().keys()


def test_a_removed_value_is_refused_with_its_replacement(tmp_path: Path) -> None:
    """Of all streams, of a model, and of a key; under the former name of its setting too."""
    said = "the value 'approximate' was removed: " + REMOVED_VALUES["upstream.stream_failover"]["approximate"]
    models = "upstream.stream_failover_models"
    for key in ("upstream.stream_failover", "upstream.continue_streams"):
        with pytest.raises(SettingsError) as refused:
            load(overrides={key: "approximate", models: "a=exact,b=approximate,c=maybe"})
        of_models = (f"'b=approximate': {said}", "'c=maybe' must be MODEL=off, MODEL=asked or MODEL=exact")
        assert refused.value.problems == [
            f"'upstream.stream_failover': {said}",
            *(f"'{models}': {problem}" for problem in of_models),
        ]
    keys = tmp_path / "keys.yaml"
    key = make_key()
    keys.write_text(entry_of(key, "acme") + "  stream_failover: approximate\n")
    with pytest.raises(KeysError) as bad:
        Keys.load(keys, isolate=False, receipts=True)
    name = f"acme-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
    assert bad.value.problems == [f"{keys}: key '{name}': 'stream_failover': {said}"]


def test_a_value_that_is_none_of_a_list() -> None:
    """The message lists the valid ones."""
    with pytest.raises(SettingsError) as refused:
        load(overrides={"upstream.stream_failover": "maybe"})
    assert refused.value.problems == ["'upstream.stream_failover': must be one of off, asked, exact, not 'maybe'"]


def test_a_port_cannot_be_shared_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system without SO_REUSEPORT is named as the reason before anything listens."""
    monkeypatch.delattr(socket, "SO_REUSEPORT")
    assert load(overrides={"listen.reuse_port": "false"}).listen.reuse_port is False
    with pytest.raises(SettingsError) as refused:
        load(overrides={"listen.reuse_port": "true"})
    assert refused.value.problems == ["'listen.reuse_port': this system does not have SO_REUSEPORT"]

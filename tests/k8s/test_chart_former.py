"""Values of the chart under former names: they have their effect, and the notes list them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import chart_schema
from router.former_names import REMOVED, REMOVED_VALUES, UNTIL
from tests.k8s.tools import CHART, NAMESPACE, NEEDED, RELEASE, helm, settings_text, template

PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a store": (
        {"config": {"shared": {"url": "redis://valkey:6379", "routers_assumed": 7}}},
        {"config": {"peering": {"redis_url": "redis://valkey:6379", "expected_routers": 7}}},
    ),
    "a secret of the store": (
        {
            "shared": {"existingSecret": "s", "urlKey": "", "passwordKey": "pw"},
            "config": {"shared": {"url": "redis://v:1"}},
        },
        {
            "peering": {"existingSecret": "s", "urlKey": "", "passwordKey": "pw"},
            "config": {"peering": {"redis_url": "redis://v:1"}},
        },
    ),
    "a picker": (
        {"face": "picker", "pool": {"matchLabels": {"app": "v"}}, "config": {"gateway": {"port": 9102}}},
        {"mode": "extproc", "pool": {"matchLabels": {"app": "v"}}, "config": {"extproc": {"port": 9102}}},
    ),
    "a picker and Envoy": (
        {
            "face": "both",
            "pool": {"matchLabels": {"app": "v"}},
            "envoy": {"enabled": True},
            "config": {"admission": {"wait_s": 44}},
        },
        {
            "mode": "both",
            "pool": {"matchLabels": {"app": "v"}},
            "envoy": {"enabled": True},
            "config": {"admission": {"queue_timeout_s": 44}},
        },
    ),
    "ports of engines": (
        {"config": {"pulls": {"port": 5710}, "split": {"handshake": "mooncake", "port": 7000}}},
        {"config": {"p2p": {"port": 5710}, "disagg": {"kv_connector": "mooncake", "port": 7000}}},
    ),
    "memory": (
        {"config": {"limits": {"bodies_bytes_max": 4 << 30}}},
        {"config": {"limits": {"total_body_bytes_max": 4 << 30}}},
    ),
    "no file of the state": ({"config": {"state": {"file": ""}}}, {"config": {"snapshot": {"path": ""}}}),
    "a list and a switch": (
        {"config": {"observatory": {"repairs": ["sort_tools"], "enabled": False}}},
        {"config": {"insights": {"normalize_tools": ["sort_tools"], "enabled": False}}},
    ),
}


def values_file(folder: Path, values: dict[str, Any]) -> Path:
    """A values file with these values and those that the chart needs."""
    config = dict(values.get("config", {}))
    if "pool" not in values:
        config["discovery"] = NEEDED["config"]["discovery"]
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump({**NEEDED, **values, "config": config}), encoding="utf-8")
    return file


@pytest.mark.parametrize("case", PAIRS)
def test_former_names_have_the_same_effect(tmp_path: Path, case: str) -> None:
    """On all objects; settings are written with current names."""
    former, current = (template("--values", values_file(tmp_path, values)) for values in PAIRS[case])
    assert former == current
    text = yaml.safe_load(settings_text(former))
    assert not {*text} & {"shared", "gateway", "pulls", "split", "state", "observatory"}


def test_the_files_of_former_names_are_up_to_date() -> None:
    """They are made from the tables of the router."""
    assert chart_schema.FORMER_TARGET.read_text(encoding="utf-8") == chart_schema.former_text(), "run make manifests"
    assert chart_schema.REMOVED_TARGET.read_text(encoding="utf-8") == chart_schema.removed_text(), "run make manifests"


def _installed(file: Path) -> str:
    done = helm("install", RELEASE, CHART, "--namespace", NAMESPACE, "--dry-run=client", "--values", file)
    return done.stdout + done.stderr


def test_the_notes_list_former_names(tmp_path: Path) -> None:
    """Each with the current one, and with the version that no longer reads it."""
    former, current = PAIRS["a secret of the store"]
    notes = _installed(values_file(tmp_path, former))
    assert f"until version {UNTIL}" in notes
    assert "config.shared.url is now config.peering.redis_url; shared is now peering;" in notes
    assert "former names" not in _installed(values_file(tmp_path, current))


def test_both_names_are_refused(tmp_path: Path) -> None:
    """One line has both."""
    config = {"shared": {"url": "redis://v:1"}, "peering": {"redis_url": "redis://v:1"}}
    words = "config.shared.url is the former name of config.peering.redis_url, which is given too"
    assert words in _installed(values_file(tmp_path, {"config": config}))


def test_removed_settings_are_refused_with_their_replacement(tmp_path: Path) -> None:
    """All in one message; a removed value also under the former name of its setting. Other values are accepted."""
    config: dict[str, dict[str, Any]] = {}
    for key in REMOVED:
        config.setdefault(key.split(".")[0], {})[key.split(".")[1]] = 1
    printed = _installed(values_file(tmp_path, {"config": config}))
    for key, replacement in REMOVED.items():
        assert f"config.{key} was removed: {replacement}" in printed
    said = REMOVED_VALUES["upstream.stream_failover"]["approximate"]
    for key in ("stream_failover", "continue_streams"):
        printed = _installed(values_file(tmp_path, {"config": {"upstream": {key: "approximate"}}}))
        assert f"config.upstream.stream_failover: the value 'approximate' was removed: {said}" in printed
        assert "was removed" not in _installed(values_file(tmp_path, {"config": {"upstream": {key: "exact"}}}))


@pytest.mark.parametrize(
    "values",
    [
        {"extraEnv": [{"name": "WARMROUTE_GATEWAY_PORT", "value": "9"}]},
        {"extraArgs": ["--face=picker"]},
        {"extraArgs": ["--set=gateway.port=9"]},
    ],
)
def test_former_names_do_not_go_past_the_chart(tmp_path: Path, values: dict[str, Any]) -> None:
    """Ports are the chart's, under former names too."""
    assert "would bypass the chart" in _installed(values_file(tmp_path, values))

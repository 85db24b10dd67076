"""What gateways do by themselves while no picker answers, by one list."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from router.ingress.gateway_rules import FORGEABLE, PASSED_PATHS, PROMPT_PATHS, SECRETS
from tests.k8s.tools import NAMESPACE, RELEASE, by_name, only, picker, template

SECRET = "keys"
POOL = ("--set", "image.repository=registry.example.com/warmroute,mode=extproc,pool.matchLabels.app=vllm")
WITH_KEYS = f"apiKeys.existingSecret={SECRET}"


def manager_of(config: dict[str, Any]) -> dict[str, Any]:
    """The connection manager of the listener that clients come to."""
    (filters,) = config["static_resources"]["listeners"][0]["filter_chains"]
    found: dict[str, Any] = filters["filters"][0]["typed_config"]
    return found


def rendered(*options: str) -> dict[str, Any]:
    """The connection manager of the chart's Envoy."""
    found = by_name(template("--values", picker("standalone"), *options))
    text = found["ConfigMap", NAMESPACE, f"{RELEASE}-warmroute-envoy"]["data"]["envoy.yaml"]
    return manager_of(yaml.safe_load(text))


def opened(manager: dict[str, Any]) -> list[str]:
    """Paths on which requests that no picker has placed are passed on, each for POST alone and without credentials."""
    placed, *others = manager["route_config"]["virtual_hosts"][0]["routes"]
    assert placed["match"] == {"prefix": "/", "headers": [{"name": FORGEABLE[0], "present_match": True}]}
    for each in others:
        assert each["match"]["headers"] == [{"name": ":method", "string_match": {"exact": "POST"}}]
        assert each["request_headers_to_remove"] == list(SECRETS)
    return [each["match"]["path"] for each in others]


def taken(manager: dict[str, Any]) -> list[str]:
    """Headers that clients cannot send."""
    (extension,) = manager["early_header_mutation_extensions"]
    return [each["remove"] for each in extension["typed_config"]["mutations"]]


@pytest.mark.finding("2026-11-28/1")
@pytest.mark.promise("With keys the chart has its gateways fail closed by default.", "gateway")
@pytest.mark.parametrize(
    ("values", "mode"),
    [
        ("", "FailOpen"),
        (WITH_KEYS, "FailClose"),
        ("config.auth.keys_file=/etc/keys.yaml", "FailClose"),
        (f"{WITH_KEYS},authSecret.existingSecret=a,config.auth.isolate=true", "FailClose"),
        ("pool.failureMode=FailClose", "FailClose"),
        (f"{WITH_KEYS},pool.failureMode=FailOpen,pool.failOpenWithoutKeys=true", "FailOpen"),
        (f"{WITH_KEYS},pool.failOpenWithoutKeys=true", "FailClose"),
    ],
)
def test_with_keys_gateways_fail_closed(values: str, mode: str) -> None:
    """Both the pool and the chart's Envoy, unless it is said twice that they should not. What an open one passes on is
    bounded in any case."""
    options = ("--set", values) if values else ()
    pool = only(template(*POOL, *options), "InferencePool")
    assert pool["spec"]["endpointPickerRef"]["failureMode"] == mode
    manager = rendered(*options)
    asking = manager["http_filters"][0]["typed_config"]
    assert (asking["failure_mode_allow"], asking["route_cache_action"]) == (mode == "FailOpen", "CLEAR")
    assert opened(manager) == ([*PROMPT_PATHS, *PASSED_PATHS] if mode == "FailOpen" else [])
    assert taken(manager) == list(FORGEABLE)


def test_paths_are_those_of_the_settings() -> None:
    """`config.api.passthrough` in place of its default."""
    manager = rendered("--set-json", 'config.api.passthrough=["/score"]')
    assert opened(manager) == [*PROMPT_PATHS, "/score"]

"""What is wrong with settings of prefill apart from decode."""

from __future__ import annotations

from typing import Any

import pytest

from router.cli.config_loader import load
from router.config.schema import SettingsError

THERE = {"replicas": ["http://10.0.0.1:8000/"]}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"disagg.prefill": ["http://a:1"]}, "'disagg.prefill': needs 'disagg.kv_connector'"),
        ({"disagg.port": 9}, "'disagg.port': needs 'disagg.kv_connector'"),
        ({"disagg.kv_connector": "nixl", "disagg.port": 9}, "must be empty with nixl"),
        ({"disagg.kv_connector": "nixl", "disagg.decode": ["a b"]}, "'disagg.decode': 'a b' is not a base URL"),
        ({"disagg.kv_connector": "sglang", "disagg.endpoints": ["a"]}, "'disagg.endpoints': 'a' must have the form"),
        (
            {"disagg.kv_connector": "sglang", "disagg.prefill": ["http://a:1/"], "disagg.decode": ["http://a:1"]},
            "'http://a:1' is in both",
        ),
        (
            {"disagg.kv_connector": "sglang", "disagg.prefill": ["http://A:80"], "disagg.decode": ["http://a"]},
            "'http://a' is in both",
        ),
        (
            {"disagg.kv_connector": "nixl", "replicas": ["http://a:1"], "disagg.decode": ["http://b:1"]},
            "'disagg.decode': 'http://b:1' is not in 'replicas'",
        ),
        (
            {"disagg.kv_connector": "sglang", "disagg.endpoints": ["http://a:80=a:1", "http://A/=a:2"]},
            "'disagg.endpoints': 'http://A/' is duplicated",
        ),
        ({"disagg.kv_connector": "smoke"}, "'disagg.kv_connector'"),
        ({"disagg.kv_connector": "nixl", "routing.policy": "round_robin"}, "needs a policy for disaggregated prefill"),
    ],
)
def test_splits_that_make_no_sense(given: dict[str, Any], problem: str) -> None:
    """Each is told in one line, with what is wanted."""
    with pytest.raises(SettingsError) as caught:
        load(overrides=given)
    assert any(problem in line for line in caught.value.problems), caught.value.problems


def test_short_addresses_are_replicas() -> None:
    """As in `replicas`."""
    split = load(overrides={"disagg.kv_connector": "nixl", "disagg.prefill": ["10.0.0.1:8000"], **THERE}).disagg
    assert split.prefill == ("http://10.0.0.1:8000",)


@pytest.mark.parametrize(
    "found",
    [
        {"discovery.source": "dns", "discovery.dns_name": "vllm.a.svc", "discovery.port": "8000"},
        {"admin.replicas_allowed": ["http://10.0.0.0/8:8000"]},
    ],
)
def test_replicas_that_are_found_may_be_named(found: dict[str, Any]) -> None:
    """What discovery finds, or somebody adds, is in no list."""
    given = {"disagg.kv_connector": "nixl", "disagg.prefill": ["http://b:1"], "replicas": ["http://a:1"], **found}
    assert load(overrides=given).disagg.prefill == ("http://b:1",)

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
        ({"split.prefill": ["http://a:1"]}, "'split.prefill': needs 'split.handshake'"),
        ({"split.port": 9}, "'split.port': needs 'split.handshake'"),
        ({"split.handshake": "nixl", "split.port": 9}, "nixl needs none"),
        ({"split.handshake": "nixl", "split.decode": ["a b"]}, "'split.decode': 'a b' is not a base URL"),
        ({"split.handshake": "sglang", "split.endpoints": ["a"]}, "'split.endpoints': 'a' is not of the form"),
        (
            {"split.handshake": "sglang", "split.prefill": ["http://a:1/"], "split.decode": ["http://a:1"]},
            "'http://a:1' is in both",
        ),
        (
            {"split.handshake": "sglang", "split.prefill": ["http://A:80"], "split.decode": ["http://a"]},
            "'http://a' is in both",
        ),
        (
            {"split.handshake": "nixl", "replicas": ["http://a:1"], "split.decode": ["http://b:1"]},
            "'split.decode': 'http://b:1' is none of 'replicas'",
        ),
        (
            {"split.handshake": "sglang", "split.endpoints": ["http://a:80=a:1", "http://A/=a:2"]},
            "'split.endpoints': 'http://A/' is given twice",
        ),
        ({"split.handshake": "smoke"}, "'split.handshake'"),
        ({"split.handshake": "nixl", "routing.policy": "round_robin"}, "needs a policy that prices both legs"),
    ],
)
def test_splits_that_make_no_sense(given: dict[str, Any], problem: str) -> None:
    """Each is told in one line, with what is wanted."""
    with pytest.raises(SettingsError) as caught:
        load(overrides=given)
    assert any(problem in line for line in caught.value.problems), caught.value.problems


def test_short_addresses_are_replicas() -> None:
    """As in `replicas`."""
    split = load(overrides={"split.handshake": "nixl", "split.prefill": ["10.0.0.1:8000"], **THERE}).split
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
    given = {"split.handshake": "nixl", "split.prefill": ["http://b:1"], "replicas": ["http://a:1"], **found}
    assert load(overrides=given).split.prefill == ("http://b:1",)

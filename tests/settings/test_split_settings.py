"""What is wrong with settings of prefill apart from decode."""

from __future__ import annotations

from typing import Any

import pytest

from router.commands.loading import load
from router.settings.schema import SettingsError


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
    split = load(overrides={"split.handshake": "nixl", "split.prefill": ["10.0.0.1:8000"]}).split
    assert split.prefill == ("http://10.0.0.1:8000",)

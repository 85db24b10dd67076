"""The gateway's configuration on its page is that which tests and instruments run."""

from __future__ import annotations

from typing import Any

import yaml

from deploy import gateway
from loadtest.common.envoy import EnvoyMode, configuration
from tests.house.documents import code_blocks, page


def test_envoys_settings_are_those_that_run() -> None:
    """Every part of the page's block is in the configuration of a real Envoy, to the letter."""
    (block,) = (text for text in code_blocks(page("docs/guide/gateway.md"), "yml") if "per_connection_buffer" in text)
    told = yaml.safe_load(block)
    ran = configuration(9002, [8000], EnvoyMode())["static_resources"]
    (listener,), (shown,) = ran["listeners"], told["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    assert shown["per_connection_buffer_limit_bytes"] == listener["per_connection_buffer_limit_bytes"]
    assert shown["early_header_mutation_extensions"] == manager["early_header_mutation_extensions"]
    for mine, theirs in zip(shown["http_filters"], manager["http_filters"], strict=True):
        holds(mine, theirs)
    (routes,) = manager["route_config"]["virtual_hosts"]
    assert told["routes"] == routes["routes"]
    for shown in told["clusters"]:
        (cluster,) = (each for each in ran["clusters"] if each["name"] == shown["name"])
        holds(shown, cluster)


def test_the_route_of_one_that_fails_open_is_one_that_runs() -> None:
    """The page shows one path's, which the configuration has for all."""
    (block,) = (
        text for text in code_blocks(page("docs/guide/gateway.md"), "yml") if "request_headers_to_remove" in text
    )
    ran = configuration(9002, [8000], EnvoyMode(fail_open=True))["static_resources"]
    (routes,) = ran["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]["route_config"]["virtual_hosts"]
    (shown,) = yaml.safe_load(block)
    assert shown in routes["routes"]


def test_the_chart_has_the_same_rules() -> None:
    """Its file is what `python -m deploy.gateway` writes."""
    assert gateway.TARGET.read_text(encoding="utf-8") == gateway.text()


def holds(mine: Any, theirs: Any) -> None:
    """All that is said here is said there."""
    if isinstance(mine, dict):
        for key, value in mine.items():
            assert key in theirs, key
            holds(value, theirs[key])
    elif isinstance(mine, list):
        for one, other in zip(mine, theirs, strict=True):
            holds(one, other)
    else:
        assert mine == theirs

"""Bodies of a replay's requests tell a router nothing of the answers' lengths."""

from __future__ import annotations

import pytest

from loadtest.common.client import PATHS, Endpoint, body_of
from loadtest.common.traces import Request
from router.core.dialects import OPENAI
from router.core.prompts.block_keys import chain_of

REQUEST = Request(0.0, 0.0, 700, 20, "test", 64, ((1, 10),), tail="t", cuts=(64,))


@pytest.mark.parametrize("endpoint", [*PATHS])
@pytest.mark.parametrize("limit", [None, 4_096])
def test_a_router_reads_the_same_whatever_the_length(endpoint: Endpoint, limit: int | None) -> None:
    """What our router reads of a request, and the keys of its prompt, are the same for an answer of 1 token and for one
    of 900, and the bodies are not."""
    short, long = (body_of(REQUEST, "sim", endpoint, tokens, limit) for tokens in (1, 900))
    asks = [OPENAI.parse(PATHS[endpoint], body) for body in (short, long)]
    chains = [chain_of(ask, "sim") for ask in asks]

    assert short != long
    assert asks[0] == asks[1]
    assert asks[0].output_tokens_max == limit
    assert chains[0] is not None
    assert chains[0] == chains[1]

"""The official clients for Node.js see one stream where theirs goes on on another replica."""

from __future__ import annotations

from typing import Any

import pytest

from tests.node.test_endings import read_streams
from tests.proxy.test_stream_failover import CHAT, COMPLETIONS, pair, script
from tests.support.speaking import Speaking, asked_of, spoken

MESSAGES = "/v1/messages"
# What read_streams.mjs asks, as far as it shapes the answer.
SAID: list[dict[str, str]] = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": SAID},
    COMPLETIONS: {"prompt": "x"},
    MESSAGES: {"messages": SAID, "max_tokens": 8},
}


@pytest.mark.node
@pytest.mark.parametrize("path", BODIES)
async def test_one_stream(path: str) -> None:
    """Wherever its stream breaks, a client gets the text of the unbroken one and no error. Messages are not continued:
    their client gets the beginning of that text, and an error."""
    unbroken = "".join(piece.text for piece in spoken(asked_of(path, BODIES[path])))
    async with pair() as (one, two, app):
        for after in (1, 2, 4, 7):
            script(one, two, Speaking(after=after))
            (read,) = await read_streams(app.url, path, 1, "exact")
            assert (read["error"] is None) == (path != MESSAGES), read
            assert unbroken.startswith(read["said"]) if path == MESSAGES else read["said"] == unbroken

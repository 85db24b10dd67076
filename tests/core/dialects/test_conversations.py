"""A conversation is one chain of blocks, whichever API it comes through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from router.core.types.requests import RequestSpec
from tests.core.dialects import messages_bodies, responses_bodies
from tests.core.dialects.chats import chat

SAME = {
    f"{api}: {name}": (read, *same)
    for api, read, cases in (
        ("messages", messages_bodies.parse, messages_bodies.SAME),
        ("responses", responses_bodies.parse, responses_bodies.SAME),
    )
    for name, same in cases.items()
}


@pytest.mark.parametrize(("read", "fields", "messages", "extra"), SAME.values(), ids=SAME)
def test_a_conversation_is_the_chat_that_the_engine_makes_of_it(
    read: Callable[..., RequestSpec], fields: dict[str, Any], messages: list[dict[str, Any]], extra: dict[str, Any]
) -> None:
    """Canonical bytes, spans and the first user message are equal through both APIs: it is one chain."""
    assert read(**fields).prompt == chat(*messages, **extra)

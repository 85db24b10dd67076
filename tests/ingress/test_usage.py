"""Of which replicas usage is asked for, by what their streams have shown."""

from __future__ import annotations

from typing import Any, cast

from router.core.dialects import OPENAI
from router.core.placement.placement_request import PlacementRequest
from router.core.types.requests import RequestSpec
from router.http.request import Request
from router.ingress.proxied_request import ProxiedRequest
from router.ingress.usage import LEFT_ALONE, SERVERS_MAX, UsageAsking

BODY = b'{"stream":true}'
ASKED = b'{"stream":true,"stream_options":{"include_usage":true}}'


def question(path: str = "/v1/chat/completions", *, asks: bool = True) -> ProxiedRequest:
    """A stream whose client asked for no usage."""
    request = Request(cast("Any", None))
    request.path = path
    request.replace_body([BODY], len(BODY))
    return ProxiedRequest(
        request, [], request.body, OPENAI, PlacementRequest(RequestSpec("m", stream=True), "m", None, ""), asks
    )


def asked(usage: UsageAsking, replica: str, path: str = "/v1/chat/completions", **how: bool) -> bool:
    """Whether usage of one more stream is asked for there, and then taken out."""
    made = question(path, **how)
    usage.ask(made, replica)
    assert made.body == made.request.body == (ASKED if made.usage_asked else BODY)
    assert usage.takes_out(made, replica) is made.usage_asked
    return made.usage_asked


def test_nothing_is_asked_before_a_stream_has_shown_that_usage_does_not_come_unasked() -> None:
    """Each path of each server by itself, and all ranks of a server together."""
    usage = UsageAsking()
    assert not any(asked(usage, "http://a") for _ in range(3))
    usage.learn(question(), "http://a#dp1", unasked=False)
    assert asked(usage, "http://a")
    assert asked(usage, "http://a#dp0")
    assert not asked(usage, "http://a", "/v1/completions")
    assert not asked(usage, "http://b")
    assert not asked(usage, "http://a", asks=False)


def test_usage_that_comes_unasked_is_neither_asked_for_nor_taken_out() -> None:
    """Until a stream comes without it, or the replica goes: another engine may come to its address."""
    usage = UsageAsking()
    usage.learn(question(), "http://a", unasked=True)
    assert not asked(usage, "http://a")
    usage.learn(question(), "http://a", unasked=False)
    assert asked(usage, "http://a")
    usage.forget("http://a#dp3")
    assert not asked(usage, "http://a")


def test_a_stream_that_was_asked_for_is_left_whole_where_usage_comes_anyway() -> None:
    """Its first replica failed, and the next one sends usage to all clients."""
    usage, made = UsageAsking(), question()
    usage.learn(question(), "http://a", unasked=False)
    usage.learn(question(), "http://b", unasked=True)
    usage.ask(made, "http://a")
    usage.ask(made, "http://b")
    assert made.body == ASKED
    assert usage.takes_out(made, "http://a")
    assert not usage.takes_out(made, "http://b")


def test_now_and_then_a_stream_is_left_as_it_is() -> None:
    """An engine that was started anew with other flags shows it there."""
    usage = UsageAsking()
    usage.learn(question(), "http://a", unasked=False)
    assert [asked(usage, "http://a") for _ in range(2 * LEFT_ALONE)].count(False) == 2


def test_what_is_known_has_a_bound() -> None:
    """The server of which was learned longest ago makes room."""
    usage = UsageAsking()
    for n in range(SERVERS_MAX + 1):
        usage.learn(question(), f"http://{n}", unasked=False)
    assert not asked(usage, "http://0")
    assert asked(usage, "http://1")

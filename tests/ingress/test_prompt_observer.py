"""Prompts are seen as they are read, whatever thread reads them."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from router.config.schema import InsightsSettings, LimitSettings
from router.core.types.cache_misses import DifferenceKind, PromptAnalysis
from router.http.request import Connection, Request
from router.ingress import prompt_observer as observing
from router.ingress.parser import RequestParser
from router.ingress.prompt_observer import PromptObserver, SamplingRate, TimeBudget
from router.placement_api import PlacementService

CHAT = "/v1/chat/completions"


class Resolving:
    """Places nothing; every model is served."""

    def resolve(self, model: str) -> str:
        """As it is called."""
        return model

    def cache_identity(self, model: str) -> str:
        """By no other name."""
        return model

    def wants_token_ids(self) -> bool:
        """No replica's events are."""
        return False


def observer(
    *, memory_bytes_max: int = 8 << 20, diff_budget_ms_per_s: int = 1_000, inspections_per_s_max: int = 1_000
) -> PromptObserver:
    """With room for what the tests say."""
    return PromptObserver(
        InsightsSettings(
            memory_bytes_max=memory_bytes_max,
            templates_max=16,
            diff_budget_ms_per_s=diff_budget_ms_per_s,
            inspections_per_s_max=inspections_per_s_max,
        )
    )


@asynccontextmanager
async def reading(
    seeing: PromptObserver | None, offload_bytes_min: int = 1 << 20, append_only: str = "off"
) -> AsyncIterator[Callable[..., Any]]:
    """What a RequestParser makes of messages."""
    reader = RequestParser(
        cast("PlacementService", Resolving()),
        None,
        LimitSettings(offload_bytes_min=offload_bytes_min),
        insights=InsightsSettings(history_policy=append_only),
        observer=seeing,
    )

    async def read(messages: list[dict[str, str]], **fields: bytes) -> PromptAnalysis | None:
        request = Request(cast("Connection", None))
        body = json.dumps({"model": "m", "messages": messages}).encode()
        request.method, request.target, request.path = "POST", CHAT, CHAT
        request.replace_body([body], len(body))
        request.fields = {name.replace("_", "-").encode(): value for name, value in fields.items()}
        question = await reader.parse(request, "id")
        assert question.wanted.ask.prompt is not None
        assert question.wanted.ask.prompt.text == b""
        return question.wanted.sighting

    try:
        yield read
    finally:
        reader.close()


def turns(count: int, top: str = "You are kind.", words: int = 300) -> list[dict[str, str]]:
    """A conversation of so many questions, about 4 KB each."""
    messages = [{"role": "system", "content": top + "\nBe brief, and say what you know and what you do not."}]
    for turn in range(count):
        messages.append({"role": "user", "content": f"question {turn} " * words})
        messages.append({"role": "assistant", "content": f"answer {turn}\n" * 20})
    return messages[:-1]


@pytest.mark.parametrize("offload_bytes_min", [0, 1 << 20])
async def test_turns_are_seen_on_the_loop_and_beside_it(offload_bytes_min: int) -> None:
    """Turns of up to 60 KB, of which only the ends are read, are one conversation; the one whose beginning changed is
    told where."""
    async with reading(observer(), offload_bytes_min) as read:
        seen = [await read(turns(count)) for count in range(1, 16)]
        assert [sighting.turn for sighting in seen] == list(range(15))
        assert len({sighting.conversation for sighting in seen}) == 1
        assert all(sighting.appended for sighting in seen)
        changed = await read(turns(16, "It is 2026-11-20T10:31:07Z."), x_session_id=b"s")
        assert changed.difference is not None
        changed = await read(turns(17, "It is 2026-11-20T10:32:19Z."), x_session_id=b"s")
        assert changed.difference.change is DifferenceKind.TIMESTAMP
        assert changed.conversation == seen[0].conversation


async def test_what_was_read_before_and_is_forgotten_here_is_read_again() -> None:
    """The RequestParser knows the beginnings of bodies whose texts the PromptObserver has let go: what is known is
    exact still."""
    seeing = observer(memory_bytes_max=600_000)
    async with reading(seeing) as read:
        for count in (8, 9, 10):
            kept = await read(turns(count))
        assert kept.turn == 2
        for other in range(40):
            await read(turns(1, f"Number {other}", words=1_500))
        forgotten = await read(turns(11))
        assert forgotten.turn == 0
        assert forgotten.known_bytes < 100
        assert (await read(turns(12))).turn == 1


def dated(count: int, second: int) -> list[dict[str, str]]:
    """A conversation whose system prompt has the time at its top."""
    return turns(count, f"It is 2026-11-20T10:31:{second:02}Z." + " Customers are always right." * 9)


async def test_beyond_the_budget_differences_stay_unexplained() -> None:
    """They are counted, and the prompt is seen all the same."""
    seeing = observer(diff_budget_ms_per_s=0)
    async with reading(seeing) as read:
        first = await read(dated(3, 7))
        second = await read(dated(4, 19))
        assert second.conversation == first.conversation
        assert second.difference is None
        assert seeing.unexplained == 1


@pytest.mark.inside  # it replaces what compares
async def test_what_was_found_twice_is_assumed() -> None:
    """When time is scarce, few turns are compared of a conversation that has the time at its top, and each tells as
    much as if it were: the same kind and place, and what the turn before had behind it. None counts as unexplained."""
    seeing = observer(diff_budget_ms_per_s=1_000)
    seeing._budget.ample = lambda _: False  # type: ignore[method-assign]
    compared = []
    spend = seeing._budget.spend
    seeing._budget.spend = lambda seconds: (compared.append(seconds), spend(seconds))[1]  # type: ignore[method-assign]
    async with reading(seeing) as read:
        seen = [await read(dated(1 + at, 10 + at)) for at in range(12)]
    assert len(compared) == 3
    assert seeing.unexplained == 0
    sizes = [len(str(dated(1 + at, 0))) for at in range(12)]
    for sighting, before in zip(seen[3:], sizes[2:], strict=False):
        assert sighting.difference.change is DifferenceKind.TIMESTAMP
        assert sighting.difference.path == "messages[0].content"
        assert 0.9 * before < sighting.repeated_bytes < before
        assert (sighting.difference.lost_bytes, sighting.appended) == (sighting.repeated_bytes, False)


async def test_without_time_the_last_finding_stands_for_others_of_its_template() -> None:
    """New conversations with the time at their top are told as the last one that was compared."""
    seeing = observer()
    async with reading(seeing) as read:
        for at, word in enumerate(("when", "how", "who")):
            found = await read([*dated(1, 10 + at)[:1], {"role": "user", "content": word * 90}])
        assert found.difference is not None
        seeing._budget.spend(1_000.0)
        last = await read([*dated(1, 40)[:1], {"role": "user", "content": "abc" * 90}])
    assert last.difference.change is DifferenceKind.TIMESTAMP
    assert last.template == found.template
    assert abs(last.repeated_bytes - found.repeated_bytes) < 8


async def test_nothing_is_assumed_of_those_who_may_only_append() -> None:
    """Where a change of history is refused, or told, what was not compared has none."""
    seeing = observer()
    async with reading(seeing, append_only="warn") as read:
        for at in range(4):
            await read(dated(1 + at, 10 + at))
        seeing._budget.spend(1_000.0)
        assert (await read(dated(5, 50))).difference is None
    assert seeing.unexplained == 1


@pytest.mark.inside
async def test_what_goes_wrong_is_not_the_requests_concern(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error costs the sighting, and is told once."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    seeing = observer()
    monkeypatch.setattr(seeing._watcher, "classify", broken)
    async with reading(seeing) as read:
        assert await read(turns(1)) is None
        assert await read(turns(2)) is None
    assert len(caplog.records) == 1


async def test_without_an_observer_nothing_is_seen() -> None:
    """And nothing is kept."""
    async with reading(None) as read:
        assert await read(turns(1)) is None


def test_an_allowance_is_a_share_of_the_time() -> None:
    """At most a second's share is saved; what was spent beyond it has to be earned first."""
    allowance = TimeBudget(0.05, 0.0)
    assert allowance.has(0.0)
    allowance.spend(0.10)
    assert not allowance.has(0.9)
    assert allowance.has(1.1)
    assert allowance.has(1_000.0)
    allowance.spend(0.051)
    assert not allowance.has(1_000.0)


@pytest.mark.inside  # it replaces what compares
@pytest.mark.parametrize(("junk_bytes", "aside"), [(0, False), (40_000, True)])
async def test_only_what_is_short_is_compared_on_the_loop(
    monkeypatch: pytest.MonkeyPatch, junk_bytes: int, aside: bool
) -> None:
    """However little differs: all of a body is decoded to name the place, and a field that nobody reads is part of
    it."""
    threads = []

    def noted(*given: Any) -> Any:
        threads.append(threading.current_thread() is not threading.main_thread())
        return compared(*given)

    compared = observing._compare_timed
    monkeypatch.setattr(observing, "_compare_timed", noted)
    async with reading(observer()) as read:
        for top in ("It is 2026-11-20T10:31:07Z.", "It is 2026-11-20T10:32:19Z."):
            messages = turns(1, top)
            messages[0]["name"] = "x" * junk_bytes
            seen = await read(messages)
    assert threads == [aside]
    assert seen.difference.change is DifferenceKind.TIMESTAMP


@pytest.mark.parametrize(("append_only", "found"), [("off", 1), ("warn", 3)])
async def test_nobody_waits_for_others_to_be_compared(
    append_only: str, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of long prompts that are suspect at the same time one is compared, and the others are read without it, unless a
    change is to be told of for sure."""
    begun, goes_on, compare = threading.Event(), threading.Event(), observing._compare_timed

    def slow(*args: Any) -> Any:
        begun.set()
        assert goes_on.wait(10)
        return compare(*args)

    seeing, names = observer(), [(b"a", 290), (b"b", 300), (b"c", 310)]
    async with reading(seeing, append_only=append_only) as read:
        for name, words in names:
            await read(turns(12, "It is 10:31:07.", words), x_session_id=name)
        monkeypatch.setattr(observing, "_compare_timed", slow)
        changed = [
            asyncio.create_task(read(turns(13, "It is 10:32:19.", words), x_session_id=name)) for name, words in names
        ]
        await asyncio.to_thread(begun.wait, 10)
        if append_only == "off":
            await asyncio.wait(changed[1:])
            assert not changed[0].done()
        goes_on.set()
        seen = await asyncio.gather(*changed)
    assert sum(sighting.difference is not None for sighting in seen) == found
    assert seeing.unexplained == 3 - found


def test_a_part_of_all_conversations_is_watched_when_they_are_many() -> None:
    """No more prompts a second than are allowed, give or take what chance does, and a conversation wholly or not at
    all; in a first second of many, the first ones up to twice as many; all of them again once there are few."""
    watch, names = SamplingRate(100), [random.Random(n).getrandbits(64) for n in range(1_000)]
    watched = [[watch.takes(name, 0, second + at / 1_000) for at, name in enumerate(names)] for second in range(4)]
    assert watched[0] == [True] * 200 + [False] * 800  # nobody knew how many would come
    assert watched[1] == watched[2] == watched[3]
    assert 60 < sum(watched[1]) < 150
    assert not all(watch.takes(name, 0, 5.0 + at / 50) for at, name in enumerate(names[:50]))
    assert all(watch.takes(name, 0, 7.0 + at / 50) for at, name in enumerate(names[:50]))


async def test_a_prompt_too_many_is_not_looked_at() -> None:
    """It is counted, and answered all the same."""
    seeing = observer(inspections_per_s_max=1)
    seeing._watch._parts, seeing._watch._until_s = 0, float("inf")
    async with reading(seeing) as read:
        assert (await read(turns(3))).conversation == 0
        assert seeing.unexplained == 1

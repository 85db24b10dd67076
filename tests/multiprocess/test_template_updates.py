"""Templates on their way from workers to the hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from router.core.types.misses import Template
from router.multiprocess import template_updates
from router.multiprocess.template_updates import EVERY_S, TOLD_BYTES_MAX, TOLD_MAX, TemplateUpdates
from tests.multiprocess.stubs import StubEdge, StubHub, serving, until, worker


def template(id_: int, body: bytes = b"", conversations: int = 0) -> Template:
    """One of a thousand bytes."""
    return Template(id_, 0, 1_000, 5, tools=1, label="", conversations=conversations, path="/v1/messages", body=body)


def drained(of: TemplateUpdates, now_s: float = 0.0) -> Iterator[Template]:
    """All that is due, however many times it takes."""
    while told := of.due(now_s):
        assert len(told) <= TOLD_MAX
        assert len(told) == 1 or sum(len(each.body) for each in told) <= TOLD_BYTES_MAX
        yield from told


def test_a_body_is_told_once_to_each_hub() -> None:
    """What changes is told again without it; a hub that is new hears all."""
    changed: list[list[Template]] = [[template(1, b"{}")], [template(1, b"{}", 7)], []]
    of = TemplateUpdates(lambda: changed.pop(0), 16)
    assert [each.body for each in of.due(0.0)] == [b"{}"]
    assert of.due(EVERY_S / 2) == []
    (again,) = of.due(EVERY_S)
    assert (again.conversations, again.body) == (7, b"")
    of.resend_all()
    (anew,) = of.due(EVERY_S)
    assert (anew.conversations, anew.body) == (7, b"{}")
    assert of.due(3 * EVERY_S) == []


def test_long_bodies_are_told_a_few_at_a_time_and_the_longest_never() -> None:
    """A frame stays small, whatever prompts are like."""
    bodies = [bytes(template_updates.BODY_BYTES_MAX)] * 20 + [bytes(template_updates.BODY_BYTES_MAX + 1)]
    changed = [[template(id_, body) for id_, body in enumerate(bodies, 1)]]
    of = TemplateUpdates(lambda: changed.pop(), 64)
    told = list(drained(of))
    assert [each.id for each in told] == list(range(1, 22))
    assert [len(each.body) for each in told] == [template_updates.BODY_BYTES_MAX] * 20 + [0]


@given(
    st.lists(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 99)), max_size=20), max_size=8), st.integers(1, 8)
)
def test_the_hub_knows_the_latest_of_each(rounds: list[list[tuple[int, int]]], most: int) -> None:
    """Whatever changes in whatever order: of those that changed last, the hub has heard what the worker knows."""
    now: list[Template] = []
    of, heard, latest = TemplateUpdates(lambda: now, most), {}, {}
    for number, each in enumerate(rounds):
        now = [template(id_, b"{}", conversations) for id_, conversations in each]
        for changed in now:
            latest.pop(changed.id, None)
            latest[changed.id] = changed.conversations
        heard |= {told.id: told.conversations for told in drained(of, number * EVERY_S)}
        for id_ in list(latest)[-most:]:
            assert heard[id_] == latest[id_]


async def test_a_hub_hears_of_templates_and_a_new_one_too(tmp_path: Path) -> None:
    """Over the wire as they are, with the worker's name."""
    path = tmp_path / "hub"
    changed = [template(1, b'{"model": "m"}')]
    hub, again = StubHub("http://a"), StubHub("http://a")
    async with worker(path, number=3, edge=StubEdge(lambda: [changed.pop()] if changed else [])):
        async with serving(hub, path):
            await until(lambda: hub.told)
        async with serving(again, path):
            await until(lambda: again.told)
    assert hub.told == again.told == [("worker 3", template(1, b'{"model": "m"}'))]

"""What the map draws one by one, and what templates are called."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.insights.ledger.small_templates import OTHERS_MIN, SLIVERS_SHARE, slivers
from router.core.insights.ledger.template_tree import MAP_MAX, made_of
from router.core.types.cache_misses import MissReason, PromptAnalysis, Template
from tests.core.insights.ledger.records import BEGAN_S, ledger, record, views


def test_orders_of_shuffled_tools_are_drawn_as_one() -> None:
    """A few agents with most of the traffic each have a branch; a template for every order of one's tools have one
    together, with the sum of what they serve."""
    of = ledger(templates_max=256)
    of.know([Template(id_, 0, 4_000, 0, tools=5) for id_ in range(1, 90)])
    for id_ in range(1, 5):
        of.observe(record(1.0, hit=9_000, misses={MissReason.NEW: 1_000}, analysis=PromptAnalysis(template=id_)))
    for id_ in range(5, 90):
        of.observe(record(1.0, misses={MissReason.DIVERGED: 100}, analysis=PromptAnalysis(template=id_)))
    of.settle(BEGAN_S + 1)
    shown = views(of, holders=lambda _: ["a"])
    drawn, groups = shown.group_for_map()
    (others,) = (shown.build_others_row(*group) for group in groups)
    assert sorted(drawn) == [1, 2, 3, 4]
    assert (others["id"], others["parent"], others["label"]) == ("others-", "", "85 others, of 5 tools each")
    assert (others["requests"], others["hit_rate"]) == (85, 0.0)
    assert others["served_tokens"] == pytest.approx(8_500, rel=0.001)
    assert others.keys() == shown.branch(1).keys()


trees = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 5_000)), min_size=1, max_size=150)


@given(trees)
def test_all_templates_are_drawn_once(tree: list[tuple[int, int]]) -> None:
    """Whatever the tree and the traffic: each template stands for itself or is one of the others of a parent that is
    drawn; few small ones are not hidden, what is drawn has room, and what is hidden for its size is a small part."""
    parents = {id_: parent % id_ for id_, (parent, _) in enumerate(tree, 1)}
    own = {id_: float(tokens) for id_, (_, tokens) in enumerate(tree, 1)}
    through = dict(own)
    for id_ in sorted(own, reverse=True):
        if parents[id_]:
            through[parents[id_]] += through[id_]
    most = sorted(own, key=lambda id_: (-through[id_], id_))
    groups = slivers(most, parents, through, own, MAP_MAX)
    hidden = [id_ for group in groups.values() for id_ in group]
    drawn = set(most) - set(hidden)
    assert len(hidden) == len(set(hidden))
    assert len(drawn) <= MAP_MAX
    assert groups.keys() <= drawn | {0}
    if len(most) <= MAP_MAX:
        assert all(len(group) >= OTHERS_MIN for group in groups.values())
        assert sum(own[id_] for id_ in hidden) <= SLIVERS_SHARE * sum(own.values())


@pytest.mark.parametrize(
    ("tools", "messages", "name"),
    [
        (5, 0, "5 tools"),
        (1, 1, "1 tool and a system prompt"),
        (0, 1, "System prompt"),
        (2, 3, "2 tools and 3 messages"),
        (0, 0, "Beginning of a prompt"),
    ],
)
def test_templates_are_named_without_a_word_of_theirs(tools: int, messages: int, name: str) -> None:
    """Where prompts may not be quoted, what a template is made of tells it, and its id from another one like it."""
    assert made_of(Template(0xABCDEF << 40, 0, 900, 0, tools, messages)) == f"{name} (abcdef)"
    of = ledger()
    of.know([Template(7, 0, 900, 0, tools, messages)])
    assert of.branches.label(7) == views(of).branch(7)["label"] == f"{name} (000000)"
    assert of.branches.label(8) == ""

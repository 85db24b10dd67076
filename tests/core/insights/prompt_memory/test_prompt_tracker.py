"""Which conversation and template a prompt belongs to, and which earlier prompt it is compared with."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from router.core.dialects import PATHS
from router.core.insights.difference.compare import compare
from router.core.insights.prompt_memory import fast_path
from router.core.insights.prompt_memory import prompt_tracker as watching
from router.core.insights.prompt_memory.diff_candidate import DiffCandidate
from router.core.insights.prompt_memory.prompt_tracker import PromptTracker
from router.core.insights.prompt_memory.shared_prefixes import LABEL_CHARS_MAX, _named_tools
from router.core.prompts.block_keys import chain_of
from router.core.types.cache_misses import DifferenceKind, PromptAnalysis

CHAT = "/v1/chat/completions"
Messages = list[dict[str, Any]]

RULES = "\n".join(f"Rule {n}: whatever the {n * 7}th customer says is answered in {n + 3} words." for n in range(40))
SYSTEM = {"role": "system", "content": "You help the customers of a bicycle shop.\n" + RULES}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does what {name} says, and tells how it went. " * 4,
            "parameters": {"type": "object", "properties": {"what": {"type": "string"}, "why": {"type": "string"}}},
        },
    }
    for name in ("look_up_order", "refund", "ask_a_human", "write_mail")
]


class Seeing:
    """A PromptTracker, and whoever compares for it."""

    def __init__(self, memory_bytes_max: int = 8 << 20, *, excerpts: bool = False) -> None:
        self.watcher = PromptTracker(memory_bytes_max, 1 << 20, 16, excerpts=excerpts, seed=9)
        self.compared = 0

    def see(self, messages: Messages, *, session: str = "", **fields: Any) -> PromptAnalysis:
        """One request."""
        body = json.dumps({"model": "m", "messages": messages, **fields}).encode()
        ask = PATHS[CHAT].parse(CHAT, body, keep=False)
        chain = chain_of(ask, ask.model or "")
        assert chain is not None
        look = self.watcher.classify(ask, chain, session=session, path=CHAT, body=body)
        if not isinstance(look, DiffCandidate):
            return look
        self.compared += 1
        look.read()
        found = compare(look.before, look.after, from_bytes=look.from_bytes, body=body, path=CHAT)
        self.watcher.record_diff(look, found)
        return look.sighting


def said(role: str, about: str, sentences: int = 6) -> dict[str, Any]:
    """A message of a few hundred bytes."""
    return {"role": role, "content": " ".join(f"{about}, point {n}, as {role} sees it." for n in range(sentences))}


def turns(about: str, count: int, system: dict[str, Any] = SYSTEM) -> Messages:
    """A conversation of so many questions; the last one is not answered yet."""
    messages = [system]
    for turn in range(count):
        messages += [said("user", f"{about} question {turn}"), said("assistant", f"{about} answer {turn}")]
    return messages[:-1]


def test_turns_that_append_are_one_conversation_and_compared_with_nothing() -> None:
    """Each turn is known up to the end of the one before, and one turn further."""
    seeing = Seeing()
    sightings = [seeing.see(turns("brakes", count)) for count in range(1, 12)]
    assert len({sighting.conversation for sighting in sightings}) == 1
    assert [sighting.turn for sighting in sightings] == list(range(11))
    assert all(sighting.appended and not sighting.repeated_bytes for sighting in sightings)
    assert seeing.compared == 0


def test_conversations_on_one_template_are_compared_with_nothing() -> None:
    """A second and third conversation behind the same system prompt are new ones of one template, which ends where
    the user's words begin."""
    seeing = Seeing(excerpts=True)
    first, second, third = (seeing.see(turns(about, 1)) for about in ("brakes", "saddles", "wheels"))
    assert seeing.compared == 0
    assert len({each.conversation for each in (first, second, third)}) == 3
    assert second.template == third.template != 0
    assert seeing.see(turns("brakes", 2)).template == second.template
    (template,) = seeing.watcher.templates()
    assert template.id == template.key == second.template
    assert template.prompt_bytes == len(b"\x1esystem\x1f" + SYSTEM["content"].encode())
    assert (template.messages, template.conversations, template.tools) == (1, 3, 0)
    assert template.label == "You help the customers of a bicycle shop."
    assert json.loads(template.body)["messages"][0] == SYSTEM
    assert not seeing.watcher.templates()


def dated(at: int) -> dict[str, Any]:
    """The system prompt with a time at its top."""
    return {"role": "system", "content": f"2026-11-{10 + at} 10:3{at}:17\n" + RULES}


@pytest.mark.parametrize("session", ["", "s1"])
def test_a_timestamp_at_the_top_is_found_in_a_conversation(session: str) -> None:
    """Though its first block is unknown, the next turn is compared with the one before: nearly all is repeated."""
    seeing = Seeing()
    first = seeing.see(turns("brakes", 3, dated(0)), session=session)
    second = seeing.see(turns("brakes", 4, dated(1)), session=session)
    assert second.conversation == first.conversation
    assert (second.turn, second.appended) == (1, False)
    assert second.difference is not None
    assert second.difference.change is DifferenceKind.TIMESTAMP
    assert second.repeated_bytes > 4_000


def test_a_timestamp_at_the_top_is_found_in_a_template() -> None:
    """New conversations whose system prompt differs only by a time are of one template, and each tells what it
    repeats."""
    seeing = Seeing()
    first, second, third = (seeing.see(turns(f"part {at}", 1, dated(at))) for at in range(3))
    assert second.template == third.template != 0
    assert second.difference is not None
    assert third.difference is not None
    assert third.difference.change is DifferenceKind.TIMESTAMP
    assert third.appended
    assert second.conversation != first.conversation
    assert 2_500 < third.repeated_bytes < 3_200


def edited(messages: Messages) -> Messages:
    """An early answer is another one."""
    return [*messages[:2], said("assistant", "a summary of all this", 3), *messages[3:]]


def cut(messages: Messages) -> Messages:
    """Its first two messages are gone."""
    return [messages[0], *messages[3:]]


@pytest.mark.parametrize(
    ("damage", "change"), [(edited, DifferenceKind.EDITED_HISTORY), (cut, DifferenceKind.TRUNCATED_HISTORY)]
)
def test_history_that_changed_is_found_without_a_hint(
    damage: Callable[[Messages], Messages], change: DifferenceKind
) -> None:
    """What is left of a conversation leads to it, among others of the same template."""
    seeing = Seeing()
    for about in ("saddles", "brakes", "wheels"):
        for count in range(1, 6):
            before = seeing.see(turns(about, count))
            assert before.appended
    found = seeing.see([*damage(turns("brakes", 5)), said("assistant", "well"), said("user", "and then")])
    assert found.difference is not None
    assert found.difference.change is change
    assert not found.appended
    assert found.turn == 5


def test_tools_in_another_order_are_found() -> None:
    """Within a conversation, and for a new one."""
    seeing = Seeing()
    first = seeing.see(turns("brakes", 2), tools=TOOLS)
    second = seeing.see(turns("brakes", 3), tools=TOOLS[::-1])
    third = seeing.see(turns("wheels", 1), tools=[*TOOLS[2:], *TOOLS[:2]])
    assert first.tools
    assert second.conversation == first.conversation
    assert second.difference is not None
    assert second.difference.change is DifferenceKind.TOOL_ORDER
    assert third.conversation != first.conversation
    assert third.difference is not None
    assert third.difference.change is DifferenceKind.TOOL_ORDER


def test_conversations_that_begin_with_the_same_words_are_not_history_that_changed() -> None:
    """Two callers ask the very same first prompt, get other answers and go on: nothing diverged."""
    seeing = Seeing()
    seeing.see(turns("brakes", 1))
    seeing.see(turns("brakes", 1))
    one = seeing.see([*turns("brakes", 1), said("assistant", "yes"), said("user", "the next thing is this")])
    other = seeing.see([*turns("brakes", 1), said("assistant", "no"), said("user", "the next thing is this")])
    assert one.conversation != other.conversation
    assert other.appended
    assert not other.repeated_bytes
    assert seeing.compared == 0


def test_an_answer_made_again_is_no_difference() -> None:
    """The last question is asked in other words: the same conversation, and nothing is computed again for it."""
    seeing = Seeing()
    first = seeing.see(turns("brakes", 3))
    again = seeing.see([*turns("brakes", 3)[:-1], said("user", "put differently")])
    assert again.conversation == first.conversation
    assert again.difference is None
    assert again.appended


def test_examples_that_many_begin_with_are_a_template() -> None:
    """Questions behind the same examples are conversations of their own, once there are some."""
    seeing = Seeing()
    for n in range(6):
        last = seeing.see([*turns("example", 3), said("assistant", "last example"), said("user", f"question {n}")])
    assert seeing.compared == 0
    assert last.template
    assert last.turn == 0


def test_a_prompt_of_another_identity_is_recognised() -> None:
    """The same prompt under another cache salt: as many bytes as both begin with, and nothing is known of its own."""
    seeing = Seeing()
    for count in range(1, 5):
        seeing.see(turns("brakes", count), cache_salt="a")
    other = seeing.see([*turns("brakes", 4)[:-1], said("user", "something else")], cache_salt="b")
    assert other.known_bytes == 0
    assert other.identity_bytes > 2_500
    assert seeing.see(turns("brakes", 4), cache_salt="b").identity_bytes == 0
    assert seeing.compared == 0


def test_calls_of_tools_add_up() -> None:
    """Each result counts, in the turn that brings it and in all that follow, however the history came."""
    call = {"id": "c", "type": "function", "function": {"name": "refund", "arguments": "{}"}}
    messages: Messages = [SYSTEM, said("user", "brakes")]
    seeing = Seeing()
    for calls in range(5):
        assert seeing.see(messages, tools=TOOLS).tool_calls == calls
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": f"refunded {calls} " * 9},
        ]
    assert Seeing().see(messages, tools=TOOLS).tool_calls == 5


def test_templates_are_bounded_and_the_least_used_go() -> None:
    """Of more templates than are allowed, those of the latest conversations are known."""
    seeing = Seeing()
    systems = [{"role": "system", "content": f"{n} is your number. " + RULES} for n in range(40)]
    names = [[seeing.see(turns(f"{about}", 1, system)).template for about in "ab"] for system in systems]
    assert len({own for _, own in names}) == 40
    (shared,) = {first for first, _ in names[1:]}  # of those that begin a prompt with other rules as well
    assert {template.id for template in seeing.watcher.templates()} <= {shared, *(own for _, own in names[-16:])}


def test_templates_below_others_are_called_by_what_is_their_own() -> None:
    """Two shops share the rules, and have a list each: the lists' first words, not the rules', tell them apart,
    whichever of the three was learned first."""
    seeing = Seeing(excerpts=True)
    for lists in ((1, 2), (2, 1)):
        for about in ("brakes", "saddles"):
            for shop in lists:
                parts = f"\nShop {shop} sells:\n" + f"part {shop}\n" * 90
                system = {"role": "system", "content": SYSTEM["content"] + parts}
                seeing.see(turns(f"{about} {lists} {shop}", 1, system))
    labels = {template.label for template in seeing.watcher.templates()}
    assert len(labels) == 3
    assert "You help the customers of a bicycle shop." in labels
    assert {label[:1] for label in labels} == {"Y", "1", "2"}


def test_words_that_models_say_to_everybody_are_nobodys() -> None:
    """Two applications whose models answer the same have nothing to do with each other."""
    seeing = Seeing()
    done = {"role": "assistant", "content": "It is done, and nothing else was to be done. " * 3}
    other = {"role": "system", "content": "You count bricks. " * 60}
    for about in ("brakes", "saddles"):
        seeing.see([SYSTEM, said("user", about), done, said("user", f"{about} again")], tools=TOOLS)
    before = seeing.compared
    seen = seeing.see([other, said("user", "bricks"), done, said("user", "more bricks")])
    assert seen.difference is None
    assert (seen.turn, seen.template) == (0, 0)
    assert seeing.compared == before


def test_a_breakpoint_of_the_cache_ends_a_template() -> None:
    """Where a client says how far its prompt is shared, the first one tells of the template."""
    watcher = PromptTracker(8 << 20, 1 << 20, 16, excerpts=False, seed=1)
    body = json.dumps({"model": "m", "messages": turns("brakes", 1)}).encode()
    ask = PATHS[CHAT].parse(CHAT, body, keep=False)
    chain = chain_of(ask, "m")
    assert ask.prompt is not None
    assert chain is not None
    ask.prompt.hint_bytes = 1_100
    sighting = watcher.classify(ask, chain, session="", path=CHAT, body=body)
    (template,) = watcher.templates()
    assert isinstance(sighting, PromptAnalysis)
    assert sighting.template == template.id
    assert (template.prompt_bytes, template.conversations) == (1_100, 1)


@pytest.mark.parametrize("many", [1, 100])
def test_tools_of_a_template_are_counted(many: int) -> None:
    """However many there are; they are its label where it has no words, few with their names, those of many are not
    read."""
    seeing = Seeing(excerpts=True)
    tools = [{**TOOLS[n % 4]} for n in range(4 * many)]
    for about in ("brakes", "wheels"):
        seeing.see([said("user", about)], tools=tools)
    (template,) = seeing.watcher.templates()
    assert template.tools == 4 * many
    names = ": look_up_order, refund, ask_a_human, write_mail" if many == 1 else ""
    assert template.label == f"{4 * many} tools{names}"


@pytest.mark.parametrize("excerpts", [False, True])
def test_a_template_that_ends_within_the_tools_has_those_before(excerpts: bool) -> None:
    """Where two applications have the first tools in common, the whole ones are counted, and named where words may be
    shown."""
    seeing = Seeing(excerpts=excerpts)
    for other in ("count_bricks", "lay_bricks"):
        function = {**TOOLS[3]["function"], "name": other}
        seeing.see([said("user", other)], tools=[*TOOLS[:3], {"type": "function", "function": function}])
    (template,) = seeing.watcher.templates()
    assert (template.tools, template.messages) == (3, 0)
    assert template.label == ("3 tools: look_up_order, refund, ask_a_human" if excerpts else "")


def test_many_names_of_tools_are_cut_between_two() -> None:
    """A label has room for some, and says that there are more."""
    names = [f"tool_number_{number}" for number in range(9)]
    label = _named_tools(names, 9)
    assert label == "9 tools: tool_number_0, tool_number_1, tool_number_2, tool_number_3, ..."
    assert _named_tools(["x" * 100], 1) == "1 tool"
    assert len(label) <= LABEL_CHARS_MAX


@pytest.mark.inside
def test_what_a_glance_tells_a_longer_look_would_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """New conversations on a template, and other last messages behind the same history, with tools or without, are
    seen alike either way."""
    call = {"id": "c", "type": "function", "function": {"name": "refund", "arguments": "{}"}}
    called = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "refunded " * 9},
    ]
    prompts = [
        [*turns("example", 3)[: 1 + 2 * (n % 4)], said("user", f"question {n}, {n % 3} times")] for n in range(60)
    ]
    prompts += [[*prompts[n], *called, said("user", f"then {n} of {n % 5}")] for n in range(0, 60, 7)] * 2
    prompts += [[*prompts[7], *called, said("user", f"or {n}")] for n in range(9)]
    glances: list[bool] = []

    def counted(*arguments: Any, **named: Any) -> PromptAnalysis | None:
        seen = fast_path.matches_known_change(*arguments, **named)
        glances.append(seen is not None)
        return seen

    for fields in ({}, {"tools": TOOLS}):
        monkeypatch.setattr(watching, "matches_known_change", counted)
        one = Seeing()
        glanced = [one.see(messages, **fields) for messages in prompts]
        monkeypatch.setattr(watching, "matches_known_change", lambda *_, **__: None)
        other = Seeing()
        assert glanced == [other.see(messages, **fields) for messages in prompts]
    assert sum(glances) > 60

"""A line that one of two prompts has and the other has not: what a release puts in, seen against what was there."""

from __future__ import annotations

import pytest

from router.core.insights.difference.compare import compare
from router.core.types.cache_misses import Difference, DifferenceKind
from tests.core.insights.difference.compared import CHAT, RULES, chat, seen

TEXT = f"You are a coding agent.\n{RULES}"

# What was put in, what kind of change that is, and the bytes before the token.
PUT_IN = [
    ("It is 2026-11-25T14:03:07+00:00. ", DifferenceKind.TIMESTAMP, 6),
    ("Current time: 2026-11-25 14:03:07\n\n", DifferenceKind.TIMESTAMP, 14),
    ("Today is Wednesday, November 25, 2026, 02:03 PM.\n", DifferenceKind.TIMESTAMP, 9),
    ('<context now="1795615387123"/>\n', DifferenceKind.TIMESTAMP, 14),
    ("Request ID: 3f2b8a6e-9d1c-4f7e-8b2a-1c3d5e7f9a0b\n", DifferenceKind.IDENTIFIER, 12),
    ("trace_id=4bf92f3577b34da6a3ce929d0e0e4736\n", DifferenceKind.IDENTIFIER, 9),
    ("[request req_8fa2Kd93ZpQ1vB4x] ", DifferenceKind.IDENTIFIER, 9),
    ("Be brief, and never guess.\n", DifferenceKind.OTHER, 0),
    ("Turn 3 of 12.\n", DifferenceKind.OTHER, 0),
    ("Answer in 1999 words, as of today.\n", DifferenceKind.OTHER, 0),
    ("Use read_file2 and write_file_v3 only.\n", DifferenceKind.OTHER, 0),
    (
        "Rules of 2026-11-25, in force from now on, for all of the agents, in all of their work:\n" * 3,
        DifferenceKind.OTHER,
        0,
    ),
]


def differs(before: str, after: str) -> Difference:
    """The difference of two system prompts."""
    said = seen(CHAT, chat(before), chat(after)).difference
    assert said is not None
    return said


@pytest.mark.parametrize("at", [0, 23, len(TEXT)])
@pytest.mark.parametrize(("line", "change", "lead"), PUT_IN)
def test_what_is_put_in_is_told_from_one_prompt(line: str, change: DifferenceKind, lead: int, at: int) -> None:
    """A date or an identifier tells itself, before everything, within and behind all; words and numbers that may stay
    as they are do not. Where the token begins is told, beside the first byte that differs."""
    said = differs(TEXT, TEXT[:at] + line + TEXT[at:])
    assert said.change is change
    assert (said.message, said.path) == (0, "messages[0].content")
    assert at <= said.at_bytes <= at + 1
    assert said.token_bytes == (at + lead if change is not DifferenceKind.OTHER else -1)
    assert said.lost_bytes > 0


@pytest.mark.parametrize(("line", "change", "lead"), PUT_IN[:7])
def test_what_is_taken_out_is_told_as_well(line: str, change: DifferenceKind, lead: int) -> None:
    """A release that is taken back: the same fault as before."""
    said = differs(line + TEXT, TEXT)
    assert said.change is change
    assert said.token_bytes <= lead


@pytest.mark.parametrize(("line", "change", "lead"), PUT_IN[:6])
def test_what_is_put_in_begins_where_it_changes_later(line: str, change: DifferenceKind, lead: int) -> None:
    """Two prompts that both have the line differ within the same token, whichever of its digits it is."""
    other = line.translate(str.maketrans("457", "568"))
    said = differs(line + TEXT, other + TEXT)
    assert said.change is change
    assert abs(said.token_bytes - lead) <= 4
    assert said.at_bytes >= said.token_bytes


def test_a_line_among_other_changes_is_found_by_what_follows() -> None:
    """The texts differ further behind, too: another agent's prompt on the same tools."""
    said = differs(f"You are agent 3. {TEXT}", f"It is 2026-11-25T14:03:07Z. You are agent 0. {TEXT}")
    assert (said.change, said.token_bytes) == (DifferenceKind.TIMESTAMP, 6)


def test_history_is_not_searched_for_what_was_put_in() -> None:
    """A date in an earlier answer is an edit of what was said, not the time of day."""
    before, after = chat(), chat()
    after["messages"][4]["content"] = "As of 2026-11-25: " + after["messages"][4]["content"]
    said = seen(CHAT, before, after).difference
    assert said is not None
    assert said.change is DifferenceKind.EDITED_HISTORY


@pytest.mark.parametrize("forged", [b"\x1dCANARY\x1f", b"\x1eCANARY\x1f"])
def test_words_of_a_prompt_name_no_place(forged: bytes) -> None:
    """A text may hold the separators of canonical bytes: what it says between them is no field's name, and no role."""
    one, other = [
        b"\x1esystem\x1f" + b"Be kind. " * 9 + b"\x1euser\x1fhi " + forged + at + RULES.encode() for at in (b"1", b"2")
    ]
    found = compare(one, other, body=b"{}", path=CHAT).difference
    assert found is not None
    assert "CANARY" not in repr(found)

"""Promises of the corpus itself, so that what is measured on it can be believed. The router's classifier has no part
in it: truths are held against requests as sent, by comparing them byte for byte."""

from __future__ import annotations

import itertools
import json
import re
from functools import cache
from typing import Any

import pytest

from router.core.dialects import PATHS
from router.core.types.cache_misses import DifferenceKind
from tests.core.insights import conversations
from tests.core.insights.conversations import path_of
from tests.core.insights.corpus import CLEAN, TURNS_MAX, TURNS_MIN, Options, corpus, shapes
from tests.core.insights.rewriting import ALL
from tests.core.insights.truth import Request

pytestmark = pytest.mark.long
SEEDS = (0, 1, 3)
WINDOW_BYTES = 64


@cache
def requests(seed: int) -> list[Request]:
    """Made once."""
    return corpus(seed)


def damaged() -> list[Request]:
    """All requests that differ from an earlier one."""
    return [request for seed in SEEDS for request in requests(seed) if request.truths]


def same_bytes(left: bytes, right: bytes) -> int:
    """How many bytes both begin with: one by one."""
    for at, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return at
    return min(len(left), len(right))


def found_at(body: bytes, path: str) -> Any:
    """The value at a JSON path, `a.b[2].c`."""
    value = json.loads(body)
    for key, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        value = value[int(index)] if index else value[key]
    return value


def test_seeds_decide() -> None:
    """The same seed makes the same requests, another seed makes others, and no request is made twice."""
    again = [(r.at_s, r.session, r.body) for r in corpus(0)]

    assert again == [(r.at_s, r.session, r.body) for r in requests(0)]
    assert not {r.body for r in requests(0)} & {r.body for r in requests(1)}
    assert len({r.body for r in requests(0)}) == len(requests(0))


def test_twelve_kinds_in_many_ways() -> None:
    """All kinds of change are there, each in four ways or more, and seeds of either half show all of them in turn."""
    assert set(ALL) == set(DifferenceKind)
    assert all(len({damage.name for damage in ways}) == len(ways) >= 4 for ways in ALL.values())
    most = 2 * max(map(len, ALL.values()))
    for first in (0, 1):
        seen = {
            (kind, ways[seed // 2 % len(ways)].name) for seed in range(first, most, 2) for kind, ways in ALL.items()
        }
        assert len(seen) == sum(map(len, ALL.values()))


def test_requests_are_what_they_should_be() -> None:
    """All three APIs, sessions with and without a hint, sizes and lengths as asked for, at least one of each kind."""
    all_ = [request for seed in SEEDS for request in requests(seed)]
    hinted = {r.session: bool(r.hint or r.style.key) for r in all_}
    lengths = {session: sum(r.session == session for r in all_) for session in hinted}

    assert {r.style.path for r in all_} == set(conversations.PATHS)
    assert 0.3 < sum(hinted.values()) / len(hinted) < 0.8
    assert min(lengths.values()) >= TURNS_MIN
    assert max(lengths.values()) <= TURNS_MAX + 1  # one is tried again
    assert {truth.change for r in all_ for truth in r.truths} == set(DifferenceKind)
    assert sum(not r.judged for r in all_) < 0.03 * len(all_)


def test_sessions_run_at_the_same_time() -> None:
    """Requests of different sessions stand between each other, each session's in order."""
    order = [r.session for r in requests(0)]
    turns: dict[str, list[int]] = {}
    for request in requests(0):
        turns.setdefault(request.session, []).append(request.turn)

    assert sum(a != b for a, b in itertools.pairwise(order)) > len(order) / 2
    assert all(each == list(range(len(each))) for each in turns.values())


def test_shapes_are_recorded() -> None:
    """How sessions grow is taken from recorded ones; a larger scale makes larger prompts, up to what was recorded."""
    small, large = (max(len(r.text) for r in corpus(0, Options(scale=scale))) for scale in (0.1, 0.6))

    assert len(shapes()) > 100
    assert small < large


@pytest.mark.parametrize("seed", SEEDS)
def test_canonical_bytes_are_the_routers(seed: int) -> None:
    """The corpus writes the same canonical bytes as the router's dialects read, for every request in every style."""
    for request in requests(seed):
        prompt = PATHS[request.style.path].parse(request.style.path, request.body).prompt
        assert prompt is not None
        assert prompt.text == request.text, f"{request.session}/{request.turn} {request.style}"


def test_clean_requests_are_clean() -> None:
    """A clean request begins with its predecessor, or is an earlier one again, or says nothing again behind the place
    where it leaves it."""
    for request, before in _followers():
        if request.truths or not request.judged:
            continue
        same = same_bytes(before.text, request.text)
        if same not in (len(before.text), len(request.text)):
            behind = request.text.count(b"\x1e", 0, same)  # pieces up to the one that differs
            assert not set(before.pieces[behind + 1 :]) & set(request.pieces[behind + 1 :]), request.damage


def _followers() -> list[tuple[Request, Request]]:
    last: dict[str, Request] = {}
    pairs = []
    for seed in SEEDS:
        for request in requests(seed):
            if request.session in last:
                pairs.append((request, last[request.session]))
            last[request.session] = request
    return pairs


def test_clean_deployments_have_no_truths() -> None:
    """Deployments without damage have clean requests only, of every sort, and sub-agents share their beginning."""
    clean = [r for seed in SEEDS for r in requests(seed) if r.damage.startswith("clean: ")]

    assert {r.damage.removeprefix("clean: ") for r in clean} == set(CLEAN)
    assert not any(r.truths for r in clean)
    agents = [r for r in clean if r.damage == "clean: agents" and r.session.startswith(f"{SEEDS[0]}/")]
    assert len({r.session for r in agents}) >= 4
    assert len({r.pieces[:2] for r in agents}) == 1


def test_offsets_and_messages_are_true() -> None:
    """Two prompts are equal up to the offset and differ there, within the message that is told, which has that role."""
    for request in damaged():
        for truth in request.truths[:3]:
            before, after = truth.before.text, request.text
            assert same_bytes(before, after) == truth.offset_bytes < len(before)
            message = after.count(b"\x1e", 0, truth.offset_bytes) - 1
            assert message == truth.place.message, f"{request.damage}: {truth.path}"
            piece = request.pieces[message + 1]
            assert truth.role.encode() == (piece[1:].partition(b"\x1f")[0] if message >= 0 else b"")


def test_paths_are_true() -> None:
    """At the path of a text stands, in the body as sent, a text that is another in the request before, and differs
    from it first at the byte that is told."""
    seen = set()
    for request in damaged():
        truth = request.truths[0]
        if truth.at_bytes is None:
            continue
        old = path_of(truth.place, truth.before.talk, truth.before.style)
        left, right = found_at(truth.before.body, old), found_at(request.body, truth.path)
        assert same_bytes(left.encode(), right.encode()) == truth.at_bytes, f"{request.damage}: {truth.path}"
        seen.add((truth.change, request.style.path))
    assert {path for _, path in seen} == set(conversations.PATHS)
    assert len({change for change, _ in seen}) >= 7


def test_structure_is_true() -> None:
    """Tools and calls that are told to differ stand at the path, in the body as sent, unless the tool is gone."""
    seen = set()
    for request in damaged():
        truth = request.truths[0]
        if truth.at_bytes is not None or truth.place.kind not in ("tool", "call"):
            continue
        seen.add(truth.change)
        if truth.place.kind == "tool" and truth.place.index >= len(request.talk.tools):
            assert truth.change == DifferenceKind.TOOL_REMOVED
            continue
        found = found_at(request.body, truth.path)
        if truth.change == DifferenceKind.KEY_ORDER:
            old = found_at(truth.before.body, path_of(truth.place, truth.before.talk, truth.before.style))
            new, was = (json.loads(each) if isinstance(each, str) else each for each in (found, old))
            assert new == was or isinstance(found, str)
            assert json.dumps(found) != json.dumps(old)
        else:
            assert found.get("name", found.get("function", {}).get("name"))
    assert seen == {
        DifferenceKind.TOOL_ORDER,
        DifferenceKind.TOOL_ADDED,
        DifferenceKind.TOOL_REMOVED,
        DifferenceKind.KEY_ORDER,
    }


def test_kinds_are_true_of_tools() -> None:
    """Names of tools are the same in another order, one more, or one fewer, as the kind says."""
    for request in damaged():
        truth = request.truths[0]
        old, new = ({tool.name for tool in each.talk.tools} for each in (truth.before, request))
        if truth.change == DifferenceKind.TOOL_ADDED:
            assert new > old
        elif truth.change == DifferenceKind.TOOL_REMOVED:
            assert new < old
        else:
            assert new == old


def test_white_space_is_all_that_changed() -> None:
    """Of damage to white space, the text is the same without it; of damage to the order of passages, words are."""
    for request in damaged():
        truth = request.truths[0]
        if truth.change not in (DifferenceKind.WHITESPACE, DifferenceKind.REORDERED_CONTEXT):
            continue
        old = found_at(truth.before.body, path_of(truth.place, truth.before.talk, truth.before.style))
        new = found_at(request.body, truth.path)
        if truth.change == DifferenceKind.WHITESPACE:
            assert "".join(old.split()) == "".join(new.split())
        else:
            assert sorted(re.findall(r"[a-z_]+", old)) == sorted(re.findall(r"[a-z_]+", new))


def test_repeated_bytes_are_true() -> None:
    """What is told to be repeated is found again behind the difference, window by window, give or take the piece that
    changed and windows over an edge."""
    for request in damaged()[::11]:
        truth = request.truths[0]
        old = truth.before.text[truth.offset_bytes :]
        new = request.text[max(truth.offset_bytes, truth.known_bytes) :]
        known = {old[i : i + WINDOW_BYTES] for i in range(len(old) - WINDOW_BYTES + 1)}
        covered = bytearray(len(new))
        for i in range(len(new) - WINDOW_BYTES + 1):
            if new[i : i + WINDOW_BYTES] in known:
                covered[i : i + WINDOW_BYTES] = b"\x01" * WINDOW_BYTES
        found = sum(covered)
        assert abs(found - truth.repeated_bytes) <= 0.1 * truth.repeated_bytes + 250, (
            f"{request.damage}: {found} {truth.repeated_bytes}"
        )

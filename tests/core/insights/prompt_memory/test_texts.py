"""What the texts of earlier prompts say of the next one."""

from __future__ import annotations

import tracemalloc
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.insights.prompt_memory import texts
from router.core.insights.prompt_memory.diff_candidate import DiffCandidate
from router.core.insights.prompt_memory.prompt_tracker import PromptTracker
from router.core.insights.prompt_memory.texts import LINKS_MAX, ChildEdges, Record, Text, Texts, common, piece
from router.core.prompts.block_keys import BLOCK_BYTES, Chain, chain_of
from router.core.types.cache_misses import PromptAnalysis
from router.core.types.requests import MessageBoundary, MessagePrefix, Prompt, RequestSpec
from tests.support.examples import examples

pytestmark = pytest.mark.promise("Prompt texts are kept in memory only, within `insights.memory_bytes_max`.", "records")

MIB = 1 << 20


def watcher(memory_bytes_max: int = 16 * MIB, templates_max: int = 16, *, excerpts: bool = False) -> PromptTracker:
    """An empty memory."""
    return PromptTracker(memory_bytes_max, MIB, templates_max, excerpts=excerpts, seed=3)


def asked(text: bytes, model: str = "m", skipped_bytes: int = 0) -> tuple[RequestSpec, Chain]:
    """A prompt of these bytes, of which some may have been read before."""
    ask = RequestSpec(model, Prompt(text, len(text)))
    chain = chain_of(ask, model)
    assert chain is not None
    if skipped_bytes:
        joint = MessageBoundary(b"", MessagePrefix(skipped_bytes, 0, (), 0), [], lambda: Prompt(text, len(text)))
        ask.prompt = Prompt(text[skipped_bytes:], len(text), skipped_bytes=skipped_bytes, joint=joint)
    return ask, chain


def look(memory: PromptTracker, text: bytes, model: str = "m", skipped_bytes: int = 0) -> PromptAnalysis:
    """Seen, and kept without being compared."""
    ask, chain = asked(text, model, skipped_bytes)
    seen = memory.classify(ask, chain, session="", path="/v1/completions", body=b"{}")
    if isinstance(seen, DiffCandidate) and seen.lacks:
        assert ask.prompt is not None
        assert ask.prompt.joint is not None
        seen = memory.classify(
            ask, chain, session="", path="/v1/completions", body=b"{}", whole=ask.prompt.joint.whole()
        )
        assert not isinstance(seen, DiffCandidate) or not seen.lacks
    if isinstance(seen, DiffCandidate):
        memory.record_diff(seen, None)
        return seen.sighting
    return seen


def shared(one: bytes, other: bytes) -> int:
    """Slowly."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


# A prompt: which earlier one it begins like (0: none), how much of that, and what stands behind it.
BLOCKS = st.builds(
    lambda letters, times: bytes(letters) * times,
    st.lists(st.sampled_from(b"ab\x1e"), min_size=1, max_size=4),
    st.sampled_from([1, 3, BLOCK_BYTES // 2, BLOCK_BYTES, 3 * BLOCK_BYTES - 1]),
)
STEPS = st.lists(st.tuples(st.integers(0, 40), st.floats(0, 1), BLOCKS, st.booleans()), min_size=1, max_size=40)


def grown(said: list[bytes], step: tuple[int, float, bytes, bool]) -> bytes:
    """The next prompt."""
    which, part, behind, whole = step
    before = said[which % len(said)] if said and which else b""
    return before[: len(before) if whole else int(len(before) * part)] + behind


@settings(max_examples=examples(60), deadline=None)
@given(STEPS, st.booleans())
def test_known_is_the_longest_prefix_of_all(steps: list[tuple[int, float, bytes, bool]], skips: bool) -> None:
    """Whatever is appended, forked and repeated, known are as many bytes as any earlier prompt begins with, also where
    most of the prompt was read before and is not there. Prompts without a whole block are nobody's concern."""
    memory, said = watcher(), list[bytes]()
    for step in steps:
        text = grown(said, step)
        longest = max((shared(text, other) for other in said), default=0)
        seen = look(memory, text, skipped_bytes=longest if skips else 0)
        whole = len(text) >= BLOCK_BYTES
        assert seen.known_bytes == (longest if whole else 0)
        if whole:
            said.append(text)


@settings(max_examples=examples(40), deadline=None)
@given(STEPS)
def test_what_is_forgotten_is_forgotten_as_a_whole(steps: list[tuple[int, float, bytes, bool]]) -> None:
    """With a small memory known is at most the truth, and never less than what the prompt just before it shares."""
    memory, said = watcher(64_000), list[bytes]()
    for step in steps:
        text = grown(said, step)[: 64_000 // 8 // BLOCK_BYTES * BLOCK_BYTES]
        known = look(memory, text).known_bytes
        assert known <= max((shared(text, other) for other in said), default=0)
        if len(text) >= BLOCK_BYTES:
            if said:
                assert known >= shared(text, said[-1])
            said.append(text)


def test_a_long_line_of_turns_is_one_text() -> None:
    """A conversation of many more turns than records are linked is read back byte for byte."""
    memory, said = Texts(16 * MIB), b""
    for turn in range(3 * LINKS_MAX):
        said += b"turn %d " % turn * 9
        _, chain = asked(said)
        text = Text(chain.keys, chain.root, chain.end_key, said, 0, len(said), 0)
        young, known = memory.match(text)
        assert known.known == len(said) - len(b"turn %d " % turn * 9)
        record = Record(None, 0, b"", 0, 0, conversation=7)
        memory.keep(text, young, known, record, [])
        assert record.links <= LINKS_MAX
        assert piece(record, 0, record.end) == said
        assert piece(record, 100, 200) == said[100:200]


@pytest.mark.parametrize("run_max", [2, 512])
def test_the_nearest_of_siblings_shares_most(run_max: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many ways to go on, in however many runs, the neighbour in order shares the longest prefix."""
    monkeypatch.setattr(texts, "RUN_SIBLINGS_MAX", run_max)
    random = Random(run_max)
    for _ in range(40):
        first = Record(None, 0, b"m", 1, 0)
        siblings = ChildEdges([[b"m"]], [[first]], [b"m"])
        for _ in range(40):
            tail = bytes(random.choices(b"amz", k=random.randint(1, 6)))
            record, known, run, at = siblings.nearest(tail)
            kept = [each for run in siblings.tails for each in run]
            assert kept == sorted(kept)
            assert known == max(shared(tail, each) for each in kept) == shared(tail, record.own)
            if known < len(tail):
                siblings.add(tail, Record(None, 0, tail, len(tail), 0), run, at)
        assert siblings.count == sum(map(len, siblings.tails))


@given(st.binary(max_size=40), st.binary(max_size=40), st.binary(max_size=40))
def test_common_is_exact(lead: bytes, one: bytes, other: bytes) -> None:
    """As if compared byte by byte."""
    assert common(lead + one, lead + other) == shared(lead + one, lead + other)


@pytest.mark.parametrize(("size", "turns"), [(40, 2_400), (300, 2_400), (5_000, 500)])
def test_memory_stays_within_its_bound(size: int, turns: int) -> None:
    """However many conversations come, short or long, on a template or not, no more memory is held than allowed."""
    limit, random = MIB, Random(1)
    template = b"\x1esystem\x1f" + random.randbytes(700).hex().encode() + b"\x1euser\x1f"
    tracemalloc.start()
    try:
        memory = watcher(limit)
        before, most = tracemalloc.get_traced_memory()[0], 0
        for turn in range(turns):
            lead = template if turn % 3 else b"\x1euser\x1f"
            first = lead + random.randbytes(size // 2).hex().encode()
            look(memory, first)
            look(memory, first + b"\x1eassistant\x1f" + b"yes " * 20 + b"\x1euser\x1fmore")
            most = max(most, tracemalloc.get_traced_memory()[0] - before)
        assert limit // 4 < most <= limit
    finally:
        tracemalloc.stop()

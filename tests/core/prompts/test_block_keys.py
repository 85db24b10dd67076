from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.prompts.block_keys import BLOCK_BYTES, answer_keys, chain, key_at, root_key

ROOT = root_key(b"model", b"salt")
TEXTS = st.builds(lambda seed, size: Random(seed).randbytes(size), st.integers(0, 9), st.integers(0, 2_200))


@given(text=TEXTS, more=TEXTS)
@settings(deadline=None)
def test_a_longer_prompt_extends_the_chain(text: bytes, more: bytes) -> None:
    """Appending to a prompt keeps every key it had; there is one key per full block."""
    keys = chain(text, ROOT)
    assert len(keys) == len(text) // BLOCK_BYTES
    assert chain(text + more, ROOT)[: len(keys)] == keys


@given(text=TEXTS.filter(bool), at=st.integers(0, 4 * BLOCK_BYTES))
@settings(deadline=None)
def test_a_changed_byte_changes_every_key_behind_it(text: bytes, at: int) -> None:
    """Keys name whole prefixes: equal before the block that differs, all different from it on."""
    at %= len(text)
    changed = text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :]
    same = at // BLOCK_BYTES
    old, new = chain(text, ROOT), chain(changed, ROOT)
    assert old[:same] == new[:same]
    assert not set(old[same:]) & set(new[same:])


def test_identity_separates() -> None:
    """The same text under another model or salt shares no key, and field borders count."""
    text = b"x" * (3 * BLOCK_BYTES)
    roots = [
        ROOT,
        root_key(b"model", b"other"),
        root_key(b"modelsalt"),
        root_key(b"models", b"alt"),
        root_key(b"model", b"salt", b""),
        root_key(),
    ]
    keys = [key for root in roots for key in chain(text, root)]
    assert len(set(keys)) == 3 * len(roots)


@given(text=TEXTS, end=st.integers(0, 2_000))
@settings(deadline=None)
def test_key_at_depends_on_the_prefix_alone(text: bytes, end: int) -> None:
    """key_at(end) is the same whatever follows, and is nobody's block key."""
    end = min(end, len(text))
    whole, cut = chain(text, ROOT), chain(text[:end], ROOT)
    key = key_at(text, whole, ROOT, end)
    assert key == key_at(text[:end], cut, ROOT, end)
    assert key not in whole
    assert end >= BLOCK_BYTES or key != key_at(text, whole, ROOT + 1, end)


def test_key_at_tells_every_length_apart() -> None:
    """Prefixes of one text have as many different keys as lengths."""
    text = b"\x00" * (2 * BLOCK_BYTES)
    keys = chain(text, ROOT)
    assert len({key_at(text, keys, ROOT, end) for end in range(len(text) + 1)}) == len(text) + 1


def test_an_unseen_answer_takes_room_and_matches_nothing() -> None:
    """The stand-ins of an answer: one a block, to the nearest, steady, and apart from those of any other prompt."""
    keys = answer_keys(ROOT, 2 * BLOCK_BYTES + BLOCK_BYTES // 2)
    assert len(keys) == 3
    assert answer_keys(ROOT, BLOCK_BYTES // 2 - 1) == []
    assert answer_keys(ROOT, 5 * BLOCK_BYTES)[:3] == keys
    assert answer_keys(ROOT, 0) == []
    assert not set(keys) & set(answer_keys(key_at(b"", [], ROOT, 0), 2 * BLOCK_BYTES))
    assert len(answer_keys((1 << 64) - 1, 3 * BLOCK_BYTES)) == 3

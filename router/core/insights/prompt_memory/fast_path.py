"""Fast path for prompts that continue at the end of an earlier one, and for those that differ from earlier ones in
their last message only, with no text after it.

Nearly all prompts are of one of these kinds, so this path determines the cost of the observatory: a few look-ups by the
keys of their blocks, and one binary search. It finds no result that the longer search (prompt_tracker.py) would not
find too.
"""

from __future__ import annotations

from xxhash import xxh3_64_intdigest

from router.core.insights.prompt_memory import fingerprints
from router.core.insights.prompt_memory.shared_prefixes import Templates
from router.core.insights.prompt_memory.texts import FORK_BYTES, LINKS_MAX, RECORD_BYTES, Record, Texts
from router.core.prompts.block_keys import BLOCK_BYTES, Chain
from router.core.prompts.canonical import RS
from router.core.types.cache_misses import PromptAnalysis
from router.core.types.requests import Prompt

WAYS_MIN = 3  # number of different continuations at which shared messages count as examples, not as regenerated answers

_RS_TOOL = RS + b"tool\x1f"


def is_append(
    texts: Texts,
    templates: Templates,
    before: Record,
    chain: Chain,
    text: bytes,
    base: int,
    session: int,
    *,
    tools: bool,
) -> PromptAnalysis:
    """Keep the next turn after a whole earlier prompt, and return its result.

    - `before`: the earlier prompt's record, of the young generation and without a continuation yet.
    - `text`: begins at `base`, before the end of `before`.
    - `session`: a mark.
    """
    before.children = 1
    at, conversation, turn, root = before.end, before.conversation, before.turn + 1, chain.root
    template, calls, size = before.template, before.tool_calls, base + len(text)
    own = text[at - base :]
    if tools or calls:
        calls += own.count(_RS_TOOL)
    made = fingerprints.last(own, 0, root)
    if session:
        made.append(session)
    if template:
        templates.touch(template)
    record = Record(before, at, own, size, root, before.links + 1, conversation, turn, template, calls, tools)
    texts.append(chain.keys, chain.end_key, before, record, made)
    return PromptAnalysis(at, 0, 0, template, conversation, turn, True, tools, calls)


def matches_known_change(
    texts: Texts,
    templates: Templates,
    prompt: Prompt,
    chain: Chain,
    path: str,
    body: bytes,
    *,
    tools: bool,
    behind_max: int,
) -> PromptAnalysis | None:
    """Keep a conversation of a known template that departs from all others of it within its last message. None if it is
    any other prompt, or has more than `behind_max` bytes after that place."""
    text, base, keys = prompt.text, prompt.skipped_bytes, chain.keys
    last, young, old = text.rfind(RS), texts.young, texts.old.ends
    full = (base + last) // BLOCK_BYTES
    at = full * BLOCK_BYTES - base
    if (
        last <= 0
        or not full
        or at < 0
        or (old and (chain.end_key in old or (chain.spans and chain.spans[-1][0] in old)))
    ):
        return None
    owners, node = young.owners, keys[full - 1]
    siblings = young.forks.get(node)
    if siblings is None or (full < len(keys) and keys[full] in owners):
        return None
    tail = text[at : at + BLOCK_BYTES]
    record, shared, run, place = siblings.nearest(tail)
    known, size, first_end = full * BLOCK_BYTES + shared, base + len(text), prompt.first_user_end
    if known <= base + last or known == record.end or size - known > behind_max or record.links >= LINKS_MAX:
        return None
    of = record
    while of.start >= known and of.parent is not None:
        of = of.parent
    before = of.parent
    if known == of.end or (before is not None and before.end == of.start and before.children < before.asked):
        return None  # the prompt may continue that whole record
    if known >= first_end:
        end = known
        if siblings.count < WAYS_MIN:
            return None
    else:
        end = base + last
        if first_end != size or not text.startswith(fingerprints.USER, last):
            return None
    template, calls = keys[end // BLOCK_BYTES - 1], 0
    if templates.unlabelled or not templates.count_conversation(template, end, path, body):
        return None
    if tools and chain.spans:
        calls = of.tool_calls - of.own.count(_RS_TOOL, max(0, known - of.start)) + text.count(_RS_TOOL, known - base)
    root, conversation = chain.root, chain.end_key
    own, said = text[known - base :], text[last:]
    made = [xxh3_64_intdigest(said, root)] if len(said) > fingerprints.MESSAGE_BYTES_MIN else []
    new = Record(record, known, own, size, root, record.links + 1, conversation, 0, template, calls, tools)
    siblings.add(tail, new, run, place)
    texts.index_record(new, conversation, keys[full:], made, RECORD_BYTES + len(own) + FORK_BYTES + len(tail))
    return PromptAnalysis(known, 0, 0, template, conversation, 0, True, tools, calls)

"""Search for the prompt to compare a suspect with: the earlier prompt that it should have continued, or begun like."""

from __future__ import annotations

import re

from router.core.insights.difference.text_overlap import common_prefix
from router.core.insights.prompt_memory import fingerprints
from router.core.insights.prompt_memory.diff_candidate import (
    SKETCHED_BYTES_MIN,
    TEMPLATE_SKETCHED_BYTES_MAX,
    DiffCandidate,
    sketch,
)
from router.core.insights.prompt_memory.texts import Record, Text, Texts, piece
from router.core.prompts.block_keys import BLOCK_BYTES, chain
from router.core.prompts.canonical import RS

KNOWN_BYTES_MIN = 16  # two prompts with a shorter common beginning are not taken for one template on that basis alone
# longest prompt that is compared because of such a short beginning; a longer prompt must share a block
SHORT_BYTES = 4 << 10
ROOTS_MAX = 4_096  # roots: one for each model, or two, of each salt or tenant
REPEATED_BYTES_MIN = 64  # with fewer repeated bytes two prompts are not relatives
BEHIND_BYTES_MIN = 1 << 10  # text after a difference in the first user message that makes it worth comparing

_WORDS = re.compile(rb"[A-Za-z\x80-\xff]{2}")  # not matched by digits of a time


def find_related(suspect: DiffCandidate, texts: Texts, sketches: fingerprints.FingerprintSampling) -> None:
    """Find the earlier prompt to compare a suspect with, if one exists."""
    record, known, user, text, base = suspect.record, suspect.known.known, suspect.user, suspect.text, suspect.base
    in_template, continuing = known < user, suspect.size > suspect.first_user_end
    at = max(0, known - base)
    last = text.find(RS, at) < 0  # no message follows the one that differs
    behind = suspect.size - known
    if user < 0 and last and behind < SKETCHED_BYTES_MIN:
        return
    conversation, alone = 0, False
    if in_template or continuing:
        low = user - base if in_template else max(0, text.rfind(RS, 0, at + 1))
        conversation, alone = fingerprints.speaker(
            fingerprints.compute_lookup_marks(text, low, suspect.root), texts.find_conversation
        )
        if conversation and alone and in_template:
            asked = texts.latest(conversation)
            if asked is not None and _is_other_template(suspect, asked, goes_on=continuing and not asked.turn):
                conversation = 0
    if not conversation and continuing:
        suspect.least_bytes = 1 if user < 0 else REPEATED_BYTES_MIN
        conversation = texts.find_conversation(suspect.session) if suspect.session else 0
        if not conversation and record is not None and not in_template:
            suspect.related, suspect.own = texts.latest(record.conversation) or record, True
            if user >= 0:
                suspect.related = record
            return
    if conversation:  # a prompt that only begins with the same task is another conversation of the template
        suspect.related, suspect.own = texts.latest(conversation), continuing or not alone
    if suspect.related is None:
        _relate_template(suspect, texts, sketches, in_template=in_template, behind=behind)
    if suspect.related is None and suspect.session and behind >= BEHIND_BYTES_MIN:
        suspect.related, suspect.own = texts.latest(texts.find_conversation(suspect.session)), True


def _is_other_template(suspect: DiffCandidate, asked: Record, *, goes_on: bool) -> bool:
    """True if a prompt that was `asked` the same belongs to another template. Then it has none of the template's
    longest lines, or another earlier prompt shares more words with the suspect's beginning. The latter is not tested if
    the suspect may be its continuation (`goes_on`)."""
    if suspect.base:
        return False
    ours = suspect.text[: min(suspect.user, TEMPLATE_SKETCHED_BYTES_MAX)]
    theirs = piece(asked, 0, min(asked.end, TEMPLATE_SKETCHED_BYTES_MAX))
    same = common_prefix(ours, theirs)
    if not goes_on and _WORDS.search(ours, same, min(len(ours), suspect.known.known)):
        return True
    kept = fingerprints.paragraphs(ours.partition(RS)[2])
    return bool(kept) and not any(line in theirs for line in kept)


def _relate_template(
    suspect: DiffCandidate, texts: Texts, sketches: fingerprints.FingerprintSampling, *, in_template: bool, behind: int
) -> None:
    record, known, suspect.own = suspect.record, suspect.known.known, False
    suspect.least_bytes = REPEATED_BYTES_MIN
    if in_template and record is not None and known >= BLOCK_BYTES:
        suspect.related = record
        return
    if behind >= SKETCHED_BYTES_MIN or in_template:
        named = fingerprints.most(map(texts.find_conversation, sketch(suspect, sketches, in_template=in_template)))
        suspect.related = texts.latest(named) if named else None
        if named and not in_template:
            sketches.on_match()
    if suspect.related is None and in_template and known >= KNOWN_BYTES_MIN and suspect.size <= SHORT_BYTES:
        suspect.related = record


def find_other_identity(suspect: DiffCandidate, texts: Texts, seed: int, roots: dict[int, tuple[int, bool]]) -> int:
    """Count the bytes of the suspect's beginning that a prompt of another identity had, and record in `apart` if that
    prompt has a separate cache. `roots` are the known roots of prompts. Each has the number that separates the prompts
    of its tenant, and a flag for a salt."""
    if len(roots) >= ROOTS_MAX:
        roots.clear()
    roots[suspect.root] = suspect.whose, suspect.salted
    suspect.prefixes = fingerprints.prefixes(suspect.text[: suspect.size], seed)
    found = fingerprints.most(map(texts.find_conversation, reversed(suspect.prefixes)))
    other = texts.latest(found) if found else None
    if other is None or other.root == suspect.root:
        return 0
    whose, salted = roots.get(other.root, (0, True))
    if other.root ^ whose == suspect.root ^ suspect.whose:  # another tenant's prompt, in the same cache
        return 0
    suspect.sighting.apart = salted or whose != suspect.whose
    keys = [key ^ whose for key in chain(suspect.text, other.root ^ whose)]
    theirs = Text(keys, other.root, 0, suspect.text, 0, suspect.size, whose)
    return texts.match(theirs)[1].known

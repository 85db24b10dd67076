"""Whom a suspect prompt is compared with: the earlier prompt that it should have gone on from, or begun like."""

from __future__ import annotations

from router.core.observatory.memory import anchors
from router.core.observatory.memory.suspect import SKETCHED_BYTES_MIN, Look, sketch
from router.core.observatory.memory.texts import Text, Texts
from router.core.prompts.blocks import BLOCK_BYTES, chain
from router.core.prompts.canonical import RS

KNOWN_BYTES_MIN = 16  # two prompts that share less at their beginning are not of one template for that alone
SHORT_BYTES = 4 << 10  # a prompt up to here is compared for it, others for a block
SHARED_MAX = 1_024  # roots: one for each model, or two
REPEATED_BYTES_MIN = 64  # less than that is no reason to take two prompts for relatives
BEHIND_BYTES_MIN = 1 << 10  # text behind a difference in the first user message that makes it worth comparing


def relate(look: Look, texts: Texts, sketches: anchors.Sketches) -> None:
    """Finds whom it is to be compared with, if anybody."""
    record, known, user, text, base = look.record, look.known.known, look.user, look.text, look.base
    in_template, continuing = known < user, look.size > look.first_user_end
    at = max(0, known - base)
    last = text.find(RS, at) < 0  # nothing is behind the message that differs
    behind = look.size - known
    if user < 0 and last and behind < SKETCHED_BYTES_MIN:
        return
    conversation = 0
    if in_template or continuing:
        low = user - base if in_template else max(0, text.rfind(RS, 0, at + 1))
        conversation = anchors.speaker(anchors.asked(text, low, look.root), texts.said)
    if not conversation and continuing:
        look.least_bytes = 1 if user < 0 else REPEATED_BYTES_MIN
        conversation = texts.said(look.session) if look.session else 0
        if not conversation and record is not None and not in_template:
            look.related, look.own = texts.latest(record.conversation) or record, True
            if user >= 0:
                look.related = record
            return
    if conversation:
        look.related, look.own = texts.latest(conversation), True
    if look.related is None:
        _relate_template(look, texts, sketches, in_template=in_template, behind=behind)
    if look.related is None and look.session and behind >= BEHIND_BYTES_MIN:
        look.related, look.own = texts.latest(texts.said(look.session)), True


def _relate_template(look: Look, texts: Texts, sketches: anchors.Sketches, *, in_template: bool, behind: int) -> None:
    record, known, look.own = look.record, look.known.known, False
    look.least_bytes = REPEATED_BYTES_MIN
    if in_template and record is not None and known >= BLOCK_BYTES:
        look.related = record
        return
    if behind >= SKETCHED_BYTES_MIN or in_template:
        named = anchors.most(map(texts.said, sketch(look, sketches, in_template=in_template)))
        look.related = texts.latest(named) if named else None
        if named and not in_template:
            sketches.found()
    if look.related is None and in_template and known >= KNOWN_BYTES_MIN and look.size <= SHORT_BYTES:
        look.related = record


def elsewhere(look: Look, texts: Texts, seed: int, shared: set[int]) -> int:
    """How much of its beginning a prompt of another identity had; notes whether that is apart. `shared` are roots of
    prompts without a salt, as far as they are known."""
    if not look.salted:
        if len(shared) >= SHARED_MAX:
            shared.clear()
        shared.add(look.root)
    look.prefixes = anchors.prefixes(look.text[: look.size], seed)
    found = anchors.most(map(texts.said, reversed(look.prefixes)))
    other = texts.latest(found) if found else None
    if other is None or other.root == look.root:
        return 0
    look.sighting.apart = other.root not in shared
    theirs = Text(chain(look.text, other.root), other.root, 0, look.text, 0, look.size)
    return texts.match(theirs)[1].known

"""A prompt that is not seen at a glance, and what is known of it while it is looked at."""

from __future__ import annotations

from router.core.facts.misses import Sighting
from router.core.observatory.memory import anchors
from router.core.observatory.memory.assumed import Finding
from router.core.observatory.memory.texts import Match, Record, Text, piece
from router.core.prompts.blocks import BLOCK_BYTES
from router.core.prompts.canonical import RS

TEMPLATE_SKETCHED_BYTES_MAX, SKETCHED_BYTES_MAX = 64 << 10, 8 << 10  # of it, and of a user's message
SKETCHED_BYTES_MIN = 4 << 10  # of a first user message: a shorter one is not looked for by its lines


class Suspect(Text):
    """A prompt that is not seen at a glance. If `comparable`, `before` and `after` are to be compared, once `read`,
    and the Watcher is to hear what came out; if it `lacks` its beginning, it is to be looked at again with the whole
    of it."""

    sighting: Sighting
    first_user_end: int
    path: str
    body: bytes
    session: int  # a mark; 0: none is named
    known: Match  # by either generation
    hint_bytes: int = 0
    ids: bool = False  # it was given as token ids
    answered: bool = False  # it has messages of an assistant, and may have called tools
    record: Record | None = None  # the prompt that has the first byte behind what is known, or its last one
    user: int = -1  # where the first user message begins; -1: before `base`, or all of it is known
    related: Record | None = None  # whom it is compared with
    own: bool = False  # that is of its conversation, not of its template
    least_bytes: int = 1  # that they must have in common behind their difference, or they are no relatives
    before: bytes = b""
    after: bytes = b""
    from_bytes: int = 0
    lacks: bool = False
    salted: bool = False
    sketch: list[int] | None = None  # marks of its first user message, once they are made
    prefixes: list[int] | None = None  # likewise, of how it begins
    known_bytes: int = 0  # when it was looked at
    assumed: Finding | None = None  # what may be said of it if it is not compared

    def span(self, related: Record) -> int:
        """Bytes behind the difference that could be in both."""
        end = min(related.end, self.size) if self.own else self.user if self.known_bytes < self.user else self.size
        return end - self.known_bytes

    def read(self) -> None:
        """Put together what is to be compared: copies of both texts, which those that are not compared do without."""
        related = self.related
        if related is not None:
            self.before, self.after = piece(related, 0, related.end), self.prefix(self.size)

    @property
    def bytes_max(self) -> int:
        """Of the longest of what is read and compared."""
        return max(self.related.end if self.related is not None else 0, self.size, len(self.body))

    @property
    def comparable(self) -> bool:
        """Whether it has to be compared."""
        return self.related is not None

    def prefix(self, end: int) -> bytes:
        """Its text up to there, of which the memory has what was skipped."""
        record = self.known.record
        if not self.base or record is None:  # without a record nothing was skipped
            return self.text if end >= self.size else self.text[:end]
        lead = piece(record, 0, min(self.base, end))
        return lead + self.text[: end - self.base] if end > self.base else lead


def marks_of(suspect: Suspect, young: Match, seed: int, sketches: anchors.Sketches) -> list[int]:
    """What it is found by, if it changes."""
    since, user, first_end = young.known, suspect.user, suspect.first_user_end
    text, base = suspect.text, suspect.base
    made: list[int]
    if base <= since and (user < 0 or (user <= since and first_end - user < SKETCHED_BYTES_MIN)):
        made = anchors.last(text, max(0, text.rfind(RS, 0, since - base + 1)), suspect.root)
        if user >= 0 and first_end < suspect.size:
            made += anchors.messages(text[: first_end - base], user - base, suspect.root, 1)
        if suspect.session:
            made.append(suspect.session)
        return made
    in_template = since < user
    low = user - base if in_template else text.rfind(RS, 0, max(0, since - base) + 1)
    made = anchors.messages(text, max(0, low), suspect.root, anchors.MESSAGES_KEPT_MAX)
    if suspect.session:
        made.append(suspect.session)
    if user >= 0 and since < first_end and (in_template or first_end - user >= SKETCHED_BYTES_MIN):
        _mark_beginning(suspect, made, seed, sketches, in_template=in_template)
    elif first_end < suspect.size and user >= base:
        made += anchors.messages(text[: first_end - base], user - base, suspect.root, 1)
    return made


def _mark_beginning(
    suspect: Suspect, made: list[int], seed: int, sketches: anchors.Sketches, *, in_template: bool
) -> None:
    """What a prompt is found by whose template, or whose first message, has changed."""
    base = suspect.base
    user, first_end = max(0, suspect.user - base), suspect.first_user_end - base
    if first_end < len(suspect.text):  # else it is among the last messages
        made += anchors.messages(suspect.text[:first_end], user, suspect.root, 1)
    if first_end - user >= SKETCHED_BYTES_MIN:
        made += sketch(suspect, sketches, in_template=False)
    if in_template:
        made += sketch(suspect, sketches, in_template=True)
    if suspect.known.known < BLOCK_BYTES and not base:
        made += suspect.prefixes or anchors.prefixes(suspect.text, seed)


def sketch(suspect: Suspect, sketches: anchors.Sketches, *, in_template: bool) -> list[int]:
    """Marks of lines of its template, or of its first user message."""
    user, first_end = max(0, suspect.user - suspect.base), suspect.first_user_end - suspect.base
    if in_template:
        tools, _, system = suspect.text[: min(user, TEMPLATE_SKETCHED_BYTES_MAX)].partition(RS)
        return anchors.tools(tools, suspect.root) + anchors.lines(system, suspect.root)
    if suspect.sketch is None:
        suspect.sketch = []
        if sketches.wanted():
            suspect.sketch = anchors.lines(suspect.text[user : min(first_end, user + SKETCHED_BYTES_MAX)], suspect.root)
    return suspect.sketch


def user_start(text: bytes, end: int) -> int:
    """Where the first user message begins, which ends there. Without one, where it ends; 0 in what is no chat."""
    at = text.rfind(RS, 0, end)
    if at >= 0 and text.startswith(anchors.USER, at):  # a separator within its words is nobody's habit
        return at
    at = text.find(anchors.USER, 0, end)
    if at >= 0:
        return at
    return end if RS in text else 0

"""A prompt that the fast path does not recognise, and its state during the search."""

from __future__ import annotations

from router.core.insights.prompt_memory import fingerprints
from router.core.insights.prompt_memory.recent_findings import Finding
from router.core.insights.prompt_memory.texts import Match, Record, Text, piece
from router.core.prompts.block_keys import BLOCK_BYTES
from router.core.prompts.canonical import RS
from router.core.types.cache_misses import PromptAnalysis

# Bytes of a template, and of a user's message, from which lines are marked.
TEMPLATE_SKETCHED_BYTES_MAX, SKETCHED_BYTES_MAX = 64 << 10, 8 << 10
SKETCHED_BYTES_MIN = 4 << 10  # shortest first user message that is searched for by its lines


class DiffCandidate(Text):
    """A prompt that the fast path does not recognise.

    If it is `comparable`, `before` and `after` must be compared after `read`, and the result passed to the
    PromptTracker. If it `lacks` its beginning, it must be looked up again with its whole text.
    """

    sighting: PromptAnalysis
    first_user_end: int
    path: str
    body: bytes
    session: int  # mark of the session that the client names; 0: no session
    known: Match  # longest known prefix, by either generation
    hint_bytes: int = 0
    ids: bool = False  # the prompt was given as token ids
    answered: bool = False  # the prompt has an assistant's messages, and may have called tools
    record: Record | None = None  # the prompt that has the first byte after the known prefix, or its last byte
    user: int = -1  # first byte of the first user message; -1: before `base`, or all of the message is known
    related: Record | None = None  # record that the prompt is compared with
    own: bool = False  # `related` is of the prompt's conversation, not of its template only
    least_bytes: int = 1  # bytes that both must have in common after the difference to be relatives
    before: bytes = b""
    after: bytes = b""
    from_bytes: int = 0
    lacks: bool = False
    salted: bool = False
    sketch: list[int] | None = None  # marks of its first user message, once they are made
    prefixes: list[int] | None = None  # marks of the prompt's prefixes, once they are made
    known_bytes: int = 0  # known bytes at the time of the search
    assumed: Finding | None = None  # finding that may be assumed if the prompt is not compared

    def span(self, related: Record) -> int:
        """Count the bytes after the difference that could be in both."""
        end = min(related.end, self.size) if self.own else self.user if self.known_bytes < self.user else self.size
        return end - self.known_bytes

    def read(self) -> None:
        """Put together the texts to compare. Both are copies, which are not made for prompts that are not compared."""
        related = self.related
        if related is not None:
            self.before, self.after = piece(related, 0, related.end), self.prefix(self.size)

    @property
    def bytes_max(self) -> int:
        """Length of the longest text that is read and compared."""
        return max(self.related.end if self.related is not None else 0, self.size, len(self.body))

    @property
    def comparable(self) -> bool:
        """True if it must be compared."""
        return self.related is not None

    def prefix(self, end: int) -> bytes:
        """Return the prompt's text up to byte `end`. A skipped part comes from the memory."""
        record = self.known.record
        if not self.base or record is None:  # without a record no part was skipped
            return self.text if end >= self.size else self.text[:end]
        lead = piece(record, 0, min(self.base, end))
        return lead + self.text[: end - self.base] if end > self.base else lead


def marks_of(suspect: DiffCandidate, young: Match, seed: int, sketches: fingerprints.FingerprintSampling) -> list[int]:
    """Return marks by which the prompt is found if it changes."""
    since, user, first_end = young.known, suspect.user, suspect.first_user_end
    text, base = suspect.text, suspect.base
    made: list[int]
    if base <= since and (user < 0 or (user <= since and first_end - user < SKETCHED_BYTES_MIN)):
        made = fingerprints.last(text, max(0, text.rfind(RS, 0, since - base + 1)), suspect.root)
        if user >= 0 and first_end < suspect.size:
            made += fingerprints.messages(text[: first_end - base], user - base, suspect.root, 1)
        if suspect.session:
            made.append(suspect.session)
        return made
    in_template = since < user
    low = user - base if in_template else text.rfind(RS, 0, max(0, since - base) + 1)
    made = fingerprints.messages(text, max(0, low), suspect.root, fingerprints.MESSAGES_KEPT_MAX)
    if suspect.session:
        made.append(suspect.session)
    if user >= 0 and since < first_end and (in_template or first_end - user >= SKETCHED_BYTES_MIN):
        _mark_beginning(suspect, made, seed, sketches, in_template=in_template)
    elif first_end < suspect.size and user >= base:
        made += fingerprints.messages(text[: first_end - base], user - base, suspect.root, 1)
    return made


def _mark_beginning(
    suspect: DiffCandidate, made: list[int], seed: int, sketches: fingerprints.FingerprintSampling, *, in_template: bool
) -> None:
    """Add the marks of a prompt with a changed template or first message."""
    base = suspect.base
    user, first_end = max(0, suspect.user - base), suspect.first_user_end - base
    if first_end < len(suspect.text):  # a first message at the end of the prompt is marked already
        made += fingerprints.messages(suspect.text[:first_end], user, suspect.root, 1)
    if first_end - user >= SKETCHED_BYTES_MIN:
        made += sketch(suspect, sketches, in_template=False)
    if in_template:
        made += sketch(suspect, sketches, in_template=True)
    if suspect.known.known < BLOCK_BYTES and not base:
        made += suspect.prefixes or fingerprints.prefixes(suspect.text, seed)


def sketch(suspect: DiffCandidate, sketches: fingerprints.FingerprintSampling, *, in_template: bool) -> list[int]:
    """Return marks of lines of its template, or of its first user message."""
    user, first_end = max(0, suspect.user - suspect.base), suspect.first_user_end - suspect.base
    if in_template:
        tools, _, system = suspect.text[: min(user, TEMPLATE_SKETCHED_BYTES_MAX)].partition(RS)
        return fingerprints.tools(tools, suspect.root) + fingerprints.system(system, suspect.root)
    if suspect.sketch is None:
        suspect.sketch = []
        if sketches.should_sample():
            suspect.sketch = fingerprints.lines(
                suspect.text[user : min(first_end, user + SKETCHED_BYTES_MAX)], suspect.root
            )
    return suspect.sketch


def user_start(text: bytes, end: int) -> int:
    """Return the start of the first user message that ends at byte `end`. `end` if it is absent, 0 if the prompt is not
    a chat."""
    at = text.rfind(RS, 0, end)
    if at >= 0 and text.startswith(fingerprints.USER, at):  # a separator within its words is very rare
        return at
    at = text.find(fingerprints.USER, 0, end)
    if at >= 0:
        return at
    return end if RS in text else 0

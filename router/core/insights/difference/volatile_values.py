"""Tokens around a byte of a text: a date, an identifier, a number. Also the shape of a text without its content.

The kind of a token follows from its form first, then from its neighbours. Ten digits are a time if the context mentions
a time, or if both texts have nearly the same value. They are an identifier after `request_id=`. Only a window around
the byte is read, so the size of the text does not matter.
"""

from __future__ import annotations

import re

from router.core.types.cache_misses import SHAPE_CHARS_MAX

WINDOW_BYTES = 96  # bytes read on either side; no date is longer
LABEL_BYTES = 40
Span = tuple[int, int]

_MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?)\b\.?"
)
_WEEKDAY = r"(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?\b\.?"
_DAY = r"\d{1,2}(?:st|nd|rd|th)?\b"
_ZONE = r"(?:z\b|utc\b|gmt\b|[ecmp][sd]t\b|ces?t\b|bst\b|[ijk]st\b)?(?:\s?\(?(?:utc|gmt)?[+-]\d{1,2}:?(?:\d{2})?\b\)?)?"
_CLOCK = (
    r"(?:(?:[01]?\d|2[0-3])[:h][0-5]\d(?:[:m](?:[0-5]\d|60)s?(?:[.,]\d{1,9})?)?(?:\s?[ap]\.?m\b\.?)?"
    r"|(?:1[0-2]|0?\d)\s?[ap]\.?m\b\.?)"
)
_ISO = r"[12]\d{3}(?:年\d{1,2}月\d{1,2}日|-(?:[01]\d-[0-3]\d|w\d\d(?:-\d)?|[0-3]\d\d\b))"
_COMPACT = r"(?:19|20)\d\d[01]\d[0-3]\d(?:[t_-]?[0-2]\d[0-5]\d(?:[0-5]\d)?)?(?!\d)"
_SLASHES = (
    r"(?:[12]\d{3}[/.][01]?\d[/.][0-3]?\d|[0-3]?\d/[0-3]?\d/(?:\d{4}|\d{2})|[0-3]?\d\.[01]?\d\.[12]\d{3}"
    r"|[0-3]?\d-[0-3]?\d-[12]\d{3}|\d\d-[01]\d-[0-3]\d(?!-))\b"
)
_WORDS = (
    rf"(?:{_WEEKDAY},?\s+)?(?:the\s+)?(?:{_MONTH}[\s-]{_DAY}|{_DAY}(?:\.|\s+of)?[\s-]{_MONTH})"
    r"(?:,?[\s-](?:[12]\d{3}|'?\d\d(?![\w:.])))?"
)
_DATE = rf"(?:(?:{_WEEKDAY},?\s+)?(?:{_ISO}|{_SLASHES}|{_COMPACT})|{_WORDS}|{_MONTH},?\s+[12]\d{{3}}\b|{_WEEKDAY})"
_BETWEEN = r"(?:\s*[,t|@_·-]\s*(?:at\s+)?|\s+at\s+|\s+|\s*\()"
_AGO = r"(?:\d+|an?)\s?(?:s|sec|second|m|min|minute|h|hr|hour|d|day|week|month)s?\s+ago\b|just now\b"
_NEAR = r"(?:today|yesterday|tomorrow|morning|afternoon|evening|night|midnight|noon)\b"
_STAMP = re.compile(
    rf"(?<![0-9A-Za-z.])(?:{_DATE}(?:{_BETWEEN}{_CLOCK})?(?:\s?{_ZONE})(?:\s[12]\d{{3}}\b)?"
    rf"|{_CLOCK}(?:\s?{_ZONE})(?:(?:,|\s+on)?\s+{_DATE})?|{_AGO}|{_NEAR}|(?:q[1-4]|(?:week|cw|kw)\s?\d{{1,2}}),?\s(?:of\s)?[12]\d{{3}}"
    rf"|(?:[12]\d{{3}}-[01]\d|[12]\d{{3}})(?![\w-]))".encode(),
    re.IGNORECASE,
)
_YEAR = re.compile(rb"[12]\d{3}")
_EPOCH = re.compile(rb"(?<![\w.])1\d{9}(?:\.\d+|\d{3}|\d{6}|\d{9})?(?!\w)")
_OF_TIME = re.compile(
    rb"(?i)(?:time|stamp|date|year|month|epoch|unix|clock|since|until|as of|\bnow|\bts|_at|\bat|\biat|\bexp|today)"
    rb"(?:\s+(?:is|was))?\W{0,6}$"
)
_OF_DATE = re.compile(rb"(?i)(?:year|month|day|hour|minute|second)[\"']?\s?[:=]\s?[\"']?$")
_NEAR_S = 366 * 86_400

_TOKEN = re.compile(rb"[A-Za-z0-9_-]+")
_RUN = re.compile(rb"[A-Za-z0-9]+")
_UUID = re.compile(rb"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
_HEX = re.compile(rb"(?:0x)?[0-9a-f]{7,}|(?:0x)?[0-9A-F]{7,}")
_HASH = re.compile(rb"(?=\d*[A-Fa-f])(?:0x)?(?:[0-9a-f]{12,}|[0-9A-F]{12,})")  # hashes, even if only their ends differ
_ADDRESS = re.compile(rb"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])")
_OF_ID = re.compile(
    rb"(?i)(?:\bid|[a-z_-]id|Id|ID|uuid|guid|nonce|trace|span|sess(?:ion)?|request|\breq|correlation|conversation|thread"
    rb"|commit|\bsha\d*|hash|digest|etag|\bref|\bkey|\btoken|secret|signature|fingerprint|ticket|order|case|account"
    rb"|customer|user|usr|run|job|pod|host|instance|container|build|tmp|temp|seed|salt|cache.?bust\w*)"
    rb"(?:[ _-]?(?:id|no|nr|num|number))?(?:\s+(?:is|was))?[\W_]{0,6}$"
)
_PREFIXED = re.compile(rb"(?i)[a-z]{1,12}[_-][a-z0-9_-]*$")
_NUMBER = re.compile(rb"[+-]?\d(?:[\d,._]*\d)?")
_NUMBER_WORD = re.compile(
    rb"(?i)(?<!\w)(?:(?:no|zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven"
    rb"|eigh|nine)teen|twenty|thirty|first|second|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|last)(?!\w))"
)
_LOOKS = bytes(
    48 if 48 <= c < 58 else 65 if 65 <= c < 91 else 97 if 97 <= c < 123 or c >= 128 else c for c in range(256)
)
_SPACE = re.compile(rb"\s")
_DIGIT = re.compile(rb"\d")


def shape(piece: bytes) -> str:
    """Return the shape of a piece: digits as 0, letters as a and A."""
    looks = piece[:SHAPE_CHARS_MAX].translate(_LOOKS).decode("ascii")
    return "".join([char if char.isprintable() else " " for char in looks])


def digitless(text: bytes) -> bytes:
    """Return the text without digits, so that texts that differ in numbers only are the same."""
    return text.translate(None, b"0123456789")


def _around(pattern: re.Pattern[bytes], text: bytes, at: int) -> list[Span]:
    """Return spans of the pattern's matches over byte `at`, or up to it."""
    low, high = max(0, at - WINDOW_BYTES), min(len(text), at + WINDOW_BYTES)
    return [found.span() for found in pattern.finditer(text, low, high) if found.start() <= at <= found.end()]


def _match_both(pattern: re.Pattern[bytes], before: bytes, after: bytes, at: int) -> tuple[Span, Span] | None:
    """Return a match over the byte in either text, if the two differ."""
    for span in _around(pattern, before, at):
        for other in _around(pattern, after, at):
            if max(span[1], other[1]) > at and before[slice(*span)] != after[slice(*other)]:
                return span, other
    return None


def stamps(before: bytes, after: bytes, at: int) -> tuple[Span, Span] | None:
    """Return a date or a time of day at byte `at`, up to which the texts are the same, and the other one in the other
    text."""
    found = _match_both(_STAMP, before, after, at)
    if found is not None:
        one, other = before[slice(*found[0])], after[slice(*found[1])]
        bare = _YEAR.fullmatch(one) and _YEAR.fullmatch(other)
        return found if not bare or _OF_TIME.search(before[max(0, found[0][0] - LABEL_BYTES) : found[0][0]]) else None
    found = _match_both(_EPOCH, before, after, at)
    if found is None:
        found = _match_both(_NUMBER, before, after, at)
        return found if found and _OF_DATE.search(before[max(0, found[0][0] - LABEL_BYTES) : found[0][0]]) else None
    label = before[max(0, found[0][0] - LABEL_BYTES) : found[0][0]]
    one, other = before[slice(*found[0])], after[slice(*found[1])]
    near = abs(int(one[:10]) - int(other[:10])) < _NEAR_S and not _OF_ID.search(label)
    return found if near or _OF_TIME.search(label) else None


def is_stamp(piece: bytes) -> bool:
    """True if the piece is only a date or a time, and punctuation around it."""
    found = _STAMP.search(piece) if len(piece) <= WINDOW_BYTES else None
    return found is not None and not _RUN.search(piece[: found.start()] + piece[found.end() :])


def token(text: bytes, low: int, end: int) -> tuple[bool, Span] | None:
    """Return the first date or time (True), or else identifier (False), that begins before byte `end` and ends after
    byte `low`. Without a text to compare, words such as "today", bare years and plain numbers do not count."""
    start, stop = max(0, low - 4), min(len(text), end + WINDOW_BYTES)
    for found in _STAMP.finditer(text, start, stop):
        if found.start() < end and found.end() > low and _DIGIT.search(found[0]) and not _YEAR.fullmatch(found[0]):
            return True, found.span()
    for found in _EPOCH.finditer(text, start, stop):
        label = text[max(0, found.start() - LABEL_BYTES) : found.start()]
        if found.start() < end and found.end() > low and _OF_TIME.search(label):
            return True, found.span()
    for found in _TOKEN.finditer(text, start, stop):
        if found.start() < end and found.end() > low and _is_identifier(text, found.start(), found[0]):
            return False, found.span()
    return None


def _is_identifier(text: bytes, start: int, piece: bytes) -> bool:
    """True if a token without a counterpart is random: by its form, or by its label as well."""
    if _UUID.fullmatch(piece):
        return True
    split = max(piece.rfind(b"_"), piece.rfind(b"-")) + 1
    own = piece[split:]
    if len(own) < 8 or not _DIGIT.search(own):
        return False
    label = text[max(0, start - LABEL_BYTES) : start]
    labelled = _OF_ID.search(label) or (split > 1 and _OF_ID.search(piece[: split - 1]))
    return bool(labelled) and (_HEX.fullmatch(own) is not None or _is_random_token(own))


def identifiers(before: bytes, after: bytes, at: int) -> tuple[Span, Span] | None:
    """Return a UUID, a hash, a request id or a similar token at byte `at`, and the other one in the other text."""
    found = _match_both(_UUID, before, after, at) or _match_both(_ADDRESS, before, after, at)
    if found is not None:
        return found
    found = _match_both(_TOKEN, before, after, at)
    if found is None:
        return None
    one, other = before[slice(*found[0])], after[slice(*found[1])]
    low = found[0][0]
    labelled = _OF_ID.search(before[max(0, low - LABEL_BYTES) : low]) is not None
    prefix = at - low
    split = max(one.rfind(b"_", 0, prefix), one.rfind(b"-", 0, prefix)) + 1  # only the 8f2a of `req_8f2a` is random
    labelled = labelled or (split > 1 and _OF_ID.search(one[: split - 1]) is not None)
    one, other = one[split:], other[split:]
    if _HASH.fullmatch(one) and _HASH.fullmatch(other):
        return found
    if _is_number_change(one, other, prefix - split):
        least = 5 if labelled else 7 if split > 1 else 12
        return found if min(len(one), len(other)) >= least and _far(one, other) else None
    return found if _random(one, other, labelled=labelled) else None


def _is_number_change(one: bytes, other: bytes, at: int) -> bool:
    """True if they are the same except for one run of digits, as step17b and step18b, and are no hash."""
    start = at
    while start > 0 and one[start - 1 : start].isdigit():
        start -= 1
    ones, others = one[start:].lstrip(b"0123456789"), other[start:].lstrip(b"0123456789")
    return ones == others and len(ones) + start < len(one) and len(others) + start < len(other)


def _far(one: bytes, other: bytes) -> bool:
    """True if two numbers are unrelated."""
    low, high = sorted(int(re.sub(rb"\D", b"", number)[:WINDOW_BYTES] or b"0") for number in (one, other))
    return high - low > max(1000, min(low // 1024, 1_000_000))


def _random(one: bytes, other: bytes, *, labelled: bool) -> bool:
    """True if both tokens look random."""
    if _HEX.fullmatch(one) and _HEX.fullmatch(other) and len(one) == len(other):
        return labelled or any(48 <= byte < 58 for byte in one + other)
    if labelled and min(len(one), len(other)) >= 5:
        return any(48 <= byte < 58 for byte in one + other) or _mixed_case(one) or len(one) == len(other) >= 16
    if len(one) == len(other) >= 16 and (_is_random_token(one) or _is_random_token(other)):
        return all(_is_random_token(token) or _mixed_case(token) for token in (one, other))
    return _is_random_token(one) and _is_random_token(other)


def _is_random_token(token: bytes) -> bool:
    """True if letters and digits are mixed: few words have both, and none change between them often."""
    looks = token.translate(_LOOKS).replace(b"A", b"a")
    digits, letters = looks.count(b"0"), looks.count(b"a")
    turns = looks.count(b"a0") + looks.count(b"0a")
    return digits + letters >= 8 and digits > 0 and letters > 0 and (turns >= 2 or len(token) >= 20)


def _mixed_case(token: bytes) -> bool:
    looks = token.translate(_LOOKS)
    return looks.count(b"aA") + looks.count(b"Aa") >= 3


def numbers(before: bytes, after: bytes, at: int) -> tuple[Span, Span] | None:
    """Return a number at byte `at`, in digits or as a word, and the other one in the other text."""
    found = _match_both(_NUMBER, before, after, at)
    if found is None:
        words = _match_both(_NUMBER_WORD, before, after, at)
        if words is not None:
            return words
        one, other = _around(_NUMBER_WORD, before, at), _around(_NUMBER_WORD, after, at)
        ones, others = _around(_NUMBER, before, at), _around(_NUMBER, after, at)
        mixed = (one or ones)[:1] + (other or others)[:1]  # "one left" after "2 left"
        return (mixed[0], mixed[1]) if len(mixed) == 2 else None
    return found


def word(text: bytes, at: int, end: int) -> Span:
    """Return the span of the words from byte `at` to byte `end`, both words whole, within WINDOW_BYTES."""
    low = max([text.rfind(space, max(0, at - WINDOW_BYTES), at) for space in (b" ", b"\n")]) + 1
    low = low or max(0, at - WINDOW_BYTES)
    end = min(max(end, at), at + WINDOW_BYTES)
    found = _SPACE.search(text, max(at, end - 1), end + WINDOW_BYTES)
    return low, max(found.start(), at) if found else min(len(text), end + WINDOW_BYTES)

"""Ids of texts that grow at their end: only the new part of the next turn's text is encoded.

A text is hashed in cells, each with the hash before it, so a cell's key stands for all of the text up to its end. The
key maps to the ids up to the last cut within that text. A cut is the beginning of an added token (`<|im_start|>`).
Tokenizers look for added tokens first, and encode the text between two of them separately. So the ids of a text are
those of its part before a cut, followed by those of the part after it, for any two parts.

This holds for added tokens that no other added token can overlap: a scan from the text's first character then finds
every occurrence. It also requires that no added token takes white space before it, or looks at the characters around
it. Of the remaining tokens, those that a chat template writes are the cuts, because turns begin and end there.

After the last cell there is a tail up to the last cut of the text, at which the turn's answer will begin. The last tail
seen after each cell is remembered by its hash, so that the next turn encodes only its addition.

The result is exact except for collisions of a 128-bit hash with a secret seed.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle

import msgspec
from xxhash import xxh3_128_digest

from router.tokenization.tokenizers import PROBES, Encoder, FastTokenizer, SegmentCache

# A text shorter than the first cell is encoded whole: encoding takes no longer than the look-up. Later cells are
# longer, because each costs 4 us, and an encoder takes 10 us to begin with a text, however short it is.
FIRST_CELL_CHARACTERS, CELL_CHARACTERS = 12 << 10, 24 << 10
CUTS_MAX = 16  # tokens that are looked for in each cell
_CUT = struct.Struct("<q")
# Of a tail: its cut, the end of the added token there, and the hash of the text between the cell and that end.
_TAIL = struct.Struct("<qq16s")


class AddedToken(msgspec.Struct):
    """One of the tokenizer's added tokens, as `tokenizer.json` has it."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True


class _Added(msgspec.Struct):
    added_tokens: list[AddedToken] = []


_decode_added = msgspec.json.Decoder(_Added).decode


@dataclass(slots=True)
class PartialEncoding:
    """Text with the known ids of its beginning."""

    text: str
    keys: list[bytes]  # one for each whole cell
    ids: list[memoryview]  # of the known cells, and of the known tail after them
    cut: int = 0  # number of characters that these ids cover
    cells: int = 0  # number of known cells

    @property
    def unread(self) -> int:
        """Number of characters that are not encoded yet."""
        return len(self.text) - self.cut


def make_incremental_encoder(
    whole: Encoder, tokenizer_json: str, written: Iterable[str], bytes_max: int
) -> IncrementalEncoder:
    """Return the encoder with a memory, if it gives the same ids as without one on probing texts; otherwise without. An
    encoder with a memory of segments has half of `bytes_max`; one that needs none leaves all of it."""
    cuts = cuts_of(tokenizer_json, written)
    tried = IncrementalEncoder(whole, cuts, bytes_max, cell_characters=64)
    text = "".join(f"{cut}{text}{cut}\n{text}" for text, cut in zip(PROBES, cycle(cuts or [""]), strict=False))
    texts = [text[:end] for end in range(50, len(text), 250)] + [text]
    right = all(tried.encode(each, special=False) == whole.encode(each, special=False) for each in [*texts, *texts])
    if cuts and right and isinstance(whole, FastTokenizer):
        whole.forget_segments()  # remembering a segment takes half as long as encoding it
        return IncrementalEncoder(whole, cuts, bytes_max)
    return IncrementalEncoder(whole, cuts if right else [], bytes_max // 2)


def cuts_of(tokenizer_json: str, written: Iterable[str]) -> list[str]:
    """Return added tokens at which texts may be cut: those that occur in `written`, such as templates. Empty if the
    tokenizer's added tokens depend on the text around them."""
    added = [token for token in _decode_added(tokenizer_json).added_tokens if token.content]
    if any(token.lstrip or token.single_word for token in added):
        return []
    texts = list(written)
    # Tokens that are normalized are looked for only between the others.
    whole = [token.content for token in added if not token.normalized]
    found = [token for token in whole if any(token in text for text in texts)]
    return [token for token in found if not any(_overlaps(other, token) for other in whole)][:CUTS_MAX]


def _overlaps(other: str, token: str) -> bool:
    """True if the other token, begun before this one, can reach into it."""
    ends = (other[at:] for at in range(1, len(other)))
    return any(token.startswith(end) or end.startswith(token) for end in ends)


class IncrementalEncoder:
    """Encoder with a memory of the beginnings of texts. Safe in several threads."""

    def __init__(
        self, encoder: Encoder, cuts: Sequence[str], bytes_max: int, cell_characters: int = CELL_CHARACTERS
    ) -> None:
        """`cuts` are those of `cuts_of`; without any, every text is encoded whole."""
        self.name = encoder.name
        self._encoder = encoder
        self._cuts = list(cuts)
        self._memory = SegmentCache(bytes_max)
        self._first_cell, self._cell = min(FIRST_CELL_CHARACTERS, cell_characters), cell_characters
        self._seed = secrets.token_bytes(16)

    def encode(self, text: str, *, special: bool) -> bytes:
        """Encode the unknown part of the text."""
        return self._encoder.encode(text, special=True) if special else self.finish(self.begin(text))

    def begin(self, text: str) -> PartialEncoding:
        """Look up the known part of a text. Raises UnicodeError."""
        begun = PartialEncoding(text, [], [])
        if not self._cuts or len(text) < self._first_cell:
            return begun
        key, known, start, behind = self._seed, True, 0, 0
        data = memoryview(text.encode()) if text.isascii() else None
        for end in self._ends(text):
            cell = data[start:end] if data is not None else text[start:end].encode()
            key, start = _digest(cell, key), end
            begun.keys.append(key)
            found = self._memory.get(key) if known else None
            if found is None:
                known = False
                continue
            (begun.cut,) = _CUT.unpack_from(found)
            begun.ids.append(memoryview(found)[_CUT.size :])
            begun.cells, behind = len(begun.keys), end
        if begun.cells:
            self._add_tail(begun, behind)
        return begun

    def _add_tail(self, begun: PartialEncoding, behind: int) -> None:
        """Look up the known tail after the last known cell, which ends at `behind`."""
        key = begun.keys[begun.cells - 1]
        found = self._memory.get(_tail_of(key))
        if found is None:
            return
        cut, end, digest = _TAIL.unpack_from(found)
        if end <= len(begun.text) and _digest(begun.text[behind:end].encode(), key) == digest:
            begun.ids.append(memoryview(found)[_TAIL.size :])
            begun.cut = cut

    def finish(self, begun: PartialEncoding) -> bytes:
        """Return the ids of the whole text, and remember the new ones."""
        text, cut, parts = begun.text, begun.cut, list[bytes | memoryview](begun.ids)
        behind = begun.ids[begun.cells :]  # ids after the last known cell
        if begun.keys:
            new = slice(begun.cells, None)
            ends = self._ends(text)
            for key, end in zip(begun.keys[new], ends[new], strict=True):
                upto, _ = self._last_cut(text, cut, end)
                ids = self._encode(text, cut, upto)
                self._memory.put(key, b"".join((_CUT.pack(upto), *behind, ids)))
                parts.append(ids)
                cut, behind = upto, []
            upto, end = self._last_cut(text, cut, len(text))
            if upto > cut:
                ids, key = self._encode(text, cut, upto), begun.keys[-1]
                tail = _TAIL.pack(upto, end, _digest(text[ends[-1] : end].encode(), key))
                self._memory.replace(_tail_of(key), b"".join((tail, *behind, ids)))
                parts.append(ids)
                cut = upto
        parts.append(self._encode(text, cut, len(text)))
        return b"".join(parts)

    def _encode(self, text: str, start: int, end: int) -> bytes:
        return self._encoder.encode(text[start:end], special=False) if end > start else b""

    def _ends(self, text: str) -> range | list[int]:
        """Return the ends of the whole cells of a text."""
        return range(self._first_cell, len(text) + 1, self._cell)

    def _last_cut(self, text: str, cut: int, end: int) -> tuple[int, int]:
        """Return the start and the end of the last added token that begins after `cut` and ends by `end`; `cut` twice
        if there is no such token."""
        behind = cut
        for token in self._cuts:
            found = text.rfind(token, cut + 1, end)
            if found > cut:
                cut, behind = found, found + len(token)
        return cut, behind


def _digest(text: bytes | memoryview, before: bytes) -> bytes:
    """Return the hash of a text that follows the one with the hash `before`."""
    return xxh3_128_digest(text, int.from_bytes(before[:8], "little"))


def _tail_of(cell: bytes) -> bytes:
    """Return the key of the tail after the cell with this key."""
    return cell + b"tail"

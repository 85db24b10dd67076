"""Recipes of long inputs: a beginning, a piece many times, and an end.

A parser that takes the square of its input, or much time for each byte, shows it on long inputs that repeat something.
Such an input is kept as its recipe, which is short, and made at any length.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.attack.mutate import mutated

MIB = 1 << 20
BYTES_MAX = 4 * MIB
# Bytes of a long input: most are short, since many inputs find more than long ones.
SIZES = (64 << 10, 64 << 10, 64 << 10, 256 << 10, 256 << 10, MIB, BYTES_MAX)
PART_BYTES_MAX = 4_096  # length of a beginning, a piece or an end
NUMBER = b"%d"
RECIPES = Path(__file__).parent / "grown"


@dataclass(frozen=True)
class Recipe:
    """A long input. `numbered` pieces have their number in place of each NUMBER, so that no two are the same."""

    before: bytes = b""
    piece: bytes = b"x"
    after: bytes = b""
    size: int = MIB
    numbered: bool = False

    def data(self, size: int | None = None) -> bytes:
        """The input, of `size` bytes at most (of the recipe's own size by default)."""
        room = (self.size if size is None else size) - len(self.before) - len(self.after)
        piece = self.piece or b"x"
        if self.numbered and NUMBER in piece:
            count, width = room // (len(piece) + 6) + 1, piece.count(NUMBER)
            middle = b"".join(piece.replace(NUMBER, b"%d" % number, width) for number in range(count))
        else:
            middle = piece * (room // len(piece) + 1)
        return self.before + middle[: max(0, room)] + self.after

    def text(self) -> str:
        """The recipe as JSON, each byte a character."""
        parts = {"before": self.before, "piece": self.piece, "after": self.after}
        texts = {name: part.decode("latin-1") for name, part in parts.items()}
        return json.dumps({**texts, "size": self.size, "numbered": self.numbered}, indent=1) + "\n"


def recipe_of(text: str) -> Recipe:
    """The recipe of its JSON."""
    found = json.loads(text)
    parts = {name: found[name].encode("latin-1") for name in ("before", "piece", "after")}
    return Recipe(**parts, size=found["size"], numbered=found["numbered"])


def kept(name: str) -> dict[str, Recipe]:
    """Recipes that are kept of a target, by file name."""
    return {file.name: recipe_of(file.read_text("utf-8")) for file in sorted((RECIPES / name).glob("*.json"))}


def drawn(choose: random.Random, pool: Sequence[bytes], words: Sequence[bytes]) -> Recipe:
    """A recipe made of one input of the pool: a part of it or a word is repeated, and its end may be missing."""
    data = choose.choice(pool)[:PART_BYTES_MAX]
    start = choose.randrange(len(data) + 1)
    end = min(len(data), start + choose.choice((0, 1, 2, 4, 16, 64, len(data))))
    piece = choose.choice((data[start:end], data, *(_word(choose, words) for _ in range(4))))
    if choose.random() < 0.3:
        piece += _word(choose, words)
    numbered = choose.random() < 0.3
    if numbered:
        at = choose.randrange(len(piece) + 1)
        piece = piece[:at] + NUMBER + piece[at:]
    after = choose.choice((b"", b"", data[end:], data[start:]))
    return Recipe(data[:start], piece, after, choose.choice(SIZES), numbered)


def changed(choose: random.Random, recipe: Recipe, pool: Sequence[bytes], words: Sequence[bytes]) -> Recipe:
    """A recipe like this one: one of its parts, or its size, is another."""
    name = choose.choice(("before", "piece", "after", "size", "ends"))
    if name == "size":
        return replace(recipe, size=choose.choice(SIZES))
    if name == "ends":
        return replace(recipe, after=b"")
    part: bytes = getattr(recipe, name)
    return replace(recipe, **{name: mutated(choose, [part, *pool], words, PART_BYTES_MAX) if part else b""})


def _word(choose: random.Random, words: Sequence[bytes]) -> bytes:
    return choose.choice(words) if words and choose.random() < 0.7 else bytes([choose.randrange(256)])

"""An engine that reports its blocks."""

from __future__ import annotations

from array import array
from typing import Any

from router.core.cache_state.engine_blocks import EngineBlocks
from router.core.cache_state.holder_bitmap import HolderBitmap
from router.core.cache_state.tier_blocks import TierMatch
from router.core.kv_events.batch_decoder import Cleared, Removed, Stored
from router.core.prompts.block_keys import token_chain, token_root

SIZE = 2  # tokens of a block


MANY = 1_000


def _stored(
    hashes: list[int],
    tokens: str = "",
    parent: int | None = None,
    *,
    size: int = SIZE,
    adapter: str = "",
    salt: bytes = b"",
    extras: tuple[bytes | None, ...] | None = None,
    medium: str = "GPU",
    group: int = 0,
    prefix: bool = True,
    again: bool | None = False,
) -> Stored:
    """A letter stands for a block whose tokens are all that letter; no letters: a tier's event, hashes alone."""
    return Stored(hashes, parent, _ids(tokens, size), size, adapter, salt, extras, medium, group, prefix, again)


def _gone(*hashes: int, medium: str = "GPU", group: int = 0) -> Removed:
    return Removed(list(hashes), medium, group)


def _ids(letters: str, size: int = SIZE) -> bytes:
    return array("I", [ord(letter) for letter in letters for _ in range(size)]).tobytes()


def _keys(letters: str, adapter: str = "", salt: bytes = b"", size: int = SIZE) -> list[int]:
    return token_chain(_ids(letters, size), size, token_root(adapter, salt, size))


class _Engine:
    """A ledger and the map it writes to."""

    def __init__(
        self, blocks_max: int = MANY, aside_max: int = MANY, names_max: int = MANY, *, repeats: bool = False
    ) -> None:
        self.masks = HolderBitmap()
        limits = {"blocks_max": blocks_max, "aside_max": aside_max, "names_max": names_max}
        self.ledger = EngineBlocks(self.masks, "r", **limits, repeats=repeats)

    def hears(self, *events: Stored | Removed | Cleared) -> None:
        for event in events:
            self.ledger.apply(event)

    def depth(self, letters: str, **identity: Any) -> int:
        """Blocks of this prompt that the engine is believed to hold on its GPU."""
        return self.masks.match(_keys(letters, **identity)).get("r", 0)

    def loads(self, letters: str, **identity: Any) -> dict[str, int]:
        """Blocks of this prompt that the engine is believed to load behind that, by tier."""
        keys, tiers = _keys(letters, **identity), self.ledger.tier_bits()
        counts = TierMatch(self.masks, keys).count_following(self.depth(letters, **identity), [bit for _, bit in tiers])
        return {tier: count for (tier, _), count in zip(tiers, counts, strict=True) if count}

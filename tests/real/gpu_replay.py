"""What a router foretells of a recorded stream with tiers: `python -m tests.real.gpu_replay FILE ...`.

FILE is one that gpu_stream.py wrote. Each request is foretold by the events before it, the GPU's part and what is to be
loaded apart, and both are held against the engine's own counters; a line for each part of the recording, and one for
each request that was not foretold.
"""

from __future__ import annotations

import base64
import gzip
import json
import sys
from array import array
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from router.core.cache_state.engine_blocks import EngineBlocks
from router.core.cache_state.holder_bitmap import HolderBitmap
from router.core.cache_state.tier_blocks import TierMatch
from router.core.kv_events.batch_decoder import decode
from router.core.prompts.block_keys import token_chain, token_root
from tests.real.gpu_server import BLOCK_TOKENS

BLOCKS_MAX = 100_000


class Foretelling:
    """A router's knowledge of one engine."""

    def __init__(self) -> None:
        self.masks = HolderBitmap()
        self.ledger = EngineBlocks(self.masks, "r", blocks_max=BLOCKS_MAX, aside_max=1_000, names_max=BLOCKS_MAX)

    def hears(self, payload: str) -> None:
        """One message."""
        for event in decode(base64.b64decode(payload)).events:
            self.ledger.apply(event)

    def foretold(self, ids: list[int], salt: str) -> tuple[int, int]:
        """Tokens of this prompt that the GPU has, and that are to be loaded."""
        root = token_root("", salt.encode(), BLOCK_TOKENS)
        keys = token_chain(array("I", ids).tobytes(), BLOCK_TOKENS, root)[: (len(ids) - 1) // BLOCK_TOKENS]
        depth = self.masks.match(keys).get("r", 0)
        bits = [bit for _, bit in self.ledger.tier_bits()]
        loaded = sum(TierMatch(self.masks, keys).count_loadable(depth, bits, self.ledger.chunk))
        return depth * BLOCK_TOKENS, loaded * BLOCK_TOKENS


def main(words: Sequence[str] | None = None) -> int:
    """Replay each file and print what was foretold."""
    for name in sys.argv[1:] if words is None else words:
        router, seen, wrong = Foretelling(), defaultdict[str, list[tuple[bool, bool]]](list), list[str]()
        with gzip.open(Path(name), "rt", encoding="utf-8") as file:
            for line in map(json.loads, file):
                row: dict[str, Any] = line
                if row.get("kind") == "batch":
                    router.hears(row["payload"])
                elif row.get("kind") == "request":
                    ids = row["prompts"][0]["ids"]
                    told, was = router.foretold(ids, row.get("salt", "")), (row["gpu"], row["loaded"])
                    seen[row["label"].split(":")[0]].append((told == was, row["loaded"] > 0))
                    if told != was:
                        wrong.append(f"  {row['label']}, {len(ids)} tokens: foretold {told}, was {was}")
        for part, all_ in seen.items():
            right, loads = sum(ok for ok, _ in all_), sum(loaded for _, loaded in all_)
            print(f"{name}, {part}: {len(all_)} requests, {loads} loaded something, {right} foretold in both parts")
        print("\n".join(wrong) or "  all foretold")
    return 0


if __name__ == "__main__":
    sys.exit(main())

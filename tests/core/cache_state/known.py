"""Replicas whose events are known, and prompts of their blocks."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from router.core.cache_state.event_index import EventIndex
from router.core.cache_state.event_state import StoredPrefix
from router.core.kv_events.batch_decoder import Stored
from router.core.prompts.block_keys import token_chain, token_root
from router.core.prompts.token_keys import TokenPrompt
from router.core.types.placements import Confidence

BLOCK = 16


@dataclass
class World:
    """A EventIndex whose callbacks are remembered."""

    bytes_max: int = 1 << 30
    tiers: bool = True
    grades: list[tuple[str, Confidence, str]] = field(default_factory=list)
    resyncs: list[str] = field(default_factory=list)
    restarts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.knowledge = EventIndex(
            blocks_max=10_000,
            aside_max=100,
            names_max=100,
            bytes_max=self.bytes_max,
            tiers=self.tiers,
            graded=lambda *news: self.grades.append(news),
            resync=self.resyncs.append,
            restarted=self.restarts.append,
        )

    def join(self, replica: str = "a", grade: Confidence = Confidence.EXACT) -> None:
        """A stream begins."""
        self.knowledge.set_untokenizable(replica, "")
        self.knowledge.grade(replica, grade, "joined", 0.0)

    def store(self, prompt: TokenPrompt, replica: str = "a") -> None:
        """The replica says that it holds the whole prompt."""
        blocks = prompt.tokens // BLOCK
        event = Stored(
            hashes=[hash((prompt.salt, prompt.ids[: 4 * BLOCK * (n + 1)])) & (1 << 64) - 1 for n in range(blocks)],
            parent=None,
            tokens=prompt.ids[: 4 * BLOCK * blocks],
            block_tokens=BLOCK,
            adapter=prompt.adapter,
            salt=prompt.salt,
            extras=None,
            medium="GPU",
            group=0,
            prefix=True,
        )
        self.knowledge.apply(replica, event, 0.0)

    def held(self, prompt: TokenPrompt) -> dict[str, int]:
        """Tokens that each followed replica holds of it."""
        return {name: held.tokens for name, held in self.said(prompt).items()}

    def said(self, prompt: TokenPrompt, now_s: float = 0.0) -> dict[str, StoredPrefix]:
        """What events say of it, of each followed replica."""
        found = self.knowledge.find_stored(prompt, now_s)
        rest = {name: self.knowledge.empty(name) for name in ("a", "b", "c") if name not in found}
        return found | {name: held for name, held in rest.items() if held is not None}


def prompt_of(tokens: int, *, salt: bytes = b"", adapter: str = "") -> TokenPrompt:
    """Ids from 0, with their keys."""
    ids = array("I", range(tokens)).tobytes()
    return TokenPrompt(ids, adapter, salt, {BLOCK: token_chain(ids, BLOCK, token_root(adapter, salt, BLOCK))})


def _answer(world: World, predicted: int, actual: int | None, times: int = 1) -> None:
    for _ in range(times):
        held = world.said(prompt_of(160)).get("a")
        world.knowledge.check_prediction("a", held, predicted, actual, 160)

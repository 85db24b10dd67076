"""Which replicas keep blocks in tiers behind their GPUs, and which reach a store together.

Replicas of the same models that speak of a remote store reach the same one: what one of them wrote, each can load, and
a replica that leaves takes nothing of it along. A replica whose engine hashes with another seed shows itself by the
first block that both name; it is credited with nothing of the store from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from router.core.cache.masks import Masks
from router.core.cache.reported import Reported, StoredPrefix
from router.core.cache.tiers import BlockStore, TierWalk
from router.core.facts.placements import Grade
from router.core.facts.tiers import CPU, SHARED, STORAGE, tier_of
from router.core.kv_events.decoding import Stored
from router.core.prompts.token_keys import TokenPrompt


class PullSource(Struct, gc=False):
    """A replica whose CPU memory has the first `tokens` of a prompt, in blocks of `block_tokens`."""

    replica: str
    tokens: int
    block_tokens: int


STORES_MAX = 4  # shared stores remembered, of up to 512 Ki blocks each
_ESTIMATED = Grade.ESTIMATED


class Tiered:
    """The replicas that have tiers. Of a fleet that has none, `replicas` is empty and nothing here is called."""

    def __init__(self, masks: Masks) -> None:
        self._masks = masks
        self.replicas: dict[str, Reported] = {}
        self._groups: dict[str, str] = {}  # replica -> what it serves
        self._stores: dict[tuple[str, int], BlockStore] = {}  # (what is served, tokens of a block) -> store

    def serves(self, replica: str, group: str) -> None:
        """Replicas of one `group` serve the same models."""
        if self._groups.get(replica) != group:
            self._groups[replica] = group
            if known := self.replicas.get(replica):
                known.engine.shared = None  # speaking of the store makes it known again

    def heard(self, known: Reported, event: Stored) -> None:
        """The replica is about to take note of a block in a tier."""
        self.replicas[known.name] = known
        engine = known.engine
        if engine.shared is None and not engine.apart and known.block_tokens and tier_of(event.medium) == SHARED:
            engine.shared = self._store_of(self._groups.get(known.name, ""), known.block_tokens)

    def forget(self, replica: str) -> None:
        """The replica left the fleet."""
        self.replicas.pop(replica, None)
        self._groups.pop(replica, None)

    def add(
        self, size: int, keys: Sequence[int], depths: dict[str, int], found: dict[str, StoredPrefix], *, whole: bool
    ) -> None:
        """Add to what replicas are `found` to store of a prompt what they can load behind it. `keys` are those of its
        blocks of `size` tokens, of which replicas have `depths` on the GPU; `whole`: no tokens are left behind these.
        """
        walk = TierWalk(self._masks, keys)
        for name, known in self.replicas.items():
            if known.suspended or known.block_tokens != size or known.shown[0] is _ESTIMATED:
                continue
            bits = known.engine.tier_bits()
            depth, last = depths.get(name, 0), whole and known.whole
            if last and depth == len(keys):
                depth -= 1  # from the GPU no prompt's last token is taken, and from a tier it is
            counts = walk.loaded(depth, [bit for _, bit in bits], known.engine.chunk)
            tiers = {tier: count * size for (tier, _), count in zip(bits, counts, strict=True) if count}
            if tiers:
                said = found.get(name) or known.empty()
                said.tokens, said.tiers = depth * size + sum(tiers.values()), tiers
                said.dropped = 0  # the blocks dropped of the GPU's match may be loaded
                said.whole = last and said.tokens == len(keys) * size
                found[name] = said

    def leading(self, prompt: TokenPrompt, names: Iterable[str]) -> list[PullSource]:
        """What replicas with these `names` have of a prompt in CPU memory, from its beginning on and whatever their
        GPUs hold, the most first. Whose events say nothing for sure has nothing."""
        found, walks = list[PullSource](), dict[int, TierWalk]()
        for name in names:
            known = self.replicas.get(name)
            if known is None or known.suspended or known.shown[0] is _ESTIMATED:
                continue
            size = known.block_tokens
            bit = next((bit for tier, bit in known.engine.tier_bits() if tier == CPU), 0)
            if not bit or size not in prompt.keys:
                continue
            walk = walks.get(size)
            if walk is None:
                walk = walks[size] = TierWalk(self._masks, prompt.keys[size])
            if blocks := walk.leading(bit):
                found.append(PullSource(name, blocks * size, size))
        found.sort(key=_tokens, reverse=True)
        return found

    def compared(self, replica: str, block_tokens: int, prompt_tokens: int, predicted: int, actual: int) -> None:
        """The replica counted so many tokens of a prompt as cached. vLLM (0.32, offloading/scheduler.py,
        _lookup_complete_chunks) loads and counts all blocks of a prompt that ends with one, others never the last."""
        known = self.replicas.get(replica)
        if known is not None and block_tokens and prompt_tokens % block_tokens == 0:
            if actual == prompt_tokens:
                known.whole = True
            elif predicted == prompt_tokens == actual + block_tokens:
                known.whole = False

    def missed(self, replica: str, stored: StoredPrefix, prompt: TokenPrompt, actual_tokens: int) -> None:
        """The replica found fewer tokens of a prompt than it was believed to have: what files were believed to have
        behind these is not there. What other tiers lose, they say."""
        known, size = self.replicas.get(replica), stored.block_tokens
        if known is None or not stored.tiers or not size or actual_tokens < stored.gpu_tokens:
            return
        gone = prompt.keys.get(size, [])[actual_tokens // size : stored.tokens // size]
        engine = known.engine
        if SHARED in stored.tiers and engine.shared is not None:
            engine.shared.drop(gone)
        if STORAGE in stored.tiers and engine.store is not None:
            engine.store.drop(gone)

    def _store_of(self, group: str, size: int) -> BlockStore:
        store = self._stores.get((group, size))
        if store is None:
            if len(self._stores) >= STORES_MAX:
                self._drop_oldest()
            store = self._stores[group, size] = BlockStore(self._masks, f"{SHARED} {size} {group}")
        return store

    def _drop_oldest(self) -> None:
        store = self._stores.pop(next(iter(self._stores)))
        for known in self.replicas.values():
            if known.engine.shared is store:
                known.engine.shared = None
        store.close()


def _tokens(source: PullSource) -> int:
    return source.tokens

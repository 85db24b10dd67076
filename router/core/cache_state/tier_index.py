"""Replicas that keep blocks in tiers below their GPUs, and the stores that replicas share.

Replicas of the same models that report a remote store share it. Each can load the blocks that another one wrote, and a
replica that leaves removes none of them. A replica with an engine that uses another hash seed is detected by the first
block that both replicas name. It gets no credit for the store after that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from router.core.cache_state.event_state import ReplicaEventState, StoredPrefix
from router.core.cache_state.holder_bitmap import HolderBitmap
from router.core.cache_state.tier_blocks import BlockStore, TierMatch
from router.core.kv_events.batch_decoder import Stored
from router.core.prompts.token_keys import TokenPrompt
from router.core.types.placements import Confidence
from router.core.types.tiers import CPU, SHARED, STORAGE, tier_of


class PullSource(Struct, gc=False):
    """Replica with the first `tokens` of a prompt in its CPU memory, in blocks of `block_tokens`."""

    replica: str
    tokens: int
    block_tokens: int


STORES_MAX = 4  # shared stores remembered, of up to 512 Ki blocks each
_ESTIMATED = Confidence.ESTIMATED


class TierIndex:
    """Replicas that have tiers. In a fleet without tiers, `replicas` is empty and no method here is called."""

    def __init__(self, masks: HolderBitmap) -> None:
        self._masks = masks
        self.replicas: dict[str, ReplicaEventState] = {}
        self._groups: dict[str, str] = {}  # replica -> name of the models that it serves
        self._stores: dict[tuple[str, int], BlockStore] = {}  # (group, tokens of a block) -> store

    def serves(self, replica: str, group: str) -> None:
        """Set the group of a replica. Replicas of one `group` serve the same models."""
        if self._groups.get(replica) != group:
            self._groups[replica] = group
            if known := self.replicas.get(replica):
                known.engine.shared = None  # the next event of the store sets it again

    def register_tier_block(self, known: ReplicaEventState, event: Stored) -> None:
        """Prepare for a tier event of this replica, before it is applied."""
        self.replicas[known.name] = known
        engine = known.engine
        if engine.shared is None and not engine.apart and known.block_tokens and tier_of(event.medium) == SHARED:
            engine.shared = self._store_of(self._groups.get(known.name, ""), known.block_tokens)

    def forget(self, replica: str) -> None:
        """Remove a replica that left the fleet."""
        self.replicas.pop(replica, None)
        self._groups.pop(replica, None)

    def add(
        self, size: int, keys: Sequence[int], depths: dict[str, int], found: dict[str, StoredPrefix], *, whole: bool
    ) -> None:
        """Add the blocks that replicas can load from tiers to the prefixes `found` on their GPUs.

        - `keys`: the prompt's blocks of `size` tokens.
        - `depths`: number of these that each replica has on the GPU.
        - `whole`: no tokens follow these blocks.
        """
        walk = TierMatch(self._masks, keys)
        for name, known in self.replicas.items():
            if known.suspended or known.block_tokens != size or known.shown[0] is _ESTIMATED:
                continue
            bits = known.engine.tier_bits()
            depth, last = depths.get(name, 0), whole and known.whole
            if last and depth == len(keys):
                depth -= 1  # the GPU's match never includes a prompt's last token; a tier's can
            counts = walk.count_loadable(depth, [bit for _, bit in bits], known.engine.chunk)
            tiers = {tier: count * size for (tier, _), count in zip(bits, counts, strict=True) if count}
            if tiers:
                said = found.get(name) or known.empty()
                said.tokens, said.tiers = depth * size + sum(tiers.values()), tiers
                said.dropped = 0  # the blocks dropped from the GPU's match can be loaded
                said.whole = last and said.tokens == len(keys) * size
                found[name] = said

    def find_cpu_prefixes(self, prompt: TokenPrompt, names: Iterable[str]) -> list[PullSource]:
        """Return the part of a prompt that replicas with these `names` have in CPU memory, longest first.

        It counts from the beginning of the prompt, regardless of the blocks on GPUs. Replicas without events that count
        are omitted.
        """
        found, walks = list[PullSource](), dict[int, TierMatch]()
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
                walk = walks[size] = TierMatch(self._masks, prompt.keys[size])
            if blocks := walk.count_leading(bit):
                found.append(PullSource(name, blocks * size, size))
        found.sort(key=_tokens, reverse=True)
        return found

    def check_last_block(
        self, replica: str, block_tokens: int, prompt_tokens: int, predicted: int, actual: int
    ) -> None:
        """Compare the cached tokens of a prompt with the prediction.

        vLLM (0.32, offloading/scheduler.py, _lookup_complete_chunks) loads and counts all blocks of a prompt that ends
        with a block; other engines never count the last one.
        """
        known = self.replicas.get(replica)
        if known is not None and block_tokens and prompt_tokens % block_tokens == 0:
            if actual == prompt_tokens:
                known.whole = True
            elif predicted == prompt_tokens == actual + block_tokens:
                known.whole = False

    def drop_missing(self, replica: str, stored: StoredPrefix, prompt: TokenPrompt, actual_tokens: int) -> None:
        """Remove blocks from file stores after a replica found fewer tokens of a prompt than predicted. Other tiers
        report their own removals."""
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

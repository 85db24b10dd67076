"""Locations of conversations, by the session identity that clients send.

The text of a prompt shows which replica holds its beginning. The client's session identity adds three facts:

- A sub-agent's first prompt is expected at its parent's replica, because both share a beginning.
- A conversation with prompts that cannot be read is expected at its last replica.
- A final conversation is not expected back. Its probability of return and its price of eviction no longer count.

The expected replica only decides between equal prices.

Routers that share state (core/peer_sync) exchange the locations: conversations have the same names in all of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from msgspec import Struct

from router.core.cache_state.prefix_index import PrefixIndex
from router.core.estimators.reuse import ReuseModel
from router.core.fleet.lease import Lease, LeaseConversation
from router.core.placement.placement_request import PlacementRequest
from router.core.placement.prefix_match import PromptMatch
from router.core.types.requests import ConversationRef


class ConversationLocation(Struct, gc=False):  # a Struct for speed: core/types/requests.py
    """The last prompt of a conversation."""

    replica: str
    own_at: int  # leading blocks that others had requested before the conversation began
    own_key: int  # key of the first block after them; 0 if they are the whole prompt
    mark: int  # key of the prompt's last full block; 0 if it has no full block
    end: int  # key of the last block that counts as cached, including the answer
    ended_s: float = -1.0  # time at which its answer ended; -1 until then


class Conversations:
    """A bounded map; the least recently used conversations are dropped."""

    def __init__(self, conversations_max: int, index: PrefixIndex, reuse: ReuseModel) -> None:
        self._conversations_max = conversations_max
        self._index = index
        self._reuse = reuse
        # Oldest first. Not a dict: one that loses its first entries is searched from its first slot, 20 us a time.
        self._of: OrderedDict[int, ConversationLocation] = OrderedDict()

    def __len__(self) -> int:
        return len(self._of)

    def find_expected_replica(self, wanted: PlacementRequest, match: PromptMatch) -> str:
        """Return the replica on which the prompt is expected, or "". A prompt that can be read is expected only on a
        replica that is estimated to hold some of it."""
        kin, chain = wanted.conversation, wanted.chain
        if kin is None or match.home:
            return ""
        found = self._of.get(_name(wanted, kin.conversation))
        if found is None and kin.parent:
            found = self._of.get(_name(wanted, kin.parent))
        if found is None:
            return ""
        id_ = found.replica
        stored = match.stored
        holds = chain is None or id_ in match.depths or (stored is not None and id_ in stored)
        return id_ if holds else ""

    def note_placement(self, wanted: PlacementRequest, kin: ConversationRef, match: PromptMatch, lease: Lease) -> None:
        """Record the placement of a conversation's request, and store the conversation in `lease`."""
        name, keys = _name(wanted, kin.conversation), lease.prompt.keys
        before = self._of.get(name)
        at = before.own_at if before is not None else -1
        # new, or with another beginning than before
        if before is None or at >= len(keys) or keys[at] != before.own_key:
            at = max(match.depths.values(), default=0)
        lease.conversation = LeaseConversation(name, at, kin.final)
        self.relocate(name, lease.replica, keys, at, final=kin.final)

    def relocate(self, name: int, replica: str, keys: Sequence[int], own_at: int, *, final: bool) -> None:
        """Record that a prompt of a conversation was placed here or by another router.

        - `keys`: keys of the prompt's blocks.
        - `own_at`: number of leading blocks that others had requested before.
        """
        before = self._of.pop(name, None)
        if final and before is not None:
            self._release(before)
        last = keys[-1] if keys else 0
        self._of[name] = ConversationLocation(replica, own_at, keys[own_at] if own_at < len(keys) else 0, last, last)
        if len(self._of) > self._conversations_max:
            self._of.popitem(last=False)

    def note_response(self, name: int, replica: str, answer_keys: Sequence[int], now_s: float, *, final: bool) -> None:
        """Record the end of an answer in a conversation; it is counted under these keys after its prompt."""
        found = self._of.get(name)
        if found is None or found.replica != replica:
            return
        found.ended_s = now_s
        if answer_keys:
            found.end = answer_keys[-1]
        if final:
            del self._of[name]
            self._release(found)

    def _release(self, found: ConversationLocation) -> None:
        """Stop expecting the conversation's blocks to be requested again."""
        if found.mark:
            self._reuse.withdraw(found.mark)
        if found.own_key:
            self._index.release(found.replica, found.own_key, found.end, found.ended_s)


def _name(wanted: PlacementRequest, conversation: int) -> int:
    """Return the name of a conversation with one model: if a client uses two models, each has its own cache."""
    return conversation ^ wanted.chain.root if wanted.chain is not None else conversation

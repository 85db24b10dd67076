"""Where conversations are, by what their clients say of themselves.

The text of a prompt tells by itself which replica holds its beginning. What a client says adds three things: a
sub-agent's first prompt is expected where its parent's is, since they share what both begin with; a conversation whose
prompt cannot be read is expected where it was; and of one that is over nothing is expected back, so neither the chance
that it returns nor the price of evicting it counts any longer. Where prompts are expected decides between equal prices
only.

Routers that share (core/sharing) tell each other where conversations went: names are the same in all of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from msgspec import Struct

from router.core.cache.estimate import PrefixIndex
from router.core.facts.requests import Kin
from router.core.fleet.lease import Lease
from router.core.learned.reuse import ReuseMemory
from router.core.placement.match import PromptMatch
from router.core.placement.wanted import Wanted


class Whereabouts(Struct, gc=False):  # a Struct for speed: core/facts/requests.py
    """The last prompt of a conversation."""

    replica: str
    own_at: int  # leading blocks that others had asked for before the conversation began
    own_key: int  # key of the first block behind them; 0 where there is none
    mark: int  # key of the prompt's last full block; 0 where it has none
    end: int  # key of the last block that is counted as held, of the answer too
    ended_s: float = -1.0  # time at which its answer ended; -1 while it has not


class Conversations:
    """Bounded; those that were asked for longest ago make room."""

    def __init__(self, conversations_max: int, index: PrefixIndex, reuse: ReuseMemory) -> None:
        self._conversations_max = conversations_max
        self._index = index
        self._reuse = reuse
        # Oldest first. Not a dict: one that loses its first entries is searched from its first slot, 20 us a time.
        self._of: OrderedDict[int, Whereabouts] = OrderedDict()

    def __len__(self) -> int:
        return len(self._of)

    def expected(self, wanted: Wanted, match: PromptMatch) -> str:
        """The replica on which the prompt is expected; "" where none is. A prompt that can be read is expected only
        where some of it is believed to be held."""
        kin, chain = wanted.kin, wanted.chain
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

    def placed(self, wanted: Wanted, kin: Kin, match: PromptMatch, lease: Lease) -> None:
        """A request of a conversation was placed; `lease` knows from now on whose it is."""
        name, keys = _name(wanted, kin.conversation), lease.keys
        before = self._of.get(name)
        at = before.own_at if before is not None else -1
        if before is None or at >= len(keys) or keys[at] != before.own_key:  # new, or it begins otherwise than before
            at = max(match.depths.values(), default=0)
        lease.conversation, lease.own_at, lease.final = name, at, kin.final
        self.went(name, lease.replica, keys, at, final=kin.final)

    def went(self, name: int, replica: str, keys: Sequence[int], own_at: int, *, final: bool) -> None:
        """A prompt of a conversation was placed, here or by another router: the keys of its blocks, of which so many
        leading ones others had asked for before."""
        before = self._of.pop(name, None)
        if final and before is not None:
            self._release(before)
        last = keys[-1] if keys else 0
        self._of[name] = Whereabouts(replica, own_at, keys[own_at] if own_at < len(keys) else 0, last, last)
        if len(self._of) > self._conversations_max:
            self._of.popitem(last=False)

    def ended(self, name: int, replica: str, answer_keys: Sequence[int], now_s: float, *, final: bool) -> None:
        """The answer to a request of a conversation is over, and is counted under these keys behind its prompt."""
        found = self._of.get(name)
        if found is None or found.replica != replica:
            return
        found.ended_s = now_s
        if answer_keys:
            found.end = answer_keys[-1]
        if final:
            del self._of[name]
            self._release(found)

    def _release(self, found: Whereabouts) -> None:
        """Nothing of the conversation is expected back."""
        if found.mark:
            self._reuse.withdraw(found.mark)
        if found.own_key:
            self._index.release(found.replica, found.own_key, found.end, found.ended_s)


def _name(wanted: Wanted, conversation: int) -> int:
    """The name of a conversation with one model: where a client asks two, each has a cache of its own."""
    return conversation ^ wanted.chain.root if wanted.chain is not None else conversation

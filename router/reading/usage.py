"""Whether an engine is asked for a stream's usage that its client did not ask for: only where it sends none unasked.

An engine may be started so that it sends usage to all clients (SGLang's `--stream-response-default-include-usage`,
vLLM's `--enable-force-include-usage`). Clients then get it as from the engine alone: it is neither asked for nor taken
out. vLLM has no page that says so, so each replica's streams do: until one is whole, streams are left as they are, and
so is one in LEFT_ALONE from then on. Usage beside choices shows it in any stream that was asked for the last event.

A process keeps this for itself, for the paths of a server each: all of its ranks have the same flags.
"""

from __future__ import annotations

from collections import OrderedDict

from msgspec import Struct

from router.core.facts.replicas import Replica
from router.reading.question import Question

LEFT_ALONE = 256  # streams of which one is left as it is
SERVERS_MAX = 8_192  # paths of servers that are kept in mind; the one learned longest ago makes room


class _Seen(Struct):
    """What the streams of one path of one server showed."""

    unasked: bool  # usage comes whether it is asked for or not
    streams: int = 0  # streams since, of which usage could be asked for


class UsageAsking:
    """What is known of each server, and what that means for a request."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, str], _Seen] = OrderedDict()

    def ask(self, question: Question, replica: str) -> None:
        """Ask for the usage of a stream that is about to be sent to this replica, if that may be."""
        if not question.asks_usage or question.usage_asked:
            return
        seen = self._seen.get(_key(question, replica))
        if seen is None or seen.unasked:
            return
        seen.streams += 1
        if seen.streams % LEFT_ALONE:
            question.ask_usage()

    def takes_out(self, question: Question, replica: str) -> bool:
        """Whether usage is to be taken out of a stream of this replica: only the router asked for it."""
        if not question.usage_asked:
            return False
        seen = self._seen.get(_key(question, replica))
        return seen is None or not seen.unasked

    def learn(self, question: Question, replica: str, *, unasked: bool) -> None:
        """A stream of this replica for which nobody asked was whole, with usage or without. Or one showed beside its
        choices that usage comes `unasked`."""
        key = _key(question, replica)
        self._seen.pop(key, None)
        self._seen[key] = _Seen(unasked)
        if len(self._seen) > SERVERS_MAX:
            self._seen.popitem(last=False)

    def forget(self, replica: str) -> None:
        """The replica is gone: what comes to its address may have other flags."""
        server = Replica(replica).url
        for key in [key for key in self._seen if key[0] == server]:
            del self._seen[key]


def _key(question: Question, replica: str) -> tuple[str, str]:
    return replica.partition("#")[0], question.request.path

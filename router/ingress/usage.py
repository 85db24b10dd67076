"""Decision to request a stream's usage that its client did not request: only if the engine sends none by itself.

An engine may be started so that it sends usage to all clients (SGLang's `--stream-response-default-include-usage`,
vLLM's `--enable-force-include-usage`). Clients then get it as they would without the router: it is neither requested
nor removed. vLLM has no endpoint that reports this flag, so it is learned from each replica's streams. Until one stream
is complete, streams are left unchanged. After that, one stream in LEFT_ALONE is left unchanged. Usage in an event with
choices reveals the flag in any stream for which the last event was requested.

Each process learns this for itself, for each path of a server: all of its ranks have the same flags.
"""

from __future__ import annotations

from collections import OrderedDict

from msgspec import Struct

from router.core.types.replicas import Replica
from router.ingress.proxied_request import ProxiedRequest

LEFT_ALONE = 256  # of this number of streams, one is left unchanged
SERVERS_MAX = 8_192  # paths of servers that are kept; the one learned longest ago is replaced


class _Seen(Struct):
    """Evidence from the streams of one path of one server."""

    unasked: bool  # usage is sent even if it is not requested
    streams: int = 0  # later streams for which usage could be requested


class UsageAsking:
    """Knowledge of each server's usage flag, and the decision for a request."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, str], _Seen] = OrderedDict()

    def ask(self, question: ProxiedRequest, replica: str) -> None:
        """Request the usage of a stream that is about to be sent to this replica, if that is allowed."""
        if not question.asks_usage or question.usage_asked:
            return
        seen = self._seen.get(_key(question, replica))
        if seen is None or seen.unasked:
            return
        seen.streams += 1
        if seen.streams % LEFT_ALONE:
            question.ask_usage()

    def takes_out(self, question: ProxiedRequest, replica: str) -> bool:
        """True if usage must be removed from a stream of this replica, because only the router requested it."""
        if not question.usage_asked:
            return False
        seen = self._seen.get(_key(question, replica))
        return seen is None or not seen.unasked

    def learn(self, question: ProxiedRequest, replica: str, *, unasked: bool) -> None:
        """Record a complete stream of this replica without a request for usage: it ended with usage or without. Also
        record a stream with usage in an event with choices, which shows that usage is sent `unasked`."""
        key = _key(question, replica)
        self._seen.pop(key, None)
        self._seen[key] = _Seen(unasked)
        if len(self._seen) > SERVERS_MAX:
            self._seen.popitem(last=False)

    def forget(self, replica: str) -> None:
        """Forget the server of a replica that is gone: the next server at its address may have other flags."""
        server = Replica(replica).url
        for key in [key for key in self._seen if key[0] == server]:
            del self._seen[key]


def _key(question: ProxiedRequest, replica: str) -> tuple[str, str]:
    return replica.partition("#")[0], question.request.path

"""Selection of decisions by a query of `/admin/decisions`, for records in memory and for rows in the file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from router.admin.decision_rows import conversation_of
from router.admin.query_params import BadParameter, seconds
from router.core.types.cache_misses import MissReason
from router.core.types.placements import PlacementReason
from router.telemetry.request_record import RequestRecord, session_key

PARAMETERS = ("id", "session", "model", "reason", "tenant", "replica", "status", "from_s", "to_s")
REASONS = tuple(dict.fromkeys([*(reason.value for reason in PlacementReason), *(miss.value for miss in MissReason)]))
# prefixes that vLLM adds to a request's id to name its answer
ENGINE_PREFIXES = ("chatcmpl-", "cmpl-", "embd-", "resp_")
_OURS = re.compile(r"-[0-9a-f]{16}\Z")  # suffix of a tenant's own id at an engine


@dataclass(frozen=True, slots=True)
class DecisionFilter:
    """Conditions that must all hold; None: any value. Times are Unix seconds of a request's arrival."""

    ids: tuple[str, ...] = ()  # any of these request ids; () for any id
    sessions: tuple[str, ...] = ()  # keys of sessions or names of conversations, any of them; () for any session
    model: str | None = None
    reason: str | None = None  # of the placement, or of tokens that missed
    tenant: str | None = None
    replica: str | None = None
    statuses: range | None = None
    from_s: float | None = None
    to_s: float | None = None  # exclusive

    def fits(self, record: RequestRecord) -> bool:
        """True if a record meets all conditions."""
        receipt = record.receipt
        return (
            (not self.ids or record.id in self.ids)
            and (
                not self.sessions or record.client.session in self.sessions or conversation_of(record) in self.sessions
            )
            and (self.model is None or record.model == self.model)
            and (self.tenant is None or record.client.tenant == self.tenant)
            and (self.replica is None or (receipt is not None and receipt.replica == self.replica))
            and (self.statuses is None or record.status in self.statuses)
            and (self.from_s is None or record.at_s >= self.from_s)
            and (self.to_s is None or record.at_s < self.to_s)
            and (self.reason is None or self._has_reason(record))
        )

    def _has_reason(self, record: RequestRecord) -> bool:
        placed = record.receipt is not None and record.receipt.reason == self.reason
        return placed or (record.cache.miss is not None and self.reason in record.cache.miss.misses)

    def to_sql(self) -> tuple[str, list[str | float]]:
        """Return the same conditions in SQL for the file's table `decisions`, and the arguments."""
        parts, values = ["1"], list[str | float]()

        def add(condition: str, *arguments: str | float) -> None:
            parts.append(condition)
            values.extend(arguments)

        if self.ids:
            add(f"id IN ({', '.join('?' * len(self.ids))})", *self.ids)
        if self.sessions:
            any_ = ", ".join("?" * len(self.sessions))
            add(f"(session IN ({any_}) OR conversation IN ({any_}))", *self.sessions, *self.sessions)
        for name, value in (("model", self.model), ("tenant", self.tenant), ("replica", self.replica)):
            if value is not None:
                add(f"{name} = ?", value)
        if self.reason is not None:
            add("(reason = ? OR instr(misses, ?))", self.reason, f" {self.reason} ")
        if self.statuses is not None:
            add("status >= ? AND status < ?", self.statuses.start, self.statuses.stop)
        if self.from_s is not None:
            add("at_s >= ?", self.from_s)
        if self.to_s is not None:
            add("at_s < ?", self.to_s)
        return " AND ".join(parts), values


def filter_of(query: Mapping[str, str]) -> DecisionFilter:
    """Return the conditions of a query's parameters; an empty value is no condition. Raises BadParameter."""
    reason = query.get("reason") or None
    if reason is not None and reason not in REASONS:
        raise BadParameter(f"'reason' must be one of {', '.join(REASONS)}, not '{reason[:64]}'.")
    return DecisionFilter(
        ids=ids_of(query.get("id", "")),
        sessions=_sessions(query.get("session", ""), query.get("tenant", "")),
        model=query.get("model") or None,
        reason=reason,
        tenant=query.get("tenant") or None,
        replica=query.get("replica") or None,
        statuses=_statuses(query.get("status", "")),
        from_s=seconds("from_s", query.get("from_s")),
        to_s=seconds("to_s", query.get("to_s")),
    )


def ids_of(given: str) -> tuple[str, ...]:
    """Return the request ids that a given id may stand for: the id itself, and the id without an engine's prefix and
    without the router's suffix (`reading/answering.engine_id`)."""
    if not given:
        return ()
    bare = [given.removeprefix(prefix) for prefix in ENGINE_PREFIXES if given.startswith(prefix)]
    bare += [_OURS.sub("", id_) for id_ in (given, *bare) if _OURS.search(id_)]
    return (given, *(id_ for id_ in bare if id_))


def _sessions(given: str, tenant: str) -> tuple[str, ...]:
    """Return the names that a session may be stored under: the name that its client gave, the key that pages show, a
    conversation. An isolated tenant's sessions are found by name if the query names the tenant."""
    if not given:
        return ()
    name = given.encode(errors="surrogatepass")
    return (given, session_key(name), *([session_key(name, tenant)] if tenant else ()))


def _statuses(text: str) -> range | None:
    """Return a status such as 503, or a class such as 5xx, as a range. Raises BadParameter."""
    if not text:
        return None
    if len(text) == 3 and text[0] in "12345":
        if text[1:].lower() == "xx":
            return range(int(text[0]) * 100, int(text[0]) * 100 + 100)
        if text.isascii() and text.isdigit():
            return range(int(text), int(text) + 1)
    raise BadParameter(f"'status' must be a status such as 503 or a class such as 5xx, not '{text[:64]}'.")

"""Answers of the router itself: ids of requests, errors in the client's dialect, pages filtered for their caller, and
reports of a conversation with a changed history.

A changed history is reported in a warning header or in a refusal's message. Names in a path come from the client, so
they are escaped in a header. The message quotes text only if excerpts are enabled.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from math import ceil
from urllib.parse import quote

import msgspec

from router.config.api_keys import Caller
from router.core.dialects import Dialect
from router.core.insights.breakdown import with_actual_usage
from router.core.types.cache_misses import Difference, PromptAnalysis
from router.core.types.placements import EndReason, Receipt
from router.former_names import header_lines
from router.http.request import Refusal, Request, date_line
from router.ingress.proxied_request import RESPONSES, STORED, ProxiedRequest
from router.placement_api import MODELS, HttpPage, RequestPrincipal, json_page, no_model_page
from router.telemetry.request_record import CAUSE, NO_REPLICA_READY, RequestRecord

RETRY_AFTER_S = 2
DRAINED = "drained"  # ending of an answer that was cut because the router stops
CLIENT_LEFT_STATUS = 499  # nginx's code for a client that left; used in metrics and logs only
WAITED_MIN_S = 0.0005  # shorter waits are left out of the receipt
# Endings after which the prompt was certainly computed. After any other ending this is unknown.
COMPUTED = (EndReason.OK, EndReason.CLIENT_LEFT)
ID_CHARS_MAX = 128
ID_BYTES = 16
# Lengths of the two parts of an id for an engine: characters of the client's own id, then random characters.
ENGINE_WORDS_CHARS_MAX, ENGINE_RANDOM_CHARS = 64, 16
IDS_AT_ONCE = 64
DETAIL_CHARS_MAX = 300
HISTORY_CHANGED = "history_changed"
ID_WITHIN_BYTES = 64 << 10  # the id of a stored response is searched only in the first bytes of an answer
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[\w-]{1,128})"')
_PATH_CHARS_MAX = 200
_ODD = re.compile(r"[^A-Za-z0-9.-]+")
# characters of a path that a header shows unescaped, in addition to letters, digits and _.-~
_PLAIN = "[].$/:,;=@+!*()'"


def history_change(sighting: PromptAnalysis | None) -> Difference | None:
    """Return the first difference from the conversation's earlier prompts. None if the history is unchanged or unknown.
    A difference from other conversations of the same template is no change of history."""
    return sighting.difference if sighting is not None and not sighting.appended else None


def change_header(found: Difference) -> str:
    """Format a change as a header's value: printable ASCII, `name=value` with no spaces in the values."""
    path = quote(found.path[:_PATH_CHARS_MAX], safe=_PLAIN, errors="replace")
    return f"message={found.message} path={path} at_bytes={found.at_bytes} change={found.change}"


def change_message(found: Difference) -> str:
    """Format a change as a message for the client. The earlier text is quoted if excerpts are enabled. It is the
    client's own, because no prompt of a tenant is compared with another tenant's."""
    place = f"message {found.message} ({found.role})" if found.message >= 0 else "the part before its messages"
    said = f"This conversation is append-only, but {place} was changed: {found.change} at "
    said += f"{found.path[:_PATH_CHARS_MAX]}, byte {found.at_bytes}."
    if found.before or found.after:
        said += f" Before: {found.before!r}. Now: {found.after!r}."
    return said


def route_of(path: str) -> str:
    """Return the metrics label of a path, without response ids."""
    return RESPONSES + "/{id}" if path.startswith(STORED) else path


def copy_to_record(question: ProxiedRequest, record: RequestRecord) -> None:
    """Copy a request's attributes to its record, before it is placed."""
    wanted = question.wanted
    record.model, record.cache.analysis = wanted.model or "", wanted.sighting
    record.stream = wanted.ask.stream or question.form_streams
    record.repairs, record.warning = question.repairs, question.warning
    client, whose = record.client, question.whose
    if whose is not None:
        client.session, client.agent = whose.session, whose.agent
        client.agent_id, client.agent_parent, client.agent_final = whose.conversation, whose.parent, whose.final
    client.priority, record.times.wanted_ttft_ms = wanted.priority, question.ttft_ms
    record.failover.not_continued = question.not_continued


def hide_cross_tenant(caller: Caller, record: RequestRecord) -> bool:
    """True if the client must not learn that another identity has the prompt."""
    tenant, sighting = caller.tenant, record.cache.analysis
    return (tenant is not None and tenant.isolated) or (sighting is not None and sighting.apart)


def receipt_text(receipt: Receipt, record: RequestRecord, *, isolated: bool) -> str:
    """Return receipt headers: lines, each with its CRLF, that report the replica of a request and the reason for it."""
    told = ""
    if receipt.miss is not None and receipt.miss.misses:
        told = f"x-warmroute-miss: {receipt.miss.header(isolated=isolated)}\r\n"
    if record.times.queued_s >= WAITED_MIN_S:
        told += f"x-warmroute-waited-ms: {round(record.times.queued_s * 1e3)}\r\n"
    if receipt.predicted_tier_tokens:
        told += f"x-warmroute-predicted-tier-tokens: {receipt.predicted_tier_tokens}\r\n"
    if receipt.pull is not None:
        told += header_lines("x-warmroute-predicted-p2p-tokens", receipt.pull.tokens)
    for other in receipt.other_replicas:
        told += f"x-warmroute-prefill-replica: {other}\r\n"
    if receipt.ttft_ms and record.stream:
        told += f"x-warmroute-predicted-ttft-ms: {receipt.ttft_ms:.0f}\r\n"
        told += f"x-warmroute-predicted-ttft-p90-ms: {receipt.ttft_p90_ms:.0f}\r\n"
    if record.failover.not_continued:
        told += header_lines("x-warmroute-stream-failover-refused", record.failover.not_continued)
    return (
        f"x-warmroute-request-id: {record.id}\r\n"
        f"x-warmroute-replica: {receipt.replica}\r\n"
        f"x-warmroute-reason: {receipt.reason}\r\n"
        f"x-warmroute-grade: {receipt.grade}\r\n"
        f"x-warmroute-predicted-cached-tokens: {receipt.predicted_cached_tokens}\r\n{told}"
    )


def final_receipt(
    dialect: Dialect, receipt: Receipt, record: RequestRecord, *, isolated: bool
) -> Callable[[bytes], bytes]:
    """Return a function that makes the final receipt from the last bytes of a stream. The final receipt is a comment at
    the end of the stream, with the engine's own counts, which headers are sent too early to have. A comment is a line
    of an event stream that begins with a colon. Clients ignore it (WHATWG HTML 9.2.6)."""

    def comment(tail: bytes) -> bytes:
        usage = dialect.stream_usage(tail)
        usage = receipt.adjust_usage(usage) if usage is not None else None
        miss = with_actual_usage(receipt.miss, usage) if receipt.miss is not None else None
        told = {
            "request_id": record.id,
            "replica": receipt.replica,
            "reason": receipt.reason,
            "grade": receipt.grade,
            "prompt_tokens": usage.prompt_tokens if usage is not None else receipt.prompt_tokens,
            "predicted_cached_tokens": receipt.predicted_cached_tokens,
            "predicted_tier_tokens": receipt.predicted_tier_tokens,
            "predicted_pull_tokens": receipt.pull.tokens if receipt.pull is not None else 0,
            **receipt.stage_fields(),
            "cached_tokens": usage.cached_tokens if usage is not None else None,
            "completion_tokens": usage.completion_tokens if usage is not None else None,
            "miss": miss.header(isolated=isolated) if miss is not None else None,
            "wanted_ttft_ms": record.times.wanted_ttft_ms,
            "in_time": record.times.in_time,
            **({"continued": record.failover.continued[0]} if record.failover.continued[0] else {}),
        }
        return b": warmroute %b\n\n" % msgspec.json.encode(told)

    return comment


def parse_response_id(head: bytes) -> str | None:
    """Find the id of a stored response in the beginning of an answer; None if it has no such id."""
    found = _RESPONSE_ID.search(head, 0, ID_WITHIN_BYTES)
    return found[1].decode() if found else None


def no_replica_ready(model: str, standing: str) -> Refusal:
    """Return the refusal of a request that no replica can take now. `model` is the name that it requests, or "" if that
    is unknown. `standing` gives the number of ready replicas, and the reasons why others are not ready."""
    of = f" of model '{model}'" if model else ""
    message = f"No replica{of} is ready for this request; try again after the seconds of Retry-After."
    return Refusal(503, NO_REPLICA_READY, message, cause=standing)


def refuse(
    request: Request, record: RequestRecord, refusal: Refusal, dialect: Dialect, *, tells_cause: bool = False
) -> None:
    """Answer with an error in the dialect, and record it. The record has the cause of a failure behind the router. The
    client gets the cause only with `tells_cause`, because it may name replicas."""
    record.status, record.ending = refusal.status, "refused"
    message = str(refusal)
    caused = f"{message}{CAUSE}{refusal.cause}." if refusal.cause else message
    record.error, record.detail = refusal.code, caused[:DETAIL_CHARS_MAX]
    if tells_cause:
        message = caused
    lines = [date_line(), b"content-type: application/json\r\n", f"x-warmroute-request-id: {record.id}\r\n".encode()]
    if refusal.status == 401:
        lines.append(b"WWW-Authenticate: Bearer\r\n")  # RFC 9110 section 11.6.1
    if refusal.code == HISTORY_CHANGED:  # official clients retry after any other 409
        lines.append(b"x-should-retry: false\r\n")
    if refusal.status == 415:
        lines.append(b"Accept-Encoding: identity\r\n")  # RFC 9110 section 12.5.3
    if refusal.status in (429, 503):
        after_s = RETRY_AFTER_S if refusal.retry_after_s is None else max(1, ceil(refusal.retry_after_s))
        lines.append(b"Retry-After: %d\r\n" % after_s)
    request.answer(refusal.status, lines, dialect.error(refusal.status, refusal.code, message, refusal.param), own=True)


def request_id(request: Request) -> str:
    """Return the client's own id if it is short and printable; otherwise a new one."""
    given = request.header(b"x-request-id")
    if 0 < len(given) <= ID_CHARS_MAX and given.isascii() and given.isprintable():
        return given
    return next(_ids)


def engine_id(request: Request, id_: str) -> str:
    """Return the id under which an engine gets a tenant's request: the client's id, so that it can be found in the
    engine's log, and then random characters. So no request has the id of another active request. Engines refuse such
    duplicates, and older ones crash on them. Of the client's id only letters, digits, dots and hyphens are kept,
    because vLLM's connectors parse addresses from ids."""
    if b"x-request-id" not in request.fields:  # the id is one of ours
        return id_
    return f"{_ODD.sub('-', id_[:ENGINE_WORDS_CHARS_MAX])}-{next(_ids)[:ENGINE_RANDOM_CHARS]}"


def _new_ids() -> Iterator[str]:
    """Yield random ids. They must be unguessable, because engines refuse an id that is active already. One system call
    gives the bytes of many ids."""
    while True:
        random = os.urandom(ID_BYTES * IDS_AT_ONCE).hex()
        for start in range(0, len(random), 2 * ID_BYTES):
            yield random[start : start + 2 * ID_BYTES]


_ids = _new_ids()


def filter_models(page: HttpPage, path: str, allows: Callable[[str], bool]) -> HttpPage:
    """Filter a page at or below /v1/models for a caller that may use some models only. The others appear not to
    exist."""
    if path != MODELS:
        name = path.removeprefix(MODELS + "/")
        return page if allows(name) else no_model_page(name)
    if page.status != 200:
        return page
    listed = msgspec.json.decode(page.body)
    return json_page({**listed, "data": [row for row in listed["data"] if allows(row["id"])]})


def principal_of(caller: Caller, *, receipts: bool) -> RequestPrincipal:
    """Return the caller as the owner of its requests. The owner may read as much about them as answers report;
    `receipts` is True if any answer has a receipt."""
    tenant = caller.tenant
    if tenant is None:
        return RequestPrincipal(None, receipts, isolated=False)
    return RequestPrincipal(tenant.name, receipts and tenant.receipts, tenant.isolated)

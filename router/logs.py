"""Log lines to standard error: one JSON object a line, or text for people. Never a prompt, an answer or a key."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

import msgspec

from router.metrics import RequestRecord

requests_log = logging.getLogger("router.requests")


def setup(level: str, format_: str, *, requests: bool) -> None:
    """Configure the root logger of this process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if format_ == "json" else _Text())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    requests_log.setLevel(logging.INFO if requests else logging.CRITICAL)


def log_request(record: RequestRecord) -> None:
    """One line for one request."""
    if not requests_log.isEnabledFor(logging.INFO):
        return
    fields: dict[str, object] = {
        "request_id": record.id,
        "route": record.route,
        "model": record.model,
        "status": record.status,
        "ending": record.ending,
        "duration_ms": round(record.duration_s * 1e3, 1),
    }
    if record.ttft_s is not None:
        fields["ttft_ms"] = round(record.ttft_s * 1e3, 1)
    if (receipt := record.receipt) is not None:
        fields |= {"replica": receipt.replica, "reason": receipt.reason, "grade": receipt.grade}
        fields |= {"prompt_tokens": receipt.prompt_tokens, "predicted_cached_tokens": receipt.predicted_cached_tokens}
    if (usage := record.usage) is not None:
        fields |= {"cached_tokens": usage.cached_tokens, "completion_tokens": usage.completion_tokens}
    if record.retries:
        fields["retries"] = [f"{kind} at {replica}" for kind, replica in record.retries]
    if record.error:
        fields["error"] = record.error
    if record.detail:
        fields["detail"] = record.detail
    requests_log.info("request", extra={"fields": fields})


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def _plain(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{k}={_plain(v)}" for k, v in getattr(record, "fields", {}).items() if v not in ("", None))
        at = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S.%f")[:-3]
        line = f"{at} {record.levelname.lower():7} {record.getMessage()} {fields}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line

"""Access to the router: API keys, and the tenants that they belong to.

The keys file is YAML, a list with an entry for each key (`warmroute make-key` writes one):

    - {name: acme-1, sha256: "9f86...", tenant: acme, models: [m], requests_per_min: 600, priority: low}

Only the SHA-256 of a key is kept. A key is 256 random bits, so that it cannot be found from a digest by trying. Slow
hashes are for passwords that people choose, and would cost every request milliseconds. Keys are looked up by digest.
Timing reveals something of the digest only, and no attacker can steer a digest towards another without breaking
SHA-256.

Models and priority apply to the key. All other fields (rates, isolation, receipts, `normalize_tools`, `history_policy`,
`stream_failover` and `ttft_ms`) apply to the tenant, and may be set with any of its keys. Keys that contradict each
other are refused.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from hmac import compare_digest
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta

from router.config.file_contents import content
from router.config.files import NotYaml, yaml_of
from router.config.former_settings import rename_keys
from router.config.suggestions import describe_mismatch, nearest, removed_value
from router.core.dialects.tool_normalization import REPAIRS, in_order
from router.core.types.requests import Priority
from router.former_names import KEY_FIELDS

READY_PAGE, PING = "/readyz", "/ping"
READY_ALIASES = ("/health", PING)  # engines' paths for the same, requested by load balancers and benchmarks
UNAUTHENTICATED_PATHS = ("/healthz", READY_PAGE, *READY_ALIASES)  # paths that need no key


PREFIX = "wr-"
KEY_BYTES = 32
FILE_BYTES_MAX = 64 << 20
UNKNOWN_MAX = 20  # fields of one entry that are named as unknown: finding the nearest known one takes 0.1 ms
OTHER, NONE = "other", "none"  # label values that no tenant may be named
TTFT_MS_MAX = 3_600_000  # longest time to first token that may be requested: an hour
OFF, WARN, REJECT = APPEND_ONLY = ("off", "warn", "reject")  # treatment of conversations with a changed history

CONTINUE = ("off", "asked", "exact")  # treatment of streams that break
_OF_TENANT = (
    "requests_per_min", "tokens_per_min", "isolate", "receipts", "normalize_tools", "history_policy", "ttft_ms",
    "stream_failover",
)  # fmt: skip

_NAME = re.compile(r"[A-Za-z0-9][\w.@:-]{0,63}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SECRET = re.compile(rf"[0-9A-Fa-f]{{64}}|{PREFIX}[\w-]{{40}}")  # a digest, or a key of `make_key`
_PRIORITIES = {priority.name.lower(): priority for priority in Priority}


class KeysError(ValueError):
    """Raised for problems of a keys file, one line each; no line has a key or a digest."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Tenant:
    """Tenant of a key, with its permissions and limits."""

    name: str
    priority: Priority = Priority.NORMAL
    models: frozenset[str] | None = None  # None: all models
    requests_per_min: int | None = None  # None: no limit
    tokens_per_min: int | None = None
    isolated: bool = False  # other tenants cannot share its cached prefixes
    receipts: bool = False
    normalize_tools: tuple[str, ...] = ()  # normalizations of the tools of its requests
    history_policy: str = OFF
    ttft_ms: float | None = None  # default time to first token of its requests; None: any
    stream_failover: str = ""  # one of CONTINUE; "": as the model or the settings define

    def allows(self, model: str) -> bool:
        """True if the tenant may use this model."""
        return self.models is None or model in self.models


@dataclass(frozen=True, slots=True)
class Caller:
    """Owner of a request. If the router requires no keys, name and priority are hints of the request itself."""

    name: str = ""
    priority: Priority = Priority.NORMAL
    tenant: Tenant | None = None  # None unless proved by a key


ANONYMOUS = Caller()


class _Entry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    sha256: str
    tenant: str
    models: tuple[str, ...] | None = None
    requests_per_min: Annotated[int, Meta(gt=0)] | None = None
    tokens_per_min: Annotated[int, Meta(gt=0)] | None = None
    priority: str = "normal"
    isolate: bool | None = None
    receipts: bool | None = None
    normalize_tools: tuple[str, ...] | None = None
    history_policy: str | Literal[False] | None = None  # YAML reads `off` as false
    ttft_ms: Annotated[float, Meta(gt=0, le=TTFT_MS_MAX)] | None = None
    stream_failover: str | Literal[False] | None = None

    def __post_init__(self) -> None:
        if self.normalize_tools is not None and not set(self.normalize_tools) - set(REPAIRS):
            self.normalize_tools = in_order(self.normalize_tools)
        if self.history_policy is False:
            self.history_policy = OFF
        if self.stream_failover is False:
            self.stream_failover = OFF


class Keys:
    """Table of keys. Reading the file again makes a new one."""

    def __init__(
        self, by_digest: Mapping[str, Tenant], tenants: Mapping[str, Tenant], former: Mapping[str, str] | None = None
    ) -> None:
        self._by_digest = by_digest
        self.former = former or {}  # former fields in the file -> fields
        # By name. Models and priority, which belong to keys, are those of the tenant's first key.
        self.tenants: Mapping[str, Tenant] = tenants

    def __len__(self) -> int:
        return len(self._by_digest)

    @property
    def digests(self) -> list[str]:
        """SHA-256 of each key, as the file has them."""
        return list(self._by_digest)

    def find(self, key: bytes) -> Tenant | None:
        """Return the tenant of a key; None if the key is not in the file."""
        return self._by_digest.get(hashlib.sha256(key).hexdigest())

    @classmethod
    def load(
        cls,
        file: Path,
        *,
        isolate: bool,
        receipts: bool,
        normalize_tools: tuple[str, ...] = (),
        history_policy: str = OFF,
    ) -> Keys:
        """Read a keys file. The other arguments are defaults for tenants with keys that lack the field. Raises
        KeysError."""
        problems: list[str] = []
        former: dict[str, str] = {}
        entries = [_entry(each, number, problems, former) for number, each in enumerate(_read(file), 1)]
        good = [entry for entry in entries if entry is not None]
        for what, values in (("name", [e.name for e in good]), ("sha256", [e.sha256 for e in good])):
            known = set[str]()
            for entry, value in zip(good, values, strict=True):
                if value in known:
                    problems.append(f"key '{entry.name}': its {what} is also used by another key")
                    break
                known.add(value)
        shared = _merge_tenant_fields(good, problems)
        if problems:
            raise KeysError([f"{file}: {problem}" for problem in problems])
        by_digest: dict[str, Tenant] = {}
        tenants: dict[str, Tenant] = {}
        for entry in good:
            fields = shared[entry.tenant]
            made = Tenant(
                name=entry.tenant,
                priority=_PRIORITIES[entry.priority],
                models=None if entry.models is None else frozenset(entry.models),
                requests_per_min=fields.get("requests_per_min"),
                tokens_per_min=fields.get("tokens_per_min"),
                isolated=fields.get("isolate", isolate),
                receipts=fields.get("receipts", receipts),
                normalize_tools=fields.get("normalize_tools", normalize_tools),
                history_policy=fields.get("history_policy", history_policy),
                ttft_ms=fields.get("ttft_ms"),
                stream_failover=fields.get("stream_failover", ""),
            )
            by_digest[entry.sha256] = made
            tenants.setdefault(entry.tenant, made)
        return cls(by_digest, tenants, former)


def _read(file: Path) -> list[Any]:
    """Return the entries of a file, unchecked. Raises KeysError."""
    try:
        text = content(file, FILE_BYTES_MAX)
        listed = yaml_of(text) if len(text) <= FILE_BYTES_MAX else None
    except OSError as error:
        raise KeysError([f"{file}: {error.strerror or error}"]) from error
    except NotYaml as error:
        where = f", line {error.line}" if error.line else ""  # the error's own text may quote a line of the file
        raise KeysError([f"{file}: not YAML{where}"]) from error
    if not isinstance(listed, list) or not listed:
        raise KeysError([f"{file}: must be a list with one entry per key, but has no entry"])
    return listed


def _entry(  # `given` is any value
    given: Any,  # noqa: ANN401
    number: int,
    problems: list[str],
    former: dict[str, str],
) -> _Entry | None:
    """Return one entry, or None after adding its problems. `former` gets its former fields."""
    named = given.get("name") if isinstance(given, dict) else None
    which = f"key '{named}'" if isinstance(named, str) and is_valid_name(named) else f"entry {number}"
    if not isinstance(given, dict):
        problems.append(f"{which}: must be a mapping with name, sha256 and tenant")
        return None
    fields, twice = _Entry.__struct_fields__, list[str]()
    given = rename_keys(given, KEY_FIELDS, twice, former)
    problems += [f"{which}: {problem}" for problem in twice]
    odd = islice((name for name in given if name not in fields), UNKNOWN_MAX)
    unknown = [f"unknown field '{_quote_text(name)}'{nearest(str(name), fields)}" for name in odd]
    try:
        entry = None if unknown else msgspec.convert(given, _Entry)
    except msgspec.ValidationError:
        unknown, entry = _find_bad_fields(given), None
    wrong = unknown if entry is None else _wrong(entry)
    problems += [f"{which}: {problem}" for problem in wrong]
    return None if wrong else entry


def _find_bad_fields(given: dict[str, Any]) -> list[str]:
    """Return the fields of an entry that are missing or of a wrong type; never the file's values, which may be keys."""
    wrong = [f"'{name}' is missing" for name in ("name", "sha256", "tenant") if name not in given]
    for name, type_ in get_type_hints(_Entry, include_extras=True).items():
        try:
            msgspec.convert(given.get(name, ""), type_ if name in given else str)
        except msgspec.ValidationError:
            wrong.append(f"'{name}': {describe_mismatch(type_, given[name], secret=True)}")
    return wrong


def _wrong(entry: _Entry) -> list[str]:
    """Return the problems of an entry with fields of the right types; an empty list without any."""
    wrong = []
    for field, value in (("name", entry.name), ("tenant", entry.tenant)):
        if not is_valid_name(value):
            wrong.append(f"'{field}' must have up to 64 letters, digits and . _ @ : - and begin with a letter or digit")
    if entry.tenant in (OTHER, NONE):
        wrong.append(f"'tenant' cannot be '{entry.tenant}', which is reserved in metrics")
    if not _DIGEST.fullmatch(entry.sha256):
        wrong.append("'sha256' must be the SHA-256 of the key as 64 lower-case hexadecimal digits, not the key itself")
    if entry.priority not in _PRIORITIES:
        wrong.append(f"'priority' must be one of {', '.join(_PRIORITIES)}")
    if entry.models is not None and not entry.models:
        wrong.append("'models' is empty; remove it to allow all models")
    odd = [name for name in entry.normalize_tools or () if name not in REPAIRS]
    wrong += [f"'normalize_tools': unknown repair '{_quote_text(name)}'{nearest(name, REPAIRS)}" for name in odd]
    if entry.history_policy not in (None, *APPEND_ONLY):
        wrong.append(f"'history_policy' must be one of {', '.join(APPEND_ONLY)}")
    if entry.stream_failover not in (None, *CONTINUE):
        removed = removed_value("upstream.stream_failover", entry.stream_failover)
        wrong.append("'stream_failover'" + (f": {removed}" if removed else f" must be one of {', '.join(CONTINUE)}"))
    return wrong


def _merge_tenant_fields(entries: list[_Entry], problems: list[str]) -> dict[str, dict[str, Any]]:
    """Merge the fields that the keys of each tenant set for the tenant."""
    tenants: dict[str, dict[str, Any]] = {}
    for entry in entries:
        fields = tenants.setdefault(entry.tenant, {})
        for field in _OF_TENANT:
            value = getattr(entry, field)
            if value is not None and fields.setdefault(field, value) != value:
                problems.append(f"key '{entry.name}': its {field} contradicts another key of tenant '{entry.tenant}'")
    return tenants


def priority_of(name: str) -> Priority | None:
    """Return a priority by its name; None for any other."""
    return _PRIORITIES.get(name)


def is_valid_name(name: str) -> bool:
    """True if a tenant or a key may have this name. A text that looks like a key or a digest is refused, and is not
    shown."""
    return _NAME.fullmatch(name) is not None and not _SECRET.search(name)


def _quote_text(text: object) -> str:
    """Return a text of the file as a problem quotes it."""
    return "..." if _SECRET.search(str(text)) else f"{text!s:.40}"


def make_key() -> str:
    """Make a new key."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def entry_of(key: str, tenant: str, **fields: Any) -> str:  # noqa: ANN401 - fields of an entry
    """Return the lines of a keys file for this key; fields that are None or empty are left out. Raises KeysError."""
    digest = hashlib.sha256(key.encode()).hexdigest()
    given = {"name": f"{tenant:.55}-{digest[:8]}", "sha256": digest, "tenant": tenant}
    given |= {name: value for name, value in fields.items() if value}
    problems: list[str] = []
    if _entry(given, 1, problems, {}) is None:
        raise KeysError(problems)
    lines = (f"{name}: {msgspec.json.encode(value).decode()}" for name, value in given.items())  # any JSON is YAML
    return "- " + "\n  ".join(lines) + "\n"


def is_admin(authorization: bytes, token: str) -> bool:
    """True if this header's value has the admin token, compared in constant time; False if there is no token."""
    scheme, _, given = authorization.partition(b" ")
    return scheme.lower() == b"bearer" and bool(token) and compare_digest(given.strip(), token.encode())

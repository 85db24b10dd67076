"""Settings that are pairs written as one string: their meaning, and their problems."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from yarl import URL

from router.config.files import expand_path
from router.config.schema import DisaggSettings
from router.config.suggestions import removed_value
from router.core.disagg.prefill_hosts import host_problem
from router.core.types.disagg_types import KvConnector, Probe

MODELS_MAX = 256  # names in `discovery.models`, each with its own series
_ADDRESS = re.compile(r"([\w.-]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}/?")


def base_urls(given: Iterable[str]) -> tuple[str, ...]:
    """Return base URLs of replicas as they are used: `localhost:9100` is short for `http://localhost:9100`."""
    return tuple(f"http://{url}" if _ADDRESS.fullmatch(url) else url for url in given)


def url_problems(urls: Iterable[str], name: str = "replicas") -> list[str]:
    """Return the problems of base URLs of replicas in the setting `name`."""
    given = list(urls)
    problems = []
    for url in given:
        if not _base(url):
            problems.append(f"'{name}': '{url}' is not a base URL such as http://10.0.0.1:8000")
        elif (base := url.rstrip("/").removesuffix("/v1")) != url.rstrip("/"):
            problems.append(f"'{name}': '{url}' must not end with /v1, which is part of the request path: {base}")
    if not problems and len({str(URL(url.rstrip("/"))) for url in given}) < len(given):
        problems.append(f"'{name}': a URL is duplicated")
    return problems


def same_base(url: str) -> str:
    """Return the canonical spelling of a replica's URL or id: host in small letters, no port that its scheme implies,
    no / after it. A text that is no URL is returned unchanged."""
    base, rank, number = url.partition("#")
    try:
        return str(URL(base.rstrip("/"))) + rank + number
    except ValueError:
        return url


def split_problems(disagg: DisaggSettings, replicas: Iterable[str] = ()) -> list[str]:
    """Return the problems of the settings `disagg`. `replicas`: all replicas, if there cannot be others; if empty, the
    lists are not compared with them."""
    problems = url_problems(disagg.prefill, "disagg.prefill") + url_problems(disagg.decode, "disagg.decode")
    problems += peer_problems(disagg.endpoints, "disagg.endpoints", 8998)
    for each in disagg.hosts:
        if host_problem(each):
            problems.append(f"'disagg.hosts': '{each}' must be a host or a CIDR such as 10.0.0.0/8")
    named = [name for name in ("prefill", "decode", "port", "endpoints") if getattr(disagg, name)]
    if named and not disagg.kv_connector:
        problems.append(f"'disagg.{named[0]}': needs 'disagg.kv_connector', which turns disaggregated prefill on")
    if problems:
        return problems
    prefill, decode = {same_base(url) for url in disagg.prefill}, {same_base(url) for url in disagg.decode}
    for url in sorted(prefill & decode):
        problems.append(
            f"'disagg.prefill', 'disagg.decode': '{url}' is in both; list it in neither if it prefills and decodes"
        )
    known = {same_base(url) for url in replicas}
    for name, urls in (("prefill", prefill), ("decode", decode)):
        for url in sorted(urls - known if known else ()):
            problems.append(f"'disagg.{name}': '{url}' is not in 'replicas'")
    connector = disagg.kv_connector
    without_server = [each for each in KvConnector if each.traits.probe is Probe.NONE]
    if connector in without_server and (disagg.port or disagg.endpoints):
        problems.append(
            f"'disagg.port', 'disagg.endpoints': must be empty with {connector}; its answers contain the address"
        )
    return problems


def _base(url: str) -> bool:
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.query and not parts.fragment
        fine = fine and url.isascii() and url.isprintable() and " " not in url and "?" not in url
        # yarl, which connects, is stricter than urlsplit: no backslash, for example
        fine = fine and bool(URL(url).host)
        return bool(fine and (parts.port is None or parts.port > 0) and parts.username is None)
    except ValueError:
        return False


def event_endpoints(given: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Parse `REPLICA=ENDPOINT[=REPLAY]` into replica -> (endpoint, replay endpoint or "")."""
    parts = (each.split("=") for each in given)
    return {replica.rstrip("/"): (rest[0], rest[1] if rest[1:] else "") for replica, *rest in parts}


def peer_endpoints(given: Iterable[str]) -> dict[str, str]:
    """Parse `REPLICA=HOST:PORT` into replica -> address."""
    return {replica.rstrip("/"): address for replica, _, address in (each.rpartition("=") for each in given)}


def peer_problems(endpoints: Iterable[str], name: str = "p2p.endpoints", port: int = 5710) -> list[str]:
    """Return the problems of a setting `name` of such pairs. `port` is the port in its example."""
    example, seen = f"http://10.0.0.1:8000=10.0.0.1:{port}", set[str]()
    problems = list[str]()
    for given in endpoints:
        replica = given.rpartition("=")[0]
        fine = re.fullmatch(r"https?://\S+=([\w.-]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}", given) is not None
        if not (fine and 0 < int(given.rpartition(":")[2]) < 1 << 16 and _base(replica.partition("#")[0])):
            problems.append(f"'{name}': '{given}' must have the form {example}")
        elif same_base(replica) in seen:
            problems.append(f"'{name}': '{replica}' is duplicated")
        else:
            seen.add(same_base(replica))
    return problems


def event_topics(given: Iterable[str]) -> dict[str, str]:
    """Parse `TOPIC=REPLICA` into topic -> replica."""
    return {topic: replica.rstrip("/") for topic, _, replica in (each.rpartition("=") for each in given)}


def objectives(pairs: Iterable[str]) -> dict[str, str]:
    """Parse `NAME=PRIORITY` into a mapping."""
    return {name: priority for name, _, priority in (given.rpartition("=") for given in pairs)}


def objective_problems(pairs: Iterable[str]) -> list[str]:
    """Return the problems of the setting `extproc.objectives`."""
    wrong = [given for given in pairs if not re.fullmatch(r"[^=\s]+=(high|normal|low)", given)]
    return [f"'extproc.objectives': '{given}' must have the form NAME=high, NAME=normal or NAME=low" for given in wrong]


def continued_models(pairs: Iterable[str]) -> dict[str, str]:
    """Parse `MODEL=exact` into a mapping."""
    return {model: mode for model, _, mode in (given.rpartition("=") for given in pairs)}


def model_problems(names: Sequence[str]) -> list[str]:
    """Return the problems of the setting `discovery.models`."""
    problems = [f"'discovery.models': {name!r} is not a valid model name" for name in names if not name.strip()]
    twice = [name for name, count in Counter(names).items() if count > 1]
    problems += [f"'discovery.models': '{name}' is duplicated" for name in twice]
    if len(names) > MODELS_MAX:
        problems.append(f"'discovery.models': {len(names)} names are given, at most {MODELS_MAX}")
    return problems


def continue_problems(pairs: Iterable[str]) -> list[str]:
    """Return the problems of the setting `upstream.stream_failover_models`."""
    problems = []
    for given in pairs:
        if not re.fullmatch(r".+=(off|asked|exact)", given):
            removed = removed_value("upstream.stream_failover", given.rpartition("=")[2])
            wrong = f": {removed}" if removed else " must be MODEL=off, MODEL=asked or MODEL=exact"
            problems.append(f"'upstream.stream_failover_models': '{given}'{wrong}")
    return problems


def event_problems(endpoints: Iterable[str], topics: Iterable[str], bind: str) -> list[str]:
    """Return the problems of the settings `events.*`."""
    problems = []
    for given in endpoints:
        replica, *rest = given.split("=")
        if not replica.startswith("http") or len(rest) not in (1, 2) or not all("://" in each for each in rest):
            example = "http://10.0.0.1:8000=tcp://10.0.0.1:5557=tcp://10.0.0.1:5558"
            problems.append(f"'events.endpoints': '{given}' must have the form {example}")
    for given in topics:
        topic, _, replica = given.rpartition("=")
        if not topic or not replica.startswith("http"):
            problems.append(f"'events.topics': '{given}' must have the form topic=http://10.0.0.1:8000")
    if bind and not re.fullmatch(r"(tcp|ipc)://\S+", bind):
        problems.append(f"'events.bind': '{bind}' is not an address such as tcp://0.0.0.0:5557")
    return problems


def tokenizers(sources: Iterable[str]) -> dict[str, str]:
    """Parse `MODEL=PATH` and `PATH` into a mapping; "" stands for every model. A leading ~ is expanded."""
    pairs: dict[str, str] = {}
    for given in sources:
        model, equals, path = given.partition("=")
        model, path = (model, path) if equals and not _exists(given) else ("", given)
        pairs[model] = str(expand_path(path)) if path.startswith("~") else path
    return pairs


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # a name that is too long for any file
        return False


def template_kwargs(given: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Parse `MODEL={JSON object}` into a mapping. Raises ValueError."""
    pairs: dict[str, dict[str, Any]] = {}
    for each in given:
        model, _, text = each.partition("=")
        pairs[model] = msgspec.json.decode(text, type=dict[str, Any])
    return pairs


def token_problems(sources: Iterable[str], kwargs: Iterable[str]) -> list[str]:
    """Return the problems of the settings `tokens.*`."""
    problems = []
    try:
        if not all(tokenizers(sources).values()):
            problems.append("'tokens.sources': must be MODEL=PATH or PATH")
    except OSError as error:
        problems.append(f"'tokens.sources': {error.strerror}")
    try:
        template_kwargs(kwargs)
    except ValueError as error:
        problems.append(f"'tokens.template_kwargs': must be MODEL={{JSON object}}: {error}")
    return problems

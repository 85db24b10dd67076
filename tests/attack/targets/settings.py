"""What operators write: the file of settings, the environment, the file of keys."""

from __future__ import annotations

import hashlib
import re
import tempfile
from pathlib import Path

from router.cli.config_loader import load
from router.cli.config_sources import ENV_PREFIX
from router.config import url_maps
from router.config.api_keys import Keys, KeysError
from router.config.schema import Settings, SettingsError, field_keys
from tests.attack.target import Target

DIGEST = hashlib.sha256(b"a key").hexdigest()
SECRET = re.compile(r"[0-9a-f]{64}|wr-[\w-]{40}")
PROBLEM_CHARS_MAX = 4_000  # length of one problem as it is told


def settings_file(data: bytes) -> None:
    """A file of settings: settings, or problems that a person can read."""
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
        file.write(data)
        file.flush()
        try:
            settings = load(Path(file.name))
        except SettingsError as error:
            _readable(error.problems, len(data))
        else:
            _pairs(settings)


def _pairs(settings: Settings) -> None:
    """What was accepted as pairs can be taken apart."""
    assert all(url_maps.event_endpoints(settings.events.endpoints).values())
    assert all(url_maps.event_topics(settings.events.topics).values())
    assert all(url_maps.peer_endpoints([*settings.p2p.endpoints, *settings.disagg.endpoints]).values())
    assert all(url_maps.objectives(settings.extproc.objectives).values())
    assert all(url_maps.continued_models(settings.upstream.stream_failover_models).values())
    assert None not in url_maps.template_kwargs(settings.tokens.template_kwargs).values()


def environment(data: bytes) -> None:
    """Variables, one a line, as NAME=VALUE without the prefix that all of them have."""
    lines = [line.partition("=") for line in data.decode("utf-8", "surrogateescape").splitlines()]
    try:
        load(env={ENV_PREFIX + name: value for name, _, value in lines})
    except SettingsError as error:
        _readable(error.problems, len(data))


def _readable(problems: list[str], size: int) -> None:
    assert problems
    for problem in problems:
        assert problem.strip()
        assert len(problem) <= PROBLEM_CHARS_MAX + 2 * size, "a problem is longer than what it is about"


def keys_file(data: bytes) -> None:
    """A file of keys: a table in which every key is found, or problems that tell no digest."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        try:
            keys = Keys.load(Path(file.name), isolate=True, receipts=False)
        except KeysError as error:
            problems = error.problems
        else:
            assert len(keys) >= len(keys.tenants) > 0
            keys.find(data)
            return
        assert not any(SECRET.search(problem) for problem in problems), "a problem tells a key or a digest"
        _readable(problems, len(data))


KEYS = sorted(field_keys())
YAML = (
    b"- ", b": ", b"? ", b"&a ", b"*a", b"<<: *a", b"!!python/object:os.system ", b"!!binary ", b"!!timestamp ",
    b"|\n", b"---\n", b"...\n", b"%YAML 9.9\n", b"2001-99-99", b"0x", b"1_0", b"1:60", b".inf", b".nan", b"~",
    b"off", b"\t",
)  # fmt: skip
SECTIONS = tuple(f"{key.replace('.', ': {')}: ".encode() for key in KEYS)
VARIABLES = tuple(f"{key.replace('.', '_').upper()}=".encode() for key in KEYS)
ENTRY = (
    b"name: ", b"sha256: ", b"tenant: ", b"models: [", b"priority: low", b"isolate: true", b"history_policy: off",
    DIGEST.encode(), b"requests_per_min: ", b"normalize_tools: [sort_tools]",
)  # fmt: skip

TARGETS = (
    Target(settings_file, (*YAML, *SECTIONS), steps=(400_000, 8_000), held_bytes=(8 << 20, 20_000)),
    Target(environment, VARIABLES, steps=(400_000, 4_000), held_bytes=(8 << 20, 4_000)),
    Target(keys_file, (*YAML, *ENTRY), steps=(60_000, 4_000), held_bytes=(72 << 20, 20_000)),
)

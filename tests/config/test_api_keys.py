"""The keys file: what it says, what is refused in it, and the command that writes its entries."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from router.cli.main import main
from router.config.api_keys import UNKNOWN_MAX, Keys, KeysError, Tenant, make_key
from router.core.types.requests import Priority
from tests.support.keyring import SECRET

DIGEST = hashlib.sha256(b"wr-key").hexdigest()
GOOD = {"name": "a", "sha256": DIGEST, "tenant": "acme"}


def load(
    path: Path,
    entries: Any,
    *,
    isolate: bool = False,
    receipts: bool = False,
    normalize_tools: tuple[str, ...] = (),
    history_policy: str = "off",
) -> Keys:
    """The table of a file with these entries, or with this text."""
    file = path / "keys.yaml"
    text = entries if isinstance(entries, bytes) else yaml.safe_dump(entries).encode()
    file.write_bytes(text)
    return Keys.load(
        file, isolate=isolate, receipts=receipts, normalize_tools=normalize_tools, history_policy=history_policy
    )


def problems(path: Path, entries: Any) -> list[str]:
    """What is wrong with it: one line each, and none that shows a digest."""
    with pytest.raises(KeysError) as caught:
        load(path, entries)
    assert all("\n" not in line and DIGEST not in line and "wr-" not in line for line in caught.value.problems)
    return caught.value.problems


def test_a_key_is_found_by_its_digest_alone(tmp_path: Path) -> None:
    """Everything that an entry says is its tenant's; another key, and the digest itself, are nobody's."""
    said = {"models": ["m", "n"], "requests_per_min": 5, "tokens_per_min": 7, "priority": "low", "isolate": True}
    said |= {"receipts": True, "normalize_tools": ["sort_tools"], "history_policy": "warn"}
    keys = load(tmp_path, [{**GOOD, **said, "ttft_ms": 9, "stream_failover": "exact"}])
    tenant = Tenant("acme", Priority.LOW, frozenset("mn"), 5, 7, True, True, ("sort_tools",), "warn", 9, "exact")
    assert keys.find(b"wr-key") == tenant
    assert keys.tenants == {"acme": tenant}
    assert keys.find(b"wr-kez") is keys.find(b"") is keys.find(DIGEST.encode()) is None


def test_what_is_not_said_is_the_settings(tmp_path: Path) -> None:
    """Isolation and receipts are on where the settings say so, unless the key says otherwise."""
    entries = [GOOD, {**GOOD, "name": "b", "sha256": "0" * 64, "tenant": "b", "isolate": False, "receipts": False}]
    keys = load(tmp_path, entries, isolate=True, receipts=True)
    assert keys.tenants["acme"] == Tenant("acme", isolated=True, receipts=True)
    assert keys.tenants["b"] == Tenant("b")


def test_repairs_and_history_are_the_settings_too(tmp_path: Path) -> None:
    """Unless a key says otherwise, with an empty list or `off` as well, which YAML takes for false; two keys of a
    tenant that name the same repairs in another order agree."""
    text = f"""
    - {{name: a, sha256: {DIGEST}, tenant: acme}}
    - {{name: b, sha256: b{"0" * 63}, tenant: b, normalize_tools: [], history_policy: off}}
    - {{name: c, sha256: c{"0" * 63}, tenant: c, normalize_tools: [canonical_tools, sort_tools]}}
    - {{name: d, sha256: d{"0" * 63}, tenant: c, normalize_tools: [sort_tools, canonical_tools],
       history_policy: "reject"}}
    """.encode()
    keys = load(tmp_path, text, normalize_tools=("sort_tools",), history_policy="warn")
    said = {name: (tenant.normalize_tools, tenant.history_policy) for name, tenant in keys.tenants.items()}
    both = ("sort_tools", "canonical_tools")
    assert said == {"acme": (("sort_tools",), "warn"), "b": ((), "off"), "c": (both, "reject")}


def test_several_keys_are_one_tenants(tmp_path: Path) -> None:
    """Rates said with one key are those of all keys of the tenant; models and priority are each key's own."""
    second = {**GOOD, "name": "b", "sha256": "0" * 64, "tokens_per_min": 9, "priority": "high", "models": ["m"]}
    keys = load(tmp_path, [{**GOOD, "requests_per_min": 5}, second])
    first = keys.find(b"wr-key")
    assert first is not None
    assert (first.requests_per_min, first.tokens_per_min, first.priority) == (5, 9, Priority.NORMAL)
    assert keys.tenants == {"acme": first}
    assert len(keys) == 2


WRONG: dict[str, tuple[Any, str]] = {
    "no list": ({"keys": [GOOD]}, "must be a list"),
    "nothing": (b"", "must be a list"),
    "no YAML": (b"- [wr-key\n- {", "not YAML, line"),
    "no text": (b"\xff\xfe\xff", "not YAML"),
    "an alias of itself": (b"- &a [*a]", "must be a mapping"),
    "an object": (b"- !!python/object/apply:os.getcwd []", "not YAML"),
    "no mapping": (["wr-key"], "entry 1: must be a mapping"),
    "no tenant": ([{"name": "a", "sha256": DIGEST}], "'tenant' is missing"),
    "a typing error": ([{**GOOD, "model": ["m"]}], "unknown field 'model'; the nearest is 'models'"),
    "the key itself": ([{**GOOD, "sha256": "wr-key"}], "not the key itself"),
    "a digest as a number": (f"- {{name: a, sha256: {'1' * 64}, tenant: t}}".encode(), "'sha256': must be a string"),
    "a rate of nothing": (
        [{**GOOD, "requests_per_min": 0}],
        "'requests_per_min': must be an integer of at least 1",
    ),
    "a rate in words": ([{**GOOD, "tokens_per_min": "many"}], "'tokens_per_min': must be an integer of at least 1"),
    "an odd priority": ([{**GOOD, "priority": "urgent"}], "one of high, normal, low"),
    "an odd name": ([{**GOOD, "tenant": "a\nb"}], "'tenant' must have"),
    "a reserved name": ([{**GOOD, "tenant": "other"}], "cannot be 'other'"),
    "an odd repair": (
        [{**GOOD, "normalize_tools": ["sorttools"]}],
        "unknown repair 'sorttools'; the nearest is 'sort_tools'",
    ),
    "a repair that is no list": (
        [{**GOOD, "normalize_tools": "sort_tools"}],
        "'normalize_tools': must be a list of strings",
    ),
    "an odd history": ([{**GOOD, "history_policy": "refuse"}], "'history_policy' must be one of off, warn, reject"),
    "a history in truth": ([{**GOOD, "history_policy": True}], "history_policy"),
    "no models": ([{**GOOD, "models": []}], "'models' is empty"),
    "a name twice": ([GOOD, {**GOOD, "sha256": "0" * 64}], "key 'a': its name is also used by another key"),
    "a digest twice": ([GOOD, {**GOOD, "name": "b"}], "key 'b': its sha256 is also used by another key"),
    "rates that differ": (
        [{**GOOD, "requests_per_min": 1}, {**GOOD, "name": "b", "sha256": "0" * 64, "requests_per_min": 2}],
        "key 'b': its requests_per_min contradicts another key of tenant 'acme'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, case: str) -> None:
    """Every mistake is refused with the entry's name, and without what the file has of secrets."""
    entries, said = WRONG[case]
    assert any(said in line for line in problems(tmp_path, entries)), problems(tmp_path, entries)


def test_few_of_very_many_unknown_fields_are_named(tmp_path: Path) -> None:
    """A file that is something else, such as a table of settings, does not fill the screen, nor take minutes."""
    named = problems(tmp_path, [{**GOOD, **{f"field {n}": n for n in range(10_000)}}])
    assert len(named) == UNKNOWN_MAX
    assert all("unknown field" in each for each in named)


def test_all_mistakes_are_said_at_once(tmp_path: Path) -> None:
    """Whoever mends a file mends it once."""
    assert len(problems(tmp_path, ["x", {**GOOD, "priority": "x", "models": []}, {**GOOD, "sha": 1}])) == 4


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=8), lambda inner: st.lists(inner)))
def test_any_file_is_a_table_or_an_error(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    """Whatever YAML a file holds, it is read, or refused by KeysError."""
    with pytest.raises(KeysError):
        load(tmp_path_factory.mktemp("keys"), tree)


@pytest.mark.promise("Clients' keys never reach engines, and the keys file holds digests only.", "tenants")
def test_the_command_makes_a_key_that_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`warmroute make-key acme >> keys.yaml`: the entry on standard output; the key on standard error, and only
    there."""
    arguments = [
        "--model",
        "m",
        "--model",
        "n",
        "--requests-per-min",
        "60",
        "--tokens-per-min",
        "9",
        "--priority",
        "low",
    ]
    text, shown = "", []
    for _ in range(2):
        assert main(["make-key", "acme", *arguments]) == 0
        said = capsys.readouterr()
        text += said.out
        shown.append(said.err.split()[-1])
    keys = load(tmp_path, text.encode())
    assert len(keys) == 2
    for key in shown:
        assert key.startswith("wr-")
        assert len(key) >= 3 + 256 / 6
        assert key not in text
        assert keys.find(key.encode()) == Tenant("acme", Priority.LOW, frozenset("mn"), 60, 9)
    assert main(["make-key", "a b"]) == 2
    assert main(["make-key", "a", "--requests-per-min", "-1"]) == 2
    assert "wr-" not in capsys.readouterr().err


def test_keys_have_256_random_bits() -> None:
    """No two are alike, and no byte of them is fixed."""
    made = [make_key()[3:] for _ in range(200)]
    assert len(set(made)) == 200
    assert all(len(set(column)) > 5 for column in zip(*[each[:42] for each in made], strict=True))


@pytest.mark.promise("The admin listener off loopback requires a token, and isolation requires a secret.", "admin")
@pytest.mark.usefixtures("bare_environment")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("listen: {admin_host: 0.0.0.0}", "'listen.admin_host': '0.0.0.0' is not a loopback address"),
        ("listen: {admin_host: example.org}", "'admin.token' is required"),
        ("admin: {token: short}", "'admin.token': has 5 characters; at least 16"),
        ("admin: {token: a-token-of-enough-letters, token_file: x}", "set only one of them"),
        ("admin: {token_file: /nowhere/at/all}", "'admin.token_file': /nowhere/at/all: No such file"),
        ("admin: {token: [secret-thing]}", "'admin.token': must be a string"),
        ("auth: {keys_file: /nowhere/at/all}", "'auth.keys_file': /nowhere/at/all: No such file"),
        ("auth: {isolate: true}", "'auth.isolate': needs 'auth.keys_file'"),
        ("auth: {secret: short-secret}", "at least 32 are required"),
        ("auth: {keys_file: KEYS, isolate: true}", "is required for isolated tenants"),
        ('upstream: {api_key: "a\\r\\nX: y"}', "printable ASCII"),
        ("admin: {replicas_allowed: ['http://example.org:80']}", "'http://example.org:80' must have the form"),
        ("admin: {replicas_allowed: ['http://10.0.0.1/8:80']}", "has host bits set"),
    ],
)
def test_settings_without_which_it_would_be_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    """What would leave the router open, or start it with a secret that is none, is refused before it listens; no
    secret is in what is said."""
    load(tmp_path, [GOOD])
    file = tmp_path / "warmroute.yaml"
    file.write_text(text.replace("KEYS", str(tmp_path / "keys.yaml")), encoding="utf-8")
    assert main(["check-config", str(file)]) == 2
    wrote = capsys.readouterr().err
    assert said in wrote
    assert "secret-thing" not in wrote
    assert "short-secret" not in wrote


@pytest.mark.usefixtures("bare_environment")
def test_settings_that_are_safe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its token the admin listener may be anywhere; with its secret tenants may be isolated."""
    load(tmp_path, [GOOD])
    (tmp_path / "token").write_text("a-token-of-enough-letters\n")
    (tmp_path / "secret").write_text(SECRET)
    settings = {
        "listen": {"admin_host": "0.0.0.0"},
        "admin": {
            "token_file": str(tmp_path / "token"),
            "replicas_allowed": ["http://10.0.0.0/8:80", "http://[::1]:9"],
        },
        "auth": {"keys_file": str(tmp_path / "keys.yaml"), "secret_file": str(tmp_path / "secret"), "isolate": True},
    }
    file = tmp_path / "warmroute.yaml"
    file.write_bytes(msgspec.json.encode(settings))
    assert main(["check-config", str(file)]) == 0, capsys.readouterr().err


@pytest.mark.usefixtures("bare_environment")
def test_check_config_sees_what_serve_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the environment and `--set` give is not missing in the file, and mistakes in them are named."""
    load(tmp_path, [GOOD])
    file = tmp_path / "warmroute.yaml"
    file.write_text("auth: {isolate: true}")
    keys = ["--set", f"auth.keys_file={tmp_path / 'keys.yaml'}"]
    assert main(["check-config", str(file), *keys]) == 2
    assert "'auth.secret'" in capsys.readouterr().err
    monkeypatch.setenv("WARMROUTE_AUTH_SECRET", SECRET)
    assert main(["check-config", str(file), *keys]) == 0, capsys.readouterr().err
    monkeypatch.setenv("WARMROUTE_AUTH_SECRETS", SECRET)
    assert main(["check-config", str(file), "--set", "auth.isolate"]) == 2
    assert main(["check-config", str(file), *keys]) == 2
    said = capsys.readouterr().err
    assert "--set auth.isolate: must be KEY=VALUE" in said
    assert "'WARMROUTE_AUTH_SECRETS'" in said

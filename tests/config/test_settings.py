from __future__ import annotations

import ast
import dataclasses
import importlib.machinery
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from router.cli.config_loader import load
from router.cli.config_sources import ENV_PREFIX
from router.config import schema as module
from router.config.schema import Settings, SettingsError, field_keys
from tests.support.keyring import Keyring


def problems(file: Path | None = None, env: dict[str, str] | None = None, **overrides: Any) -> list[str]:
    """What is wrong with these settings; two underscores in a keyword stand for a dot."""
    with pytest.raises(SettingsError) as caught:
        load(file, env, {key.replace("__", "."): value for key, value in overrides.items()})
    assert str(caught.value) == "\n".join(caught.value.problems)
    return caught.value.problems


def yaml_file(tmp_path: Path, text: str) -> Path:
    """A settings file with this text."""
    path = tmp_path / "warmroute.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_without_sources_there_are_defaults() -> None:
    """Nothing given: loopback, no replicas, the warm policy."""
    assert load() == Settings()
    assert load().listen.host == load().listen.admin_host == "127.0.0.1"
    assert load().routing.policy == "warm"


def test_later_sources_win(tmp_path: Path) -> None:
    """Defaults, file, environment, flags: each overrides the one before, field by field."""
    path = yaml_file(tmp_path, "listen: {port: 1, admin_port: 1, host: file}\nreplicas: [http://f]\n")
    env = {"WARMROUTE_LISTEN_PORT": "2", "WARMROUTE_LISTEN_ADMIN_PORT": "2", "PATH": "/bin"}
    settings = load(path, env, {"listen.port": 3})
    assert (settings.listen.port, settings.listen.admin_port, settings.listen.host) == (3, 2, "file")
    assert settings.replicas == ("http://f",)
    assert settings.listen.keepalive_s == Settings().listen.keepalive_s


def test_text_is_read_as_what_it_stands_for() -> None:
    """The environment and flags give text: numbers, booleans and lists with commas come out of it."""
    env = {
        "WARMROUTE_REPLICAS": "http://a:1, http://b:2,",
        "WARMROUTE_LOG_REQUESTS": "false",
        "WARMROUTE_PROBE_INTERVAL_S": "0.5",
        "WARMROUTE_LIMITS_BODY_BYTES_MAX": "1024",
    }
    settings = load(env=env)
    assert settings.replicas == ("http://a:1", "http://b:2")
    assert (settings.log.requests, settings.probe.interval_s, settings.limits.body_bytes_max) == (False, 0.5, 1024)


@pytest.mark.parametrize("text", ["", "# nothing\n", "listen:\nrouting: {}\n"])
def test_an_empty_file_is_fine(tmp_path: Path, text: str) -> None:
    """No keys, or sections without any, are the defaults."""
    assert load(yaml_file(tmp_path, text)) == Settings()


@pytest.mark.parametrize(
    ("text", "wrong", "right"),
    [
        ("listen: {prot: 1}", "listen.prot", "listen.port"),
        ("listens: {port: 1}", "listens", "listen"),
        ("replica: [http://a]", "replica", "replicas"),
        ("routing: {polcy: warm}", "routing.polcy", "routing.policy"),
        ("policy: warm", "policy", "routing.policy"),
        ("limits: {body_bytes: 1}", "limits.body_bytes", "limits.body_bytes_max"),
    ],
)
def test_a_typo_in_a_file_is_named_with_the_nearest_key(tmp_path: Path, text: str, wrong: str, right: str) -> None:
    """Unknown keys are refused, never ignored, and the right one is suggested."""
    (problem,) = problems(yaml_file(tmp_path, text))
    assert f"'{wrong}'" in problem
    assert f"'{right}'" in problem


def test_a_typo_elsewhere_is_named_too() -> None:
    """Environment variables with our prefix and dotted overrides are held to the same."""
    (problem,) = problems(env={"WARMROUTE_LISTEN_PROT": "1", "OTHER_LISTEN_PROT": "1"})
    assert "'WARMROUTE_LISTEN_PROT'" in problem
    assert "'WARMROUTE_LISTEN_PORT'" in problem
    (problem,) = problems(listen__prot=1)
    assert "'listen.port'" in problem


def test_every_problem_is_listed(tmp_path: Path) -> None:
    """One run shows all that is wrong, whichever source it came from, one line each."""
    path = yaml_file(tmp_path, "listen: {port: 99999, prot: 1}\nprobe: 5\nlog: {level: loud, format: xml}\n")
    found = problems(path, {"WARMROUTE_LIMITS_BODY_BYTES_MAX": "-1", "WARMROUTE_X": "1"}, routing__policy="hot")
    assert len(found) == 8
    for word in ["listen.port", "listen.prot", "'probe'", "loud", "xml", "body_bytes_max", "WARMROUTE_X", "'hot'"]:
        assert any(word in problem for problem in found), word
    assert all("\n" not in problem for problem in found)


@pytest.mark.parametrize("text", ["[1, 2]", "just words", "listen: [", "a: b: c", "\x00"])
def test_a_file_that_is_no_mapping_is_a_problem(tmp_path: Path, text: str) -> None:
    """Broken YAML is told in one line, with the file's name."""
    path = yaml_file(tmp_path, text)
    (problem,) = problems(path)
    assert str(path) in problem


def test_a_file_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    """Missing, a directory, or not text."""
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\xff")
    for path in (tmp_path / "missing.yaml", tmp_path, binary):
        (problem,) = problems(path)
        assert str(path) in problem


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("listen.port", -1),
        ("listen.port", 65_536),
        ("listen.port", "http"),
        ("listen.port", 80.5),
        ("listen.port", None),
        ("listen.host", 5),
        ("listen.drain_s", -0.1),
        ("listen.metrics_on_main", "maybe"),
        ("listen.metrics_on_main", 1),
        ("upstream.connect_timeout_s", 0),
        ("upstream.connect_timeout_s", float("nan")),
        ("upstream.connect_timeout_s", float("inf")),
        ("upstream.first_byte_timeout_s", "inf"),
        ("routing.index_bytes_max", 0),
        ("routing.policy", "round-robin"),
        ("upstream.retry_ratio", -1),
        ("probe.interval_s", True),
        ("replicas", 5),
        ("replicas", "ftp://a"),
        ("replicas", "10.0.0.1"),
        ("replicas", "ftp:21:8000"),
        ("replicas", "http://a:8000/v1"),
        ("replicas", "http://a/openai/v1/"),
        ("replicas", "http://"),
        ("replicas", "http://a?b=c"),
        ("replicas", "http://a#b"),
        ("replicas", "http://a:0"),
        ("replicas", "http://a:99999"),
        ("replicas", "http://[::1"),
        ("replicas", ["http://a", "http://a/"]),
        ("api.passthrough", ["rerank"]),
        ("log.level", "trace"),
        ("log.format", ""),
    ],
)
def test_a_value_outside_its_limits_is_refused(key: str, value: object) -> None:
    """Every field has a type and limits; the problem names the field."""
    overrides: dict[str, Any] = {key.replace(".", "__"): value}
    (problem,) = problems(**overrides)
    assert key in problem


@pytest.mark.parametrize("url", ["http://10.0.0.1:8000", "https://engine", "http://[::1]:80/base/", "http://a/"])
def test_base_urls_are_taken(url: str) -> None:
    """Hosts, addresses, ports and base paths."""
    assert load(overrides={"replicas": [url]}).replicas == (url,)


@pytest.mark.parametrize("address", ["localhost:9100", "10.0.0.1:8000", "[::1]:80", "engine-0.ns.svc:8000"])
def test_an_address_with_a_port_is_read_as_http(address: str) -> None:
    """What people type first is taken, and is the same replica as its URL."""
    assert load(overrides={"replicas": [address]}).replicas == (f"http://{address}",)
    assert problems(replicas=[address, f"http://{address}/"]) == ["'replicas': a URL is duplicated"]


def test_a_url_with_v1_is_refused_with_the_right_one() -> None:
    """The base URL of a client, which ends with /v1, is none of a replica, which would be asked for `/v1/v1`."""
    (problem,) = problems(replicas="http://a:8000/v1/")
    assert problem.startswith("'replicas': 'http://a:8000/v1/' must not end with /v1")
    assert problem.endswith(": http://a:8000")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("admin.host", "listen.admin_host"),
        ("host", "listen.host"),
        ("upstream.body_bytes_max", "limits.body_bytes_max"),
        ("listne.port", "listen.port"),
        ("Routing.Policy", "routing.policy"),
        ("routing.blok", None),
        ("completely.different", None),
    ],
)
def test_a_hint_is_what_was_meant_or_none(wrong: str, right: str | None) -> None:
    """Last parts count most, and nothing is named where nothing is similar."""
    (problem,) = problems(**{wrong.replace(".", "__"): "x"})
    assert problem == f"unknown setting '{wrong}'" + (f"; the nearest is '{right}'" if right else "")


@pytest.mark.parametrize(
    ("name", "right"),
    [("ADMIN_HOST", "LISTEN_ADMIN_HOST"), ("LISTEN_PROT", "LISTEN_PORT"), ("FOO", None), ("DEBUG", None)],
)
def test_a_hint_for_a_variable_is_what_was_meant_or_none(name: str, right: str | None) -> None:
    """The prefix that all variables share makes none of them similar."""
    (problem,) = problems(env={f"WARMROUTE_{name}": "x"})
    near = f"; the nearest is 'WARMROUTE_{right}'" if right else ""
    assert problem == f"unknown environment variable 'WARMROUTE_{name}'{near}"


def test_what_pip_was_told_is_no_setting() -> None:
    """Whoever exports WARMROUTE_NATIVE to install the router can start it in the same shell."""
    assert load(env={"WARMROUTE_NATIVE": "1"}) == load()


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("listen.port", "99999", "must be an integer from 0 to 65535, not '99999'"),
        ("listen.port", None, "must be an integer from 0 to 65535, not an empty value"),
        ("limits.body_bytes_max", 0, "must be an integer of at least 1, not 0"),
        ("listen.drain_s", "-1", "must be a number from 0 to 1000000, not '-1'"),
        ("probe.timeout_s", "soon", "must be a number above 0, at most 1000000, not 'soon'"),
        ("peering.timeout_s", 5, "must be a number above 0, at most 0.5, not 5"),
        ("log.requests", "maybe", "must be true or false, not 'maybe'"),
        ("listen.host", 5, "must be a string, not 5"),
        ("replicas", 5, "must be a list of strings, not 5"),
        ("admin.token", 1234, "must be a string"),
    ],
)
def test_a_wrong_value_is_told_in_plain_words(key: str, value: object, said: str) -> None:
    """What would be taken, and what was given, without a library's names of types; a secret is not quoted."""
    assert problems(**{key.replace(".", "__"): value}) == [f"'{key}': {said}"]


def test_every_setting_has_a_key_and_the_file_can_set_it(tmp_path: Path) -> None:
    """The defaults written as a file are the defaults again; environment names are unambiguous."""
    keys = field_keys()
    assert [key for key in keys if "." not in key] == ["replicas", "allow_empty"]
    assert len({ENV_PREFIX + key.replace(".", "_").upper() for key in keys}) == len(keys)
    as_json = json.dumps(dataclasses.asdict(Settings()))  # YAML, too
    assert load(yaml_file(tmp_path, as_json)) == Settings()


def test_every_setting_is_documented() -> None:
    """Each field is followed by a docstring; units end names, and durations say seconds or bytes what they count."""
    classes = [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.ClassDef)]
    documented = 0
    for class_ in classes:
        if not class_.name.endswith("Settings"):
            continue
        for position, node in enumerate(class_.body):
            if not isinstance(node, ast.AnnAssign):
                continue
            after = class_.body[position + 1] if position + 1 < len(class_.body) else None
            name = f"{class_.name}.{ast.unparse(node.target)}"
            assert isinstance(after, ast.Expr), name
            assert isinstance(after.value, ast.Constant), name
            text = after.value.value
            assert isinstance(text, str), name
            assert text.strip().endswith("."), name
            if name.endswith("_s"):
                assert "second" in text.lower(), name
            if "bytes" in name:
                assert "ytes" in text, name
            documented += 1
    sections = [each for each in dataclasses.fields(Settings) if dataclasses.is_dataclass(each.default_factory)]
    assert documented == len(field_keys()) + len(sections)


def test_settings_cannot_be_changed() -> None:
    """Frozen all the way down: nobody's limits move under them."""
    settings = load()
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.listen.port = 5  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.replicas = ()  # type: ignore[misc]


DNS = {"discovery__source": "dns", "discovery__dns_name": "vllm.default.svc", "discovery__port": "8000"}
PODS = {"discovery__source": "kubernetes", "discovery__selector": "app=vllm"}
POOLS = {"discovery__source": "kubernetes", "discovery__pools": "vllm"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"discovery__source": "kubernets"}, "the nearest is 'kubernetes'"),
        ({"discovery__scheme": "grpc"}, "must be http or https"),
        (DNS | {"discovery__dns_name": ""}, "'discovery.dns_name': is required"),
        (DNS | {"discovery__dns_name": "vllm..svc"}, "is not a name"),
        (DNS | {"discovery__dns_name": "http://vllm"}, "is not a name"),
        (DNS | {"discovery__dns_name": "a" * 64}, "is not a name"),
        (DNS | {"discovery__dns_name": "a." * 127 + "a"}, "is not a name"),
        (DNS | {"discovery__port": "http"}, "must be a number with discovery.source dns, not 'http'"),
        (DNS | {"discovery__port": ""}, "must be a number"),
        (DNS | {"discovery__port": "65536"}, "must be a port number or"),
        (DNS | {"discovery__dns_interval_s": 0}, "discovery.dns_interval_s"),
        (PODS | {"discovery__port": "Http"}, "or the name of a container port"),
        (PODS | {"discovery__port": "kv--events"}, "or the name of a container port"),
        (PODS | {"discovery__port": "a-name-too-long1"}, "or the name of a container port"),
        (PODS | {"discovery__namespaces": "default,Prod"}, "'Prod' is not a valid namespace name"),
        (PODS | {"discovery__namespaces": "a,a"}, "a namespace is duplicated"),
        (PODS | {"discovery__kubeconfig": "/nowhere/config"}, "/nowhere/config: No such file"),
        ({"discovery__models": "m,m"}, "'m' is duplicated"),
        ({"discovery__models": ["m", " "]}, "is not a valid model name"),
        ({"discovery__models": [str(n) for n in range(257)]}, "257 names are given, at most 256"),
        ({"discovery__pools": "vllm"}, "needs discovery.source kubernetes, not 'static'"),
        (POOLS | {"discovery__pools": "Vllm"}, "'Vllm' must be the name of an InferencePool or namespace/name"),
        (POOLS | {"discovery__pools": "/vllm"}, "'/vllm' must be the name"),
        (POOLS | {"discovery__pools": "vllm,vllm"}, "a pool is duplicated"),
        (POOLS | {"discovery__pools": ",".join(f"p{n}" for n in range(65))}, "65 pools are given"),
        (POOLS | {"discovery__selector": "app=vllm"}, "conflicts with discovery.pools"),
        (POOLS | {"discovery__port": "8000"}, "conflicts with discovery.pools"),
        (POOLS | {"discovery__namespaces": "a,b"}, "must have at most one namespace"),
    ],
)
def test_a_discovery_that_makes_no_sense_is_refused(given: dict[str, Any], said: str) -> None:
    """Every mistake that can be seen without asking anybody is told before anything runs, and says which setting."""
    found = problems(**given)
    assert any(said in problem and problem.startswith("'discovery.") for problem in found), found
    assert len(found) == (2 if given.get("discovery__port") == "65536" else 1)


@pytest.mark.parametrize(
    "given",
    [
        DNS,
        DNS | {"discovery__dns_name": "_http._tcp.vllm.default.svc.cluster.local."},
        DNS | {"discovery__dns_name": "localhost", "discovery__port": 8000},
        PODS,
        PODS | {"discovery__port": "http-api", "discovery__namespaces": "a,b-2", "discovery__scheme": "https"},
        POOLS | {"discovery__pools": "vllm,team-b/llama.v3", "discovery__namespaces": "a"},
    ],
)
def test_a_discovery_that_makes_sense_is_taken(given: dict[str, Any]) -> None:
    """Ports are names or numbers, which YAML reads as numbers."""
    settings = load(overrides={key.replace("__", "."): value for key, value in given.items()})
    assert settings.discovery.port == str(given.get("discovery__port", ""))


@pytest.mark.parametrize("places", [None, ["/nowhere/kubernetes"]])
def test_kubernetes_needs_its_extra(places: list[str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the official client, or with one that has no asyncio side yet, the problem says what to install; any
    other source needs neither."""
    client = importlib.machinery.ModuleSpec("kubernetes", None, is_package=True)
    client.submodule_search_locations = places
    monkeypatch.setattr("importlib.util.find_spec", lambda _: client if places else None)
    (problem,) = problems(**PODS)
    assert "pip install '.[kubernetes]'" in problem
    load(overrides={key.replace("__", "."): value for key, value in DNS.items()})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"normalize_tools": ["sort_tool"]}, "unknown repair 'sort_tool'; the nearest is 'sort_tools'"),
        ({"normalize_tools": "sort_tools,canonical"}, "unknown repair 'canonical'; the nearest is 'canonical_tools'"),
        ({"history_policy": "on"}, "'on' must be one of off, warn, reject"),
        ({"history_policy": "warn", "enabled": False}, "needs 'insights.enabled'"),
        ({"step_header": "x step"}, "is not a valid header name"),
    ],
)
def test_an_observatory_that_makes_no_sense_is_refused(given: dict[str, Any], said: str) -> None:
    """Each mistake by its setting, with the nearest right name where it is one of a few."""
    (problem,) = problems(**{f"insights__{name}": value for name, value in given.items()})
    assert problem.startswith("'insights.")
    assert said in problem


@pytest.mark.parametrize("said", ["off", "'off'", "no", "warn", "reject"])
def test_history_may_be_off_in_yaml(tmp_path: Path, said: str) -> None:
    """YAML reads `off` as false; it is `off` all the same."""
    found = load(yaml_file(tmp_path, f"insights: {{history_policy: {said}}}")).insights.history_policy
    assert found == {"'off'": "off", "no": "off"}.get(said, said)


def test_a_key_that_holds_to_history_needs_the_observatory(tmp_path: Path) -> None:
    """History is known by it alone; repairs need nothing."""
    held, mended = Keyring(tmp_path, a={"history_policy": "warn"}), {"insights__enabled": False}
    (problem,) = problems(auth__keys_file=str(held.file), **mended)
    assert "history_policy needs 'insights.enabled'" in problem
    (tmp_path / "b").mkdir()
    ring = Keyring(tmp_path / "b", a={"normalize_tools": ["sort_tools"]})
    overrides = {"auth.keys_file": str(ring.file), "insights.enabled": False}
    assert load(overrides=overrides).auth.keys_file == str(ring.file)

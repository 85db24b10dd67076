"""`warmroute config`: the effective settings, with the source of each."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from router.cli.config_loader import load
from router.cli.effective_settings import render
from router.cli.main import main
from router.config.schema import SECRETS, Settings, TokenSettings, field_keys

SECRET = "s3cret" * 8


def shown(capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, str]]:
    """The output, and the source of each setting by its name (the last of one name)."""
    text = capsys.readouterr().out
    rows = (line.strip().partition(": ") for line in text.splitlines() if "  # " in line)
    return text, {name: rest.rpartition("  # ")[2] for name, _, rest in rows}


def test_each_setting_has_its_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last source that sets a value is named, all settings are there, and the output is YAML."""
    file = tmp_path / "warmroute.yaml"
    file.write_text("listen: {host: 127.0.0.2, head_timeout_s: 3, mode: edge}\nlog: {level: error}\n")
    monkeypatch.setenv("WARMROUTE_LISTEN_HEAD_TIMEOUT_S", "4")
    monkeypatch.setenv("WARMROUTE_LOG_LEVEL", "warning")
    arguments = ["--replica", "10.0.0.1:8000", "--set", "log.level=debug"]
    assert main(["config", "--config", str(file), *arguments]) == 0
    text, sources = shown(capsys)
    tree = yaml.safe_load(text)
    names = {f"{name}.{inner}" for name, section in tree.items() if isinstance(section, dict) for inner in section}
    assert names | {"replicas", "allow_empty"} == field_keys().keys()
    assert (tree["listen"]["host"], sources["head_timeout_s"], sources["mode"]) == ("127.0.0.2", "environment", "file")
    assert (tree["listen"]["head_timeout_s"], tree["log"]["level"], sources["level"]) == (4.0, "debug", "flag")
    assert (tree["replicas"], sources["replicas"]) == (["http://10.0.0.1:8000"], "flag")
    assert (sources["allow_empty"], tree["listen"]["mode"]) == ("default", "proxy")


def test_the_output_is_a_settings_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A router with this output as its settings file has the same settings."""
    given = {"replicas": ["http://a:1"], "listen.port": 0, "upstream.stream_failover_models": ["m=exact"]}
    flags = [f"--set={key}={value[0] if isinstance(value, list) else value}" for key, value in given.items()]
    assert main(["config", *flags]) == 0
    file = tmp_path / "again.yaml"
    file.write_text(shown(capsys)[0])
    assert load(file) == load(overrides=given)


@pytest.mark.promise("`warmroute config` shows no secret.", "records")
def test_secrets_are_masked(capsys: pytest.CaptureFixture[str]) -> None:
    """No value of a secret is in the output, and that one is set can be seen."""
    others = {"peering.redis_url": f"redis://:{SECRET}@127.0.0.1:1", "auth.secret": SECRET[:-1] + "x"}
    keys = [key for key in SECRETS if key != "peering.password"]
    assert main(["config", *(f"--set={key}={others.get(key, SECRET)}" for key in keys)]) == 0
    text, _ = shown(capsys)
    assert "s3cret" not in text
    assert text.count('"***"  # flag') == len(keys)


def test_users_in_urls_are_masked() -> None:
    """A URL is shown without its user and password; a name with a revision is no URL."""
    settings = Settings(replicas=("http://user:pw@a:1", "http://a/x@y"), tokens=TokenSettings(sources=("m=org/m@1",)))
    text = render(settings, {})
    assert '["http://***@a:1","http://a/x@y"]' in text
    assert '["m=org/m@1"]' in text


def test_an_invalid_configuration_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each problem is one line on standard error, those of files included; the status is 2 and nothing is printed."""
    missing = tmp_path / "missing.yaml"
    assert main(["config", "--set", "listen.prot=1", f"--set=auth.keys_file={missing}"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "unknown setting 'listen.prot'; the nearest is 'listen.port'" in err
    assert f"'auth.keys_file': {missing}: No such file" in err

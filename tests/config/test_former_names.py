"""Former names of settings: each source reads them, and one line lists them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from router.cli.config_loader import load
from router.cli.main import main
from router.config.api_keys import entry_of, make_key
from router.config.former_settings import FormerNames
from router.config.schema import Settings, SettingsError, field_keys
from router.former_names import KEY_FIELDS, SETTING_VALUES, SETTINGS, UNTIL

URL = "redis://127.0.0.1:6379"


def variable(key: str) -> str:
    """The environment variable of a setting."""
    return "WARMROUTE_" + key.replace(".", "_").upper()


def yaml_file(folder: Path, tree: dict[str, Any]) -> Path:
    """A settings file."""
    file = folder / "warmroute.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return file


def keys_file(folder: Path, **fields: Any) -> Path:
    """A keys file with one entry, which has these fields too."""
    entry = yaml.safe_load(entry_of(make_key(), "acme"))[0] | fields
    file = folder / "keys.yaml"
    file.write_text(yaml.safe_dump([entry]), encoding="utf-8")
    return file


def problems(**sources: Any) -> list[str]:
    """The problems of settings from these sources."""
    with pytest.raises(SettingsError) as caught:
        load(**sources)
    return caught.value.problems


def test_former_names_are_of_settings_and_unambiguous() -> None:
    """Each stands for a current setting, is none itself, and has an environment variable of its own."""
    keys = field_keys()
    assert {*SETTINGS.values()} <= {*keys}
    assert not {*SETTINGS} & {*keys}
    assert len({*SETTINGS.values()}) == len(SETTINGS)
    variables = [variable(key) for key in (*keys, *SETTINGS)]
    assert len({*variables}) == len(variables)
    assert not {key.partition(".")[0] for key in SETTINGS} & {key for key in keys if "." not in key}


def _default(key: str) -> Any:
    section, _, name = key.partition(".")
    value = getattr(getattr(Settings(), section), name)
    return [*value] if isinstance(value, tuple) else value


def test_a_file_may_have_every_former_name(tmp_path: Path) -> None:
    """Sections and dotted keys, with all defaults, which are the settings again."""
    tree: dict[str, Any] = {}
    for former, key in SETTINGS.items():
        section, _, name = former.partition(".")
        tree.setdefault(section, {})[name] = _default(key)
    used = FormerNames()
    assert load(yaml_file(tmp_path, tree), former=used) == Settings()
    assert used.names == SETTINGS
    dotted = {former: _default(key) for former, key in SETTINGS.items()}
    assert load(yaml_file(tmp_path, dotted), former=used) == Settings()
    assert used.names == SETTINGS


def test_the_environment_may_have_former_names() -> None:
    """The warning has the names of variables."""
    used = FormerNames()
    found = load(env={"WARMROUTE_SHARED_URL": URL, "WARMROUTE_LIMITS_BODIES_WAIT_S": "4"}, former=used)
    assert (found.peering.redis_url, found.limits.body_budget_timeout_s) == (URL, 4.0)
    assert used.names["WARMROUTE_SHARED_URL"] == "WARMROUTE_PEERING_REDIS_URL"


def test_set_may_have_former_names() -> None:
    """As `--set` on the command line."""
    used = FormerNames()
    assert load(overrides={"upstream.hand_over_s": "7"}, former=used).upstream.drain_migrate_after_s == 7.0
    assert used.names == {"upstream.hand_over_s": "upstream.drain_migrate_after_s"}


def test_former_values_are_read() -> None:
    """Under the former name of their setting and under the current one."""
    for former, mode in SETTING_VALUES["listen.mode"].items():
        if mode == "extproc":
            pytest.importorskip("grpc")
        for key in ("listen.face", "listen.mode"):
            used = FormerNames()
            assert load(overrides={key: former}, former=used).listen.mode == mode
            assert used.names[f"listen.mode: {former}"] == f"listen.mode: {mode}"
    assert load(overrides={"listen.face": "proxy"}).listen.mode == "proxy"


def test_a_later_source_wins_under_either_name(tmp_path: Path) -> None:
    """A former name in one source and the current one in another is no contradiction."""
    file = yaml_file(tmp_path, {"peering": {"redis_url": URL, "fleet": "a"}, "state": {"every_s": 5}})
    env = {"WARMROUTE_SHARED_NAME": "b", "WARMROUTE_SNAPSHOT_INTERVAL_S": "6"}
    found = load(file, env, {"shared.routers_assumed": 3})
    assert (found.peering.fleet, found.peering.expected_routers, found.snapshot.interval_s) == ("b", 3, 6.0)


def test_both_names_in_one_source_are_a_problem(tmp_path: Path) -> None:
    """One line, which has both."""
    tree = {"shared": {"name": "a"}, "peering": {"fleet": "b"}}
    env = {"WARMROUTE_STATE_EVERY_S": "1", "WARMROUTE_SNAPSHOT_INTERVAL_S": "1"}
    overrides = {"split.linger_s": 1, "disagg.prefill_grace_s": 1}
    found = problems(file=yaml_file(tmp_path, tree), env=env, overrides=overrides)
    pairs = [("shared.name", "peering.fleet"), (*env,), ("split.linger_s", "disagg.prefill_grace_s")]
    assert found == [f"'{old}' is the former name of '{new}', which is given too: remove '{old}'" for old, new in pairs]


def test_a_former_name_twice_is_a_problem(tmp_path: Path) -> None:
    """By its section and dotted."""
    found = problems(file=yaml_file(tmp_path, {"shared": {"name": "a"}, "shared.name": "b"}))
    assert found == ["'shared.name' is duplicated"]


def test_suggestions_have_current_names_only(tmp_path: Path) -> None:
    """For unknown keys, variables and flags that resemble former names."""
    found = problems(
        file=yaml_file(tmp_path, {"shared": {"routers_assume": 1}, "observatory": {"repair": []}}),
        env={"WARMROUTE_PULLS_STALL": "1"},
        overrides={"limits.reading_bytes": 1},
    )
    assert len(found) == 4
    assert not [name for name in SETTINGS if f"'{name}'" in "".join(found)]
    assert "WARMROUTE_PULLS_STALL_S" not in "".join(found)


def test_a_keys_file_may_have_former_fields(tmp_path: Path) -> None:
    """With the same effect, and in the same warning."""
    values = {"append_only": "warn", "continue_streams": "exact", "repairs": ["sort_tools"]}
    used = FormerNames()
    load(overrides={"auth.keys_file": str(keys_file(tmp_path, **values))}, former=used)
    assert used.names == {f"auth.keys_file: {former}": field for former, field in KEY_FIELDS.items()}
    file = keys_file(tmp_path, append_only="warn", history_policy="warn")
    (problem,) = problems(overrides={"auth.keys_file": str(file)})
    assert "'append_only' is the former name of 'history_policy', which is given too" in problem


def test_each_former_name_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """One line at the start, and one after a reload with another name."""

    def lines() -> list[list[str]]:
        found = [record.fields["settings"] for record in caplog.records if record.event == "config_former_names"]  # type: ignore[attr-defined]
        caplog.clear()
        return found

    used = FormerNames()
    with caplog.at_level(logging.WARNING):
        load(overrides={"shared.name": "a", "state.every_s": 5}, former=used)
        assert lines() == []
        used.log()
        assert f"until version {UNTIL}" in used.describe()
        assert lines() == [["shared.name -> peering.fleet", "state.every_s -> snapshot.interval_s"]]
        load(overrides={"shared.name": "a"}, former=used)
        assert lines() == []
        load(overrides={"shared.name": "a", "split.linger_s": 1}, former=used)
        assert lines() == [["split.linger_s -> disagg.prefill_grace_s"]]
        problems(overrides={"shared.name": "a/b", "state.bytes_max": 1})
        load(overrides={"peering.fleet": "a"}, former=used)
        assert (lines(), used.describe()) == ([], "")


def test_check_config_lists_former_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on standard error; the status is 0."""
    file = yaml_file(tmp_path, {"shared": {"name": "a"}, "listen": {"face": "edge"}})
    assert main(["check-config", str(file)]) == 0
    out = capsys.readouterr()
    assert out.out == f"{file}: valid\n"
    (line,) = out.err.splitlines()
    assert (
        f"read until version {UNTIL}: 'listen.face' is now 'listen.mode', 'shared.name' is now 'peering.fleet'" in line
    )
    assert main(["check-config", str(yaml_file(tmp_path, {"peering": {"fleet": "a"}}))]) == 0
    assert capsys.readouterr().err == ""


def test_both_flags_of_the_mode_are_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    """`--face` is the former name of `--mode`, and help and suggestions leave it out."""
    assert main(["serve", "--mode", "proxy", "--face", "edge"]) == 2
    assert "'listen.face' is the former name of 'listen.mode'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", "--fac", "edge", "--facet"])
    assert "'--face'" not in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert "--face" not in capsys.readouterr().out

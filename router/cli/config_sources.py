"""Settings in the file and in the environment, by dotted key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from router.config.files import NotYaml, read_at_most, yaml_of
from router.config.former_settings import rename_keys
from router.config.suggestions import nearest, quote_value, removed, unknown_setting
from router.former_names import REMOVED, SETTINGS

FILE_BYTES_MAX = 2 << 20  # bytes of a settings file; one with 1,024 replicas has about 40 KiB
UNKNOWN_MAX = 20  # unknown names that are listed one by one, each with the nearest valid one, which takes about 40 ms
ENV_PREFIX = "WARMROUTE_"
# for pip (deploy/backend.py); a user may export it there and start the router in the same environment
ENV_OF_BUILD = "WARMROUTE_NATIVE"


def read_file(file: Path, problems: list[str]) -> dict[Any, Any]:
    """Return the tree of a settings file; {} after adding its problems."""
    try:
        data = read_at_most(file, FILE_BYTES_MAX)
        if len(data) > FILE_BYTES_MAX:
            problems.append(f"{file}: has more than {FILE_BYTES_MAX >> 20} MiB")
            return {}
        tree = yaml_of(data.decode())
    except OSError as error:
        problems.append(f"{file}: {error.strerror or error}")
        return {}
    except (NotYaml, UnicodeDecodeError) as error:
        problems.append(f"{file}: not YAML: {error}")
        return {}
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        problems.append(f"{file}: the top level must be a mapping of settings")
        return {}
    return tree


def flatten(tree: dict[Any, Any], keys: Mapping[str, Any], problems: list[str], used: dict[str, str]) -> dict[str, Any]:
    """Return a file's tree as dotted keys. Unknown keys become problems. `used` gets the former names of keys."""
    sections = {key.split(".")[0] for key in keys if "." in key}
    mappings = sections | {key.split(".")[0] for key in SETTINGS}
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if name not in mappings:
            found = {str(name): value}
        elif isinstance(value, dict):
            found = {f"{name}.{inner}": v for inner, v in value.items()}
        else:
            found = {}
            if value is not None:
                problems.append(f"'{name}' must be a mapping, not {quote_value(value)}")
        # `auth.keys_file: x` beside `auth: {keys_file: y}` sets one setting twice with two keys of the YAML.
        problems += [f"'{key}' is duplicated" for key in found if key in flat and (key in keys or key in SETTINGS)]
        flat |= found
    flat = rename_keys(flat, SETTINGS, problems, used)
    unknown = sorted(flat.keys() - keys.keys())
    for key in unknown[:UNKNOWN_MAX]:
        problems.append(unknown_setting(key, [*keys, *sections]))
    if len(unknown) > UNKNOWN_MAX:
        problems.append(f"and {len(unknown) - UNKNOWN_MAX:,} more unknown settings")
    return {key: value for key, value in flat.items() if key in keys}


def from_env(
    env: Mapping[str, str], keys: Mapping[str, Any], problems: list[str], used: dict[str, str]
) -> dict[str, Any]:
    """Return the settings in the environment. Unknown variables become problems. `used` gets the former names of
    variables."""
    names = {_variable(key): key for key in keys}
    former = {_variable(key): _variable(name) for key, name in SETTINGS.items()}
    gone = {_variable(key): key for key in REMOVED}
    env = rename_keys(env, former, problems, used)
    unknown = [
        name
        for name in sorted(env.keys() - names.keys())
        if name.startswith(ENV_PREFIX) and name != ENV_OF_BUILD and not _SERVICE_LINK.fullmatch(name)
    ]
    for name in unknown[:UNKNOWN_MAX]:
        hint = f": {removed(gone[name])}" if name in gone else nearest(name, names, prefix=ENV_PREFIX)
        problems.append(f"unknown environment variable '{name}'{hint}")
    if len(unknown) > UNKNOWN_MAX:
        problems.append(f"and {len(unknown) - UNKNOWN_MAX:,} more unknown environment variables")
    return {names[name]: value for name, value in env.items() if name in names}


def _variable(key: str) -> str:
    """Return the environment variable of a dotted key."""
    return ENV_PREFIX + key.replace(".", "_").upper()


# Kubernetes gives every pod variables for every Service of its namespace (service links). Those of a Service named
# `warmroute` are not typing errors.
_SERVICE_LINK = re.compile(ENV_PREFIX + r"(SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")

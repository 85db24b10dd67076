"""Former names of settings: they are read as the current names (router/former_names.py), and reported in one line."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from router.former_names import UNTIL

log = logging.getLogger(__name__)

IN_USE = f"former names of settings in use, read until version {UNTIL}"


class FormerNames:
    """Former names in the last valid settings of all sources. Each is logged once."""

    def __init__(self) -> None:
        self.names: Mapping[str, str] = {}  # former name -> name, both as their source has them
        self._logs = False  # False before `log`: logging may not be configured yet
        self._logged = frozenset[str]()

    def replace(self, names: Mapping[str, str]) -> None:
        """Set the names that a read of the settings has found. After the first `log`, log those that are new."""
        self.names = dict(names)
        if self._logs:
            self.log()

    def log(self) -> None:
        """Log the names that the last call did not have, in one line."""
        new = {former: name for former, name in self.names.items() if former not in self._logged}
        self._logs, self._logged = True, frozenset(self.names)
        if new:
            pairs = [f"{former} -> {name}" for former, name in new.items()]
            log.warning(IN_USE, extra={"event": "config_former_names", "fields": {"settings": pairs}})

    def describe(self) -> str:
        """Return one line with all names; "" without any."""
        pairs = ", ".join(f"'{former}' is now '{name}'" for former, name in self.names.items())
        return f"{IN_USE}: {pairs}" if pairs else ""


def rename_keys(
    given: Mapping[str, Any], names: Mapping[str, str], problems: list[str], used: dict[str, str]
) -> dict[str, Any]:
    """Return the values of one source under current names.

    `names`: former name -> name, of this kind of source. `used`: gets the former names that were given. A setting under
    both names is a problem, because only one of the two values can have an effect.
    """
    found = {key: value for key, value in given.items() if key not in names}
    for former, name in names.items():
        if former not in given:
            continue
        if name in given:
            problems.append(f"'{former}' is the former name of '{name}', which is given too: remove '{former}'")
        else:
            found[name] = given[former]
            used[former] = name
    return found


def rename_value(key: str, value: Any, names: Mapping[str, str], used: dict[str, str]) -> Any:  # noqa: ANN401 - any setting
    """Return the current name of a value. `names`: former value -> value, of this key."""
    if not isinstance(value, str) or value not in names:
        return value
    used[f"{key}: {value}"] = f"{key}: {names[value]}"
    return names[value]

"""Command lines that report their errors with the usage of the command and the flag that was probably meant."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import NoReturn

from router.config.other_routers import FLAGS
from router.config.suggestions import nearest, removed
from router.former_names import REMOVED


class CommandParser(argparse.ArgumentParser):
    """Parser with commands that refuse unknown flags, each with a hint.

    argparse itself leaves that to the top-level parser, which shows its own usage and knows no flag of the command.
    """

    settings: tuple[str, ...] = ()  # dotted keys that `--set` accepts

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201 - argparse's own, with its overloads
        """Return the namespace, and always an empty list: an unknown argument ends the process with status 2."""
        if args:
            self._check_command(args[0])
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown)
        return known, unknown

    def _check_command(self, word: str) -> None:
        """Refuse an unknown word in the place of a command."""
        commands = [name for action in self._actions if action.dest == "command" for name in action.choices or ()]
        if commands and not word.startswith("-") and word not in commands:
            self.error(f"unknown command '{word}'{nearest(word, commands)}")

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        flags = [each for each in unknown if each.startswith("-") and each.strip("-")]
        if not flags:
            self.error(f"unexpected argument '{unknown[0]}'; {self.prog} --help lists the arguments")
        self.error(
            "; ".join(f"unknown flag '{flag}'{self._suggest_flag(flag)}" for flag in (f.split("=")[0] for f in flags))
        )

    def _suggest_flag(self, flag: str) -> str:
        """Return a hint: the replacement of a removed setting with this name, the counterpart of another router's flag,
        the setting that is spelled as this flag, or else the nearest flag, or else ""."""
        key = _words(flag)
        gone = [setting for setting in REMOVED if key and _words(setting)[-len(key) :] == key]
        if gone:
            return f"; {removed(gone[0])}"
        if flag in FLAGS:
            return f"; {FLAGS[flag]}"
        same = [setting for setting in self.settings if _words(setting) == key]
        if same:
            return f"; it is a setting: --set {same[0]}=VALUE"
        return nearest(flag, self._flags(), prefix="--")

    def _flags(self) -> Iterable[str]:
        """Return the flags that help lists: no former one."""
        actions = self._option_string_actions.items()
        return [flag for flag, action in actions if flag.startswith("--") and action.help != argparse.SUPPRESS]


def _words(name: str) -> list[str]:
    return [word for word in name.lower().replace("-", "_").replace(".", "_").split("_") if word]

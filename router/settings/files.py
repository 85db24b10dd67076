"""Files that people name and write: paths that may begin with ~, and YAML."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any


class NotYaml(ValueError):
    """A text is no YAML, for the reason in the message; `line` counts from 1, and is 0 where it is not known."""

    def __init__(self, why: str, line: int) -> None:
        super().__init__(why)
        self.line = line


def expanded(file: str | Path) -> Path:
    """The path with a leading ~ or ~user expanded. Raises OSError where there is no such user."""
    try:
        return Path(file).expanduser()
    except RuntimeError as error:
        raise OSError(errno.ENOENT, "has no home directory for its ~") from error


def yaml_of(text: str | bytes) -> Any:  # noqa: ANN401 - whatever the text says
    """The value that a text of YAML says. Raises NotYaml."""
    import yaml  # takes 10 ms, and many routers are told all by flags and the environment

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, if libyaml is installed
    try:
        return yaml.load(text, loader)  # noqa: S506 - a safe loader
    # PyYAML raises YAMLError for what it knows to be wrong; for a value that is not what its tag says, such as
    # `!!timestamp x`, AttributeError, KeyError, IndexError and others; RecursionError for deep nesting.
    except Exception as error:
        mark = getattr(error, "problem_mark", None)
        known = isinstance(error, yaml.YAMLError | UnicodeError)
        why = " ".join(str(error).split()) if known else "a value is not what it is marked as, or nests too deep"
        raise NotYaml(why, mark.line + 1 if mark is not None else 0) from error

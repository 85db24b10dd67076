"""Files that people name and write: paths that may begin with ~, pipes without a writer, and YAML."""

from __future__ import annotations

import errno
import os
import select
import time
from functools import cache
from pathlib import Path
from typing import Any

SETTLE_S = 0.3  # a file that was changed less long ago may be in the middle of being written
SETTLE_LOOKS_MAX = 20  # checks of a file that keeps changing, after which it is read as it is
READ_S_MAX = 2.0  # time until a file has been read to its end; one on a disk is read in milliseconds
CHUNK_BYTES = 1 << 20


class NotYaml(ValueError):
    """Raised if a text is no YAML, for the reason in the message. `line` counts from 1, and is 0 if unknown."""

    def __init__(self, why: str, line: int) -> None:
        super().__init__(why)
        self.line = line


def expand_path(file: str | Path) -> Path:
    """Return the path with a leading ~ or ~user expanded. Raises OSError for an unknown user."""
    try:
        return Path(file).expanduser()
    except RuntimeError as error:
        raise OSError(errno.ENOENT, "contains ~, but the user has no home directory") from error


def wait_until_settled(file: str | Path) -> None:
    """Return when the file has not changed for SETTLE_S, and at the latest after SETTLE_LOOKS_MAX checks. Blocks the
    thread, so do not call it on the event loop."""
    for _ in range(SETTLE_LOOKS_MAX):
        try:
            changed_s = expand_path(file).stat().st_mtime
        except OSError:  # between the two steps of a replacement, or gone: reading it raises the error
            changed_s = time.time()
        # A time in the future is another machine's clock. With abs the wait is bounded by the number of checks.
        if abs(time.time() - changed_s) >= SETTLE_S:
            return
        time.sleep(SETTLE_S)


def read_at_most(file: str | Path, bytes_max: int) -> bytes:
    """Return the first bytes of a file, at most `bytes_max` + 1. Without a time limit, a pipe without a writer, or one
    that is never closed, would block its reader for ever. Blocks the thread. Raises OSError, and TimeoutError after
    READ_S_MAX."""
    end_s = time.monotonic() + READ_S_MAX
    # Only a pipe waits for another process to open it; O_NONBLOCK changes nothing for a file on a disk.
    number = os.open(expand_path(file), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        read, waiting = bytearray(), select.poll()
        waiting.register(number, select.POLLIN)
        while (left := bytes_max + 1 - len(read)) > 0:
            if not waiting.poll(max(end_s - time.monotonic(), 0) * 1e3):
                why = f"is a pipe that was not closed within {READ_S_MAX:g} s"
                raise TimeoutError(errno.ETIMEDOUT, why, str(file))
            try:
                chunk = os.read(number, min(left, CHUNK_BYTES))
            except BlockingIOError:  # another reader of the pipe was faster
                continue
            if not chunk:
                break
            read += chunk
        return bytes(read)
    finally:
        os.close(number)


def yaml_of(text: str | bytes) -> Any:  # noqa: ANN401 - any value
    """Return the value of a YAML text. Raises NotYaml, also for a key that is given twice in one mapping. PyYAML itself
    takes the last one, so that the first, such as `auth.keys_file`, would be lost without a message."""
    import yaml  # takes 10 ms, and many routers have all settings from flags and the environment

    try:
        return yaml.load(text, _loader())  # noqa: S506 - derived from a safe loader
    # PyYAML raises YAMLError for errors that it detects. A value that does not match its tag, such as `!!timestamp x`,
    # raises AttributeError, KeyError, IndexError and others. Deep nesting raises RecursionError.
    except Exception as error:
        mark = getattr(error, "problem_mark", None)
        known = isinstance(error, yaml.YAMLError | UnicodeError)
        why = " ".join(str(error).split()) if known else "a value does not match its tag, or is nested too deeply"
        raise NotYaml(why, mark.line + 1 if mark is not None else 0) from error


@cache
def _loader() -> Any:  # noqa: ANN401 - a class of PyYAML's, which has no types of its own here
    """Return a safe loader that refuses duplicate keys at every level."""
    import yaml

    safe = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, if libyaml is installed

    class StrictLoader(safe):  # type: ignore[misc, valid-type]
        """Loader that refuses duplicate keys. Keys that a merge (`<<`) brings may be overridden, because this is its
        purpose."""

        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            first = dict[tuple[str, str], yaml.Mark]()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    continue
                same = (key.tag, key.value)
                if same in first:
                    what = f"'{key.value[:80]}' is duplicated, first in line {first[same].line + 1}"
                    raise yaml.constructor.ConstructorError(None, None, what, key.start_mark)
                first[same] = key.start_mark
            super().flatten_mapping(node)

    return StrictLoader

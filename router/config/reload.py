"""Reading the settings again while the router runs (SIGHUP), from the same file, environment and flags.

Files that settings name (certificates, keys, tokens) are checked every `listen.file_watch_interval_s`, and a change has
the same effect as SIGHUP. A mounted Secret can thus be replaced without a signal to the router. The settings file
itself is not checked, because its author wants to check it first.

Settings with a problem change nothing. Otherwise those that are marked as reloadable (schema.Reload) are applied at
once, and files that settings name are read again even if no setting changed. Current requests are not affected. All
other settings stay as they were, and a warning names those that changed; a restart as a lame duck costs no request.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from router.config.file_contents import recording
from router.config.files import wait_until_settled
from router.config.runtime import RuntimeConfig, resolve
from router.config.schema import Settings, SettingsError, field_keys, get_setting, reloadable_keys

log = logging.getLogger(__name__)

OFF_S = 10.0  # interval of checks for a change of `listen.file_watch_interval_s`, while it is 0

REFUSED = "new configuration is invalid: the old one remains active"


@dataclasses.dataclass(frozen=True, slots=True)
class SettingsChange:
    """Result of reading the settings again."""

    settings: Settings  # the settings now in force
    applied: tuple[str, ...]  # keys of settings that changed and were applied
    kept: tuple[str, ...]  # keys of settings that changed and need a restart


def change(old: Settings, new: Settings) -> SettingsChange:
    """Return the old settings, with those that are reloadable taken from the new ones."""
    settings, applied, kept = old, list[str](), list[str]()
    marks = reloadable_keys()
    for key in field_keys():
        before, after = get_setting(old, key), get_setting(new, key)
        if before == after:
            continue
        mark = marks.get(key)
        if mark is not None and not (mark.is_on_off and bool(before) != bool(after)):
            applied.append(key)
            settings = _replace_setting(settings, key, after)
        else:
            kept.append(key)
    return SettingsChange(settings, tuple(applied), tuple(kept))


def refuse_empty(old: Settings, new: Settings) -> None:
    """Raise SettingsError if the new settings would remove all replicas or all keys, for example because their file is
    empty or truncated."""
    if new.allow_empty:
        return
    problems = []
    hint = "to confirm, set 'allow_empty: true'"
    if old.replicas and not new.replicas:
        problems.append(f"'replicas': the new settings have no replicas, the old ones have {len(old.replicas)}; {hint}")
    if old.auth.keys_file and not new.auth.keys_file:
        problems.append(f"'auth.keys_file': missing in the new settings, so requests would need no key; {hint}")
    if problems:
        raise SettingsError(problems)


def _replace_setting(settings: Settings, key: str, value: Any) -> Settings:  # noqa: ANN401 - any setting
    section, dot, name = key.partition(".")
    inner = dataclasses.replace(getattr(settings, section), **{name: value}) if dot else value
    return dataclasses.replace(settings, **{section: inner})


FileStat = tuple[str, int, int, int]


def files_of(settings: Settings) -> tuple[str, ...]:
    """Return the paths of the files that these settings name and that may change while the router runs."""
    named = [key for key, mark in reloadable_keys().items() if mark.is_file]
    return tuple(filter(None, (str(get_setting(settings, key)) for key in named)))


def _looks_of(files: tuple[str, ...]) -> tuple[FileStat, ...]:
    """Return for each file its path, inode, time of change in ns and size in bytes; zeros for a missing file."""
    looks = list[FileStat]()
    for path in files:
        try:
            found = Path(path).stat()  # follows links: Kubernetes replaces the link to a folder of mounted files
            looks.append((path, found.st_ino, found.st_mtime_ns, found.st_size))
        except OSError:
            looks.append((path, 0, 0, 0))
    return tuple(looks)


class FileDebouncer:
    """Reports a change of files once, when two checks in a row have found the same state. A file that is half written,
    or a certificate with a key that is about to follow, is left until it is complete."""

    def __init__(self, looks: tuple[FileStat, ...]) -> None:
        """`looks` are those of the files that are in force."""
        self._last = self._known = looks

    def has_settled(self, looks: tuple[FileStat, ...]) -> bool:
        """True if these looks, the newest, are of files that have changed and stay so."""
        still, self._last = looks == self._last, looks
        if not still or looks == self._known:
            return False
        self._known = looks
        return True


class Reloader:
    """Reads the settings again on request, one reload at a time."""

    def __init__(
        self,
        settings: Settings,
        read: Callable[[], RuntimeConfig],
        apply: Callable[[RuntimeConfig], None],
        count: Callable[[str], None],
        *,
        file: Path | None = None,
    ) -> None:
        """`settings`: the settings in force. `read`: raises SettingsError. `apply`: may raise it too, before it has
        changed anything. `count`: called with the result, `ok` or `refused`. `file`: the settings file, if there is
        one; it is read when no process writes to it."""
        self.settings = settings
        self._file = file
        self._read = read
        self._apply = apply
        self._count = count
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Request a reload soon; several requests until then count as one."""
        self._asked.set()

    async def watch(self) -> None:
        """Serve such requests, and changes of files, until cancelled."""
        looking = asyncio.create_task(self._look_at_files())
        try:
            while True:
                await self._asked.wait()
                self._asked.clear()
                await self.reload()
        finally:
            looking.cancel()

    async def _look_at_files(self) -> None:
        """Request a reload when files have changed. Threads check them, because a file's volume may hang."""
        loop = asyncio.get_running_loop()
        changes = FileDebouncer(await loop.run_in_executor(None, _looks_of, files_of(self.settings)))
        while True:
            interval_s = self.settings.listen.file_watch_interval_s
            await asyncio.sleep(interval_s or OFF_S)
            if not interval_s:
                continue
            now = await loop.run_in_executor(None, _looks_of, files_of(self.settings))
            if changes.has_settled(now):
                log.info(
                    "files of the settings have changed",
                    extra={"event": "config_files_changed", "fields": {"files": len(now)}},
                )
                self.ask()

    def _read_change(self) -> tuple[SettingsChange, RuntimeConfig]:
        """Read the settings and each of their files once. Returns the change, and the configuration to apply. Raises
        SettingsError."""
        if self._file is not None:
            wait_until_settled(self._file)
        with recording():
            new = self._read()
            refuse_empty(self.settings, new.settings)
            found = change(self.settings, new.settings)
            return found, new if found.settings == new.settings else resolve(found.settings)

    async def reload(self) -> None:
        """Read and apply once. A thread reads and checks the settings and their files; applying takes one turn of the
        event loop."""
        try:
            found, config = await asyncio.get_running_loop().run_in_executor(None, self._read_change)
            self._apply(config)
        except SettingsError as error:
            for problem in error.problems:
                log.error(REFUSED, extra={"event": "config_rejected", "fields": {"problem": problem}})  # noqa: TRY400 - no trace
            self._count("refused")
            return
        except Exception:  # a bug, which must not stop the router
            log.exception("bug: reload of the settings failed", extra={"event": "bug"})
            self._count("refused")
            return
        self.settings = found.settings
        if found.kept:
            log.warning(
                "changed settings need a restart",
                extra={"event": "config_needs_restart", "fields": {"settings": list(found.kept)}},
            )
        log.info(
            "configuration reloaded",
            extra={"event": "config_reloaded", "fields": {"changed": list(found.applied)}},
        )
        self._count("ok")

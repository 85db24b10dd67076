"""The command `warmroute config`: the effective settings as YAML, each with its source as a comment.

    listen:
      port: 9000  # environment

The sources are `default`, `file`, `environment` and `flag`. Secrets, and user names in URLs, are masked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from router.config.schema import SECRETS, Settings, field_keys, get_setting

MASK = "***"


def render(settings: Settings, sources: Mapping[str, str]) -> str:
    """Return all settings. `sources`: the source of each setting that is not a default, by dotted key."""
    return "".join(f"{line}\n" for line in _lines(settings, sources))


def _lines(settings: Settings, sources: Mapping[str, str]) -> Iterator[str]:
    last = ""
    for key in field_keys():
        section, dot, name = key.rpartition(".")
        if section != last:
            yield f"{section}:"
        last = section
        value = _mask(key, get_setting(settings, key))
        text = msgspec.json.encode(value).decode()  # any JSON is YAML
        yield f"{'  ' if dot else ''}{name}: {text}  # {sources.get(key, 'default')}"


def _mask(key: str, value: Any) -> Any:  # noqa: ANN401 - any setting
    if key in SECRETS:
        return MASK if value else value
    if isinstance(value, str):
        return _mask_user(value)
    if isinstance(value, tuple):
        return [_mask_user(each) for each in value]
    return value


def _mask_user(text: str) -> str:
    """Return a URL with its user name and password masked, and any other text as it is."""
    scheme, separator, rest = text.partition("://")
    user, at, host = rest.partition("@")
    return f"{scheme}{separator}{MASK}@{host}" if at and "/" not in user else text

"""What is said of a conversation whose history has changed: in a warning header, or in a refusal's message.

Names in a path are the client's own words, so a header has them escaped. Text is only there if excerpts are wanted,
and never another tenant's.
"""

from __future__ import annotations

from urllib.parse import quote

from router.core.facts.misses import Difference, Sighting

_PATH_CHARS_MAX = 200
_PLAIN = "[].$/:,;=@+!*()'"  # besides letters, digits and _.-~


def change_of(sighting: Sighting | None) -> Difference | None:
    """The first difference from what the conversation had said. None where nothing was changed, or nothing is known:
    a difference from other conversations of the same template is no change of history."""
    return sighting.difference if sighting is not None and not sighting.appended else None


def where(found: Difference) -> str:
    """For a header: printable ASCII, without spaces in its values."""
    path = quote(found.path[:_PATH_CHARS_MAX], safe=_PLAIN, errors="replace")
    return f"message={found.message} path={path} at_bytes={found.at_bytes} change={found.change}"


def message(found: Difference, *, own: bool) -> str:
    """For the client's eyes. What stood there is quoted only if it is their `own` for certain: tenants who share caches
    may share a session's name, or a message, and so be compared with each other."""
    place = f"message {found.message} ({found.role})" if found.message >= 0 else "what stands before its messages"
    said = f"This conversation may only be appended to, and {place} is not what it was: {found.change} at "
    said += f"{found.path[:_PATH_CHARS_MAX]}, byte {found.at_bytes}."
    if own and (found.before or found.after):
        said += f" It was {found.before!r} and is {found.after!r}."
    return said

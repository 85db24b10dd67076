"""Messages for mistakes in settings: the valid name that was probably meant, and the accepted values."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from reprlib import Repr
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from router.former_names import REMOVED, REMOVED_VALUES

SIMILAR_MIN = 0.6  # least similarity of a name that is suggested: below it a suggestion is a guess, and misleads
NAME_CHARS_MAX = 200  # characters of a name that are compared, because the time grows with their square
_WORDS = re.compile(r"[^a-z0-9]+")


def nearest(given: str, known: Iterable[str], *, prefix: str = "") -> str:
    """Return `; the nearest is 'NAME'` for the known name that was most likely meant; "" if none is similar. A `prefix`
    that all names share does not count as similarity.

    Last parts are compared first: `admin.host` is nearer to `listen.admin_host`, which ends with the same words, than
    to `admin.token`, which begins with one of them.
    """
    wanted = given[:NAME_CHARS_MAX].removeprefix(prefix).lower()
    best = max(((*_similarity(wanted, name.removeprefix(prefix).lower()), name) for name in known), default=None)
    if best is None or best[1] < SIMILAR_MIN:
        return ""
    return f"; the nearest is '{best[-1]}'"


def unknown_setting(key: str, known: Iterable[str]) -> str:
    """Describe a key that no setting has: with the replacement of a removed setting, or else the nearest known key."""
    return removed(key) or f"unknown setting '{key[:NAME_CHARS_MAX]}'{nearest(key, known)}"


def removed(key: str) -> str:
    """Describe a removed setting with its replacement; "" for any other key."""
    return f"{key} was removed: {REMOVED[key]}" if key in REMOVED else ""


def removed_value(key: str, value: object) -> str:
    """Describe a removed value of a setting with its replacement; "" for any other value."""
    replacement = REMOVED_VALUES.get(key, {}).get(value, "") if isinstance(value, str) else ""
    return f"the value '{value}' was removed: {replacement}" if replacement else ""


def _similarity(given: str, name: str) -> tuple[bool, float, float]:
    """Return the similarity of two names: True if one ends with all words of the other, then the similarity of their
    last parts, then of the whole names."""
    words, known = _WORDS.split(given), _WORDS.split(name)
    ends = known[-len(words) :] == words
    whole = SequenceMatcher(None, given, name).ratio()
    if "." not in name:  # a section, an environment variable, a flag, one of a few words
        return ends, 1.0 if ends else whole, whole
    last = SequenceMatcher(None, given.rpartition(".")[2], name.rpartition(".")[2]).ratio()
    return ends, 1.0 if ends else last, whole


def describe_type(type_: Any) -> str:  # noqa: ANN401 - the type of any setting
    """Describe the values that a type accepts, such as `an integer from 0 to 65535`."""
    limits: dict[str, float] = {}
    if get_origin(type_) is Annotated:
        type_, *notes = get_args(type_)
        limits = {
            name: value for note in notes for name in ("ge", "gt", "le") if (value := getattr(note, name)) is not None
        }
    if get_origin(type_) in (Union, UnionType):
        return describe_type(next(each for each in get_args(type_) if each is not type(None)))
    if get_origin(type_) is Literal:
        return f"one of {', '.join(get_args(type_))}"
    if type_ is bool:
        return "true or false"
    if type_ is str:
        return "a string"
    if type_ is int:
        least = limits.get("ge", limits["gt"] + 1 if "gt" in limits else None)
        return f"an integer{_range(least, limits.get('le'))}"
    if type_ is float:
        if "gt" in limits:
            return f"a number above {limits['gt']:g}" + (f", at most {_plain(limits['le'])}" if "le" in limits else "")
        return f"a number{_range(limits.get('ge'), limits.get('le'))}"
    return "a list of strings"


def _range(least: float | None, most: float | None) -> str:
    if least is None:
        return ""
    return f" of at least {_plain(least)}" if most is None else f" from {_plain(least)} to {_plain(most)}"


def _plain(limit: float) -> str:
    """Return a limit without an exponent, and without a fraction if it is whole."""
    return f"{limit:.0f}" if limit == int(limit) else f"{limit:g}"


def quote_value(value: object) -> str:
    """Return a value as a problem quotes it: all of a plain value, the beginning of a long or nested one. YAML's
    aliases can produce values that are far larger than the file they are in."""
    return _SHOWN.repr(value)


_SHOWN = Repr()
_SHOWN.maxlevel, _SHOWN.maxstring, _SHOWN.maxother = 3, 200, 200
_SHOWN.maxlist = _SHOWN.maxdict = _SHOWN.maxtuple = _SHOWN.maxset = 8


def describe_mismatch(type_: Any, value: object, *, secret: bool = False) -> str:  # noqa: ANN401 - the type of any setting
    """Describe a value of the wrong type or outside its limits, in one sentence that does not quote a secret."""
    actual = "" if secret else f", not {'an empty value' if value is None else quote_value(value)}"
    return f"must be {describe_type(type_)}{actual}"

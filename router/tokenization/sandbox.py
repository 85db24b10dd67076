"""Jinja as chat templates expect it: a sandbox, with the names of transformers (utils/chat_template_utils.py, 5.x).

A template that prints today's date uses this machine's clock and time zone. Around midnight an engine in another place
may have another date.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from types import BuiltinMethodType
from typing import Any

from router.tokenization.optional_tokenizers import library

# Attributes of a loop that templates read: properties without side effects on anything but the loop itself.
_OF_LOOPS = frozenset(
    ("depth", "depth0", "first", "index", "index0", "last", "length", "nextitem", "previtem", "revindex", "revindex0")
)


class CannotRender(Exception):
    """Raised if the template refuses or fails, as it does in the engine."""


def environment() -> Any:  # noqa: ANN401 (Jinja's)
    """Return Jinja as transformers configures it, without the names that it adds. Raises MissingExtra."""
    extensions = [_generation_tag(), library("jinja2.ext").loopcontrols]
    return _sandbox()(trim_blocks=True, lstrip_blocks=True, extensions=extensions)


def _sandbox() -> type[Any]:
    """Return the sandbox with shortcuts for nearly all look-ups: a dict's item, a string's method, a namespace's
    variable. Jinja itself looks for an attribute of a dict first, and checks each look-up anew, which takes most of the
    time of a long chat."""
    base: type[Any] = library("jinja2.sandbox").ImmutableSandboxedEnvironment
    namespace, loop = library("jinja2.utils").Namespace, library("jinja2.runtime").LoopContext
    of_dicts = frozenset(dir(dict))
    # `format` and `format_map` can reach attributes of their arguments: the sandbox has its own versions.
    of_strings = frozenset(name for name in dir(str) if not name.startswith(("_", "format")))

    class Sandbox(base):  # type: ignore[misc]  # jinja2 is imported late
        def getattr(self, obj: Any, attribute: str) -> Any:  # noqa: ANN401
            kind = type(obj)
            if kind is dict:
                if attribute not in of_dicts:
                    return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
            elif kind is str:
                if attribute in of_strings:
                    return getattr(obj, attribute)
            elif kind is loop and attribute in _OF_LOOPS:
                return getattr(obj, attribute)
            elif kind is namespace and not attribute.startswith("_"):
                try:
                    return getattr(obj, attribute)
                except AttributeError:
                    pass
            return super().getattr(obj, attribute)

        def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if type(obj) is BuiltinMethodType and type(obj.__self__) is str and obj.__name__ in of_strings:
                kwargs.pop("_loop_vars", None)  # Jinja's own argument, for functions that take a context
                kwargs.pop("_block_vars", None)
                return obj(*args, **kwargs)
            return super().call(context, obj, *args, **kwargs)

    return Sandbox


def compile_template(source: str) -> Any:  # noqa: ANN401 (Jinja's)
    """Compile a template. Raises CannotRender if it is invalid, and MissingExtra."""
    made = environment()
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raiser()
    made.globals["strftime_now"] = lambda format_: datetime.now().strftime(format_)  # noqa: DTZ005 (as the engine)
    try:
        return made.from_string(source)
    # Jinja's own errors, and those of Python's compiler for the program that Jinja generates
    except Exception as error:
        raise CannotRender(f"{type(error).__name__}: {error}") from error


_PLAIN = json.JSONEncoder(ensure_ascii=False)  # as `json.dumps` makes one for each call


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if not (ensure_ascii or sort_keys) and indent is None and separators is None:
        return _PLAIN.encode(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raiser() -> Callable[[str], None]:
    error = library("jinja2").TemplateError

    def raise_exception(message: str) -> None:
        raise error(message)

    return raise_exception


def _generation_tag() -> type[Any]:
    """Return the tag `{% generation %}`, which marks an assistant's text for training; its content is printed."""
    base: type[Any] = library("jinja2.ext").Extension

    class GenerationTag(base):  # type: ignore[misc]  # jinja2 is imported late
        tags = frozenset(("generation",))

        def parse(self, parser: Any) -> Any:  # noqa: ANN401 (Jinja's)
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return library("jinja2.nodes").Scope(body).set_lineno(line)  # variables set within the tag stay within it

    return GenerationTag

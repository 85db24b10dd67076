"""The table of settings, from the classes of `router.config.schema` and the texts under their fields."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Sequence
from itertools import pairwise

from loadtest.docgen.markdown import table
from router.config import schema as settings


def settings_table() -> str:
    """Return every setting with its default in YAML, the effect of a reload on it, and its docstring.

    Each section has a heading and a table. Each key has an anchor, which is its name.
    """
    defaults, texts = settings.Settings(), _setting_texts()
    marks = settings.reloadable_keys()
    sections: dict[str, list[tuple[str, str, str, str]]] = {}
    for key in settings.field_keys():
        section, _, name = key.rpartition(".")
        value = getattr(getattr(defaults, section) if section else defaults, name)
        anchor = f'<a id="{key}"></a>`{key}`'
        sections.setdefault(section, []).append((anchor, _default(key, value), _reload(marks.get(key)), texts[key]))
    head = ("key", "default", "reload", "meaning, and the reason for the default")
    blocks = [f"## {section or 'Top level'}\n\n{table(head, rows)}" for section, rows in sections.items()]
    return "\n\n".join(blocks)


def _reload(mark: settings.Reload | None) -> str:
    if mark is None:
        return "restart"
    return "yes; on or off: restart" if mark.is_on_off else "yes"


def _setting_texts() -> dict[str, str]:
    """Return dotted key -> the docstring under the field, which only the source has."""
    by_class: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(settings)).body:
        if isinstance(node, ast.ClassDef):
            by_class[node.name] = dict(_list_documented(node.body))
    sections = {name: hint.__name__ for name, hint in inspect.get_annotations(settings.Settings, eval_str=True).items()}
    texts = {}
    for key in settings.field_keys():
        section, _, name = key.rpartition(".")
        texts[key] = by_class[sections[section] if section else "Settings"][name]
    return texts


def _list_documented(body: Sequence[ast.stmt]) -> Iterable[tuple[str, str]]:
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            yield ast.unparse(field.target), " ".join(str(text.value.value).split())


def _default(key: str, value: object) -> str:
    if isinstance(value, tuple):
        return f"`[{', '.join(value)}]`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int) and "bytes" in key and value >= 1 << 10:
        size, unit = (value >> 20, "MiB") if value >= 1 << 20 else (value >> 10, "KiB")
        return f"`{value}` ({size} {unit})"
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{value}`" if value != "" else '`""`'

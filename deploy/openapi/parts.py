"""What schemas and answers of the document are made of: JSON Schema (2020-12) in few words."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

Part = dict[str, Any]

JSON = "application/json"
TEXT: Part = {"text/plain": {"schema": {"type": "string"}}}


def _typed(kind: str, description: str, more: Mapping[str, Any]) -> Part:
    return {"type": kind, **({"description": description} if description else {}), **more}


def text(description: str = "", **more: Any) -> Part:  # noqa: ANN401 - keywords of JSON Schema
    """A string."""
    return _typed("string", description, more)


def whole(description: str = "", **more: Any) -> Part:  # noqa: ANN401 - likewise
    """A whole number."""
    return _typed("integer", description, more)


def number(description: str = "", **more: Any) -> Part:  # noqa: ANN401 - likewise
    """A number."""
    return _typed("number", description, more)


def flag(description: str = "") -> Part:
    """True or false."""
    return _typed("boolean", description, {})


def one_of(*values: str) -> Part:
    """One of these strings."""
    return {"type": "string", "enum": list(values)}


def ref(name: str) -> Part:
    """The schema of this name."""
    return {"$ref": f"#/components/schemas/{name}"}


def maybe(schema: Part) -> Part:
    """The same, or null."""
    if "$ref" in schema:
        return {"anyOf": [schema, {"type": "null"}]}
    nullable = {**schema, "type": [schema["type"], "null"]}
    return nullable | ({"enum": [*schema["enum"], None]} if "enum" in schema else {})


def rows(of: Part, description: str = "") -> Part:
    """A list."""
    return _typed("array", description, {"items": of})


def by_name(of: Part, description: str = "") -> Part:
    """An object whose names are data."""
    return _typed("object", description, {"additionalProperties": of})


def record(description: str, fields: Mapping[str, Part], *, optional: Collection[str] = ()) -> Part:
    """An object with these fields, all of which are there but for the optional ones."""
    required = [name for name in fields if name not in optional]
    made = _typed("object", description, {"properties": dict(fields)})
    return {**made, "required": required} if required else made


def each(kind: Part, names: str) -> Part:
    """Fields of one kind, their names separated by spaces."""
    return dict.fromkeys(names.split(), kind)


def in_json(name: str) -> Part:
    """A body that is the schema of this name, as JSON."""
    return {JSON: {"schema": ref(name)}}


def answer(description: str, content: Part | None = None, headers: Part | None = None) -> Part:
    """An answer."""
    return {
        "description": description,
        **({"headers": headers} if headers else {}),
        **({"content": content} if content else {}),
    }


def asked(name: str, description: str, schema: Part, *, within: str = "query") -> Part:
    """A parameter, `within` the query, a header or the path."""
    return {
        "name": name,
        "in": within,
        "description": description,
        "schema": schema,
        **({"required": True} if within == "path" else {}),
    }

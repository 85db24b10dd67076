"""Building blocks of the document's schemas and answers: JSON Schema (2020-12) in short form."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

Part = dict[str, Any]

JSON = "application/json"
TEXT: Part = {"text/plain": {"schema": {"type": "string"}}}


def _typed(kind: str, description: str, more: Mapping[str, Any]) -> Part:
    return {"type": kind, **({"description": description} if description else {}), **more}


def text(description: str = "", **more: Any) -> Part:  # noqa: ANN401 - keywords of JSON Schema
    """Return the schema of a string."""
    return _typed("string", description, more)


def whole(description: str = "", **more: Any) -> Part:  # noqa: ANN401 - likewise
    """Return the schema of a whole number."""
    return _typed("integer", description, more)


def number(description: str = "", **more: Any) -> Part:  # noqa: ANN401 - likewise
    """Return the schema of a number."""
    return _typed("number", description, more)


def flag(description: str = "") -> Part:
    """Return the schema of a boolean."""
    return _typed("boolean", description, {})


def one_of(*values: str) -> Part:
    """Return the schema of one of these strings."""
    return {"type": "string", "enum": list(values)}


def ref(name: str) -> Part:
    """Return a reference to the schema of this name."""
    return {"$ref": f"#/components/schemas/{name}"}


def maybe(schema: Part) -> Part:
    """Return the same schema with null allowed."""
    if "$ref" in schema:
        return {"anyOf": [schema, {"type": "null"}]}
    nullable = {**schema, "type": [schema["type"], "null"]}
    return nullable | ({"enum": [*schema["enum"], None]} if "enum" in schema else {})


def rows(of: Part, description: str = "") -> Part:
    """Return the schema of a list."""
    return _typed("array", description, {"items": of})


def by_name(of: Part, description: str = "") -> Part:
    """Return the schema of an object with names that are data."""
    return _typed("object", description, {"additionalProperties": of})


def record(description: str, fields: Mapping[str, Part], *, optional: Collection[str] = ()) -> Part:
    """Return the schema of an object with these fields, all required except the optional ones."""
    required = [name for name in fields if name not in optional]
    made = _typed("object", description, {"properties": dict(fields)})
    return {**made, "required": required} if required else made


def each(kind: Part, names: str) -> Part:
    """Return fields of one kind, their names separated by spaces."""
    return dict.fromkeys(names.split(), kind)


def in_json(name: str) -> Part:
    """Return a body with the schema of this name, as JSON."""
    return {JSON: {"schema": ref(name)}}


def answer(description: str, content: Part | None = None, headers: Part | None = None) -> Part:
    """Return an answer."""
    return {
        "description": description,
        **({"headers": headers} if headers else {}),
        **({"content": content} if content else {}),
    }


def asked(name: str, description: str, schema: Part, *, within: str = "query") -> Part:
    """Return a parameter, `within` the query, a header or the path."""
    return {
        "name": name,
        "in": within,
        "description": description,
        "schema": schema,
        **({"required": True} if within == "path" else {}),
    }

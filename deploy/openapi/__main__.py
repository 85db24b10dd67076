"""`python -m deploy.openapi`: write the document, and its page of the documents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from deploy.openapi import clients, own
from deploy.openapi.answers import ANY, HINTS, RECEIPTS, responses
from deploy.openapi.parts import Part
from deploy.openapi.schemas import schemas
from router import __version__

REPO = Path(__file__).resolve().parents[2]
DOCUMENT, PAGE = REPO / "router/admin/openapi/openapi.json", REPO / "docs/reference/api.md"
ABOUT = (
    "Main listener for clients, admin listener for operators. Every GET is also available as HEAD. Fields may be"
    " added to responses."
)
TAGS = {
    "inference": "Passed to an engine: bodies pass byte for byte, both ways.",
    "stored responses": "Passed to the replica that made the response.",
    "own pages": "Pages of the router itself, on the main listener or on both.",
    "admin": "For operators, on the admin listener.",
    "files": "Pages for a browser, on the admin listener. They contain no secret and need no token.",
}
SCHEMES: Part = {
    "key": {"type": "http", "scheme": "bearer", "description": "An API key, if a keys file is set."},
    "anthropicKey": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key."},
    "adminToken": {"type": "http", "scheme": "bearer", "description": "The admin token, if one is set."},
}
USUAL = {"default", *map(str, ANY)}  # answers that need not be named at each operation
HEAD = """# API

<!-- Rendered by `python -m deploy.openapi`; edit deploy/openapi instead. -->

Each router describes both listeners in OpenAPI 3.1 on its admin port, from which clients can be generated.
[Endpoints](endpoints.md) has the purpose of each path; this page is the description in short.

```sh
curl -H "Authorization: Bearer $(cat token)" http://127.0.0.1:8001/admin/openapi.json
```

Any operation may also return one of the statuses {any}.
[Errors](errors.md) and [access](../guide/access.md#admin-listener) have their causes.
A request that reaches an engine gets the engine's response.
"""


def document() -> Part:
    """Return the whole document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "warmroute",
            "version": __version__,
            "summary": "A router for clusters of LLM servers.",
            "description": ABOUT,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [own.MAIN_SERVER],
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "paths": {**clients.paths(), **own.paths()},
        "components": {
            "securitySchemes": SCHEMES,
            "parameters": HINTS,
            "headers": RECEIPTS,
            "responses": responses(),
            "schemas": schemas(),
        },
    }


def rendered(value: Part, depth: int = 2) -> str:
    """Return JSON with a line for each path and each component, so that a change of one is a change of a line."""
    if not depth or not isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    inside = (f'"{name}":{rendered(part, depth - 1 + (name == "components"))}' for name, part in value.items())
    return "{\n" + ",\n".join(inside) + "\n}"


def page(described: Part) -> str:
    """Return the page: a table of operations for each tag, then the fields of each schema."""
    parts = [HEAD.format(any=" ".join(f"`{status}`" for status in ANY))]
    for tag, about in TAGS.items():
        lines = [f"## {tag.capitalize()}\n", f"{about}\n", "| operation | function | request | responses |"]
        parts.append("\n".join([*lines, "| --- | --- | --- | --- |", *_operations(described, tag)]) + "\n")
    parts.append("## Bodies\n\nA field that is not required may be missing.\n")
    parts += _bodies(described)
    return "\n".join(parts)


def _operations(described: Part, tag: str) -> Iterator[str]:
    for path, item in described["paths"].items():
        for method, operation in item.items():
            if method in ("servers", "parameters") or operation["tags"] != [tag]:
                continue
            body = operation.get("requestBody", {}).get("content", {})
            takes = [_named(content["schema"]) for content in body.values()]
            takes += [f"`{each['name']}`" for each in operation.get("parameters", ()) if "name" in each]
            shown = {status: part for status, part in operation["responses"].items() if status not in USUAL}
            answers = [" ".join([status, *_schemas_of(part)]) for status, part in shown.items() if status < "400"]
            answers.append(" ".join(status for status in shown if status >= "400"))
            cells = (
                f"`{method.upper()} {path}`",
                operation["summary"],
                " ".join(takes),
                "<br>".join(filter(None, answers)),
            )
            yield f"| {' | '.join(cells)} |"


def _schemas_of(shown: Part) -> list[str]:
    """Return links to the body's schemas."""
    names = [_named(content["schema"]) for content in shown.get("content", {}).values() if "schema" in content]
    return [name for name in dict.fromkeys(names) if name.startswith("[")]


def _bodies(described: Part) -> Iterator[str]:
    for name, schema in described["components"]["schemas"].items():
        required = schema.get("required", ())
        fields = [
            f"| `{field}` | {_named(part)} | {'yes' if field in required else 'no'} |"
            for field, part in schema.get("properties", {}).items()
        ]
        rows = ["| field | type | required |", "| --- | --- | --- |", *fields]
        lines = [f"### {name}", schema["description"], *(["\n".join(rows)] if fields else [])]
        yield "\n\n".join(lines) + "\n"


def _named(schema: Part) -> str:
    """Return a type in few words, with a link if it has its own schema."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_named(each) for each in schema["anyOf"])
    if "enum" in schema:
        return " or ".join("null" if each is None else f"`{each}`" for each in schema["enum"][:12])
    kinds = [schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type", ["anything"])
    if "items" in schema:
        return " or ".join(f"list of {_named(schema['items'])}" if kind == "array" else kind for kind in kinds)
    return " or ".join(kinds)


def main() -> int:
    """Write both."""
    made = document()
    DOCUMENT.write_text(rendered(made) + "\n", encoding="utf-8")
    PAGE.write_text(page(made), encoding="utf-8")
    print(f"wrote {DOCUMENT.relative_to(REPO)} and {PAGE.relative_to(REPO)}")
    return 0


if __name__ == "__main__":
    main()

"""The OpenAPI document of both listeners, and its page of the documents: `python -m deploy.openapi`.

The document is one file, router/admin/openapi/openapi.json, which routers serve at `/admin/openapi.json`. It is
rendered from the descriptions here; the paths that may be sent to engines come from the code. Tests compare it with
every route of the code, and with the answers of a running router (tests/admin/api).

    parts    building blocks of schemas and answers
    answers  the errors of each listener, and headers of receipts
    schemas  contents of bodies
    own      paths of the router's own pages, and of the admin listener
    clients  paths that lead to engines
"""

"""The OpenAPI document of both listeners, and its page of the documents: `python -m deploy.openapi`.

The document is one file, router/admin/openapi/openapi.json, which routers serve at `/admin/openapi.json`. It is
rendered from the descriptions here, as paths that engines may be sent come from the code. Tests compare it with every
route of the code, and with what a running router answers (tests/admin/api).

parts    what schemas and answers are made of
answers  the errors of each listener, and headers of receipts
schemas  what bodies have in them
own      paths of the router's own pages, and of the admin listener
clients  paths that lead to engines
"""

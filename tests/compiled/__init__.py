"""Where the router under test has native code (deploy/compiled.py): `make test-compiled`."""

import router.core.placement.router

COMPILED = not (router.core.placement.router.__file__ or "").endswith(".py")

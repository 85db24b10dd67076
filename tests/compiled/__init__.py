"""Where the router under test has native code (deploy/compiled.py): `make test-compiled`."""

import router.core.routing

COMPILED = not (router.core.routing.__file__ or "").endswith(".py")

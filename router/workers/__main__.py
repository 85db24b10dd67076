"""`python -m router.workers`: a child of the supervisor, which tells it what to be."""

import sys

from router.workers.child import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m router.multiprocess`: a child of the supervisor, which sends it its role."""

import sys

from router.multiprocess.child import main

if __name__ == "__main__":
    sys.exit(main())

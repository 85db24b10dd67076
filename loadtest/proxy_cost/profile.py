"""warmroute under cProfile: `python -m loadtest.proxy_cost.profile FILE serve ...` runs `warmroute serve ...`.

FILE gets the profile of the main thread until SIGTERM. It excludes imports, which come first. The profiler's own cost
is largest for many short calls, so its times show the place of a cost, not its size.
"""

from __future__ import annotations

import cProfile
import sys

from router import router_server  # noqa: F401 - imported now, so that the profile is of serving
from router.cli.main import main

if __name__ == "__main__":
    profiler = cProfile.Profile()
    try:
        status = profiler.runcall(main, sys.argv[2:])
    finally:
        profiler.dump_stats(sys.argv[1])
    sys.exit(status)

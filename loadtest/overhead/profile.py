"""warmroute under cProfile: `python -m loadtest.overhead.profile FILE serve ...` runs `warmroute serve ...`.

What was spent in the main thread until SIGTERM is in FILE. Imports come first and are not in it. The profiler itself
costs most where calls are many and short, so its times say where to look, not how long it takes.
"""

from __future__ import annotations

import cProfile
import sys

from router import app  # noqa: F401 - imported now, so that the profile is of serving
from router.commands.main import main

if __name__ == "__main__":
    profiler = cProfile.Profile()
    try:
        status = profiler.runcall(main, sys.argv[2:])
    finally:
        profiler.dump_stats(sys.argv[1])
    sys.exit(status)

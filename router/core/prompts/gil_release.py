"""The interpreter, which the event loop shares with the thread that reads long bodies."""

from __future__ import annotations


def release_gil() -> None:
    """Let a thread run that has waited for the interpreter for its switch interval.

    CPython checks for such threads at the start of a function that is not compiled, and in its loops. Native code has
    no such checks, and keeps all other threads waiting until it ends. So this module must not be compiled, and any work
    of more than half a millisecond in a thread calls this function in between. A call takes 0.05 us.
    """

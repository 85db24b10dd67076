"""The interpreter, which the event loop shares with the thread that reads long bodies."""

from __future__ import annotations


def let_others() -> None:
    """Let a thread run that has waited for the interpreter for its switch interval.

    CPython looks for such threads where a function begins that is not compiled, and in its loops; native code is in
    neither, and keeps all others waiting until it ends. So this module must not be compiled, and whatever takes longer
    than half a millisecond in a thread calls this function in between. It takes 0.05 us.
    """

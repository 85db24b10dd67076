"""How a call to an engine may end badly: what all of failures.py is made of, for those who exchange bytes.

Apart from them, as their code may be compiled (deploy/compiled.py): nothing that is not can inherit from what is, and
attributes of a compiled exception's class are none of its instances.
"""

from __future__ import annotations

from router.core.facts.requests import Ending


class Failure(Exception):
    """An attempt that failed before its answer began. `kind` is a metric label; `retry`: another may try."""

    kind = "failed"
    retry = True
    ending = Ending.FAILED  # whose fault it is


class BrokeEarly(Failure):
    """The connection broke, or the body ended, before it had begun (or was whole, for held answers)."""

    kind = "broke_early"


class BrokeMidway(Exception):
    """The answer broke off after its beginning; nothing can be retried. `kind` is a metric label."""

    kind = "broke_midway"


class Unfinished(BrokeMidway):
    """The stream ended well as HTTP goes, and did not say that it was whole."""

    kind = "unfinished"

"""Results of the last comparisons, for suspects that are not compared.

An application that writes the time into its system prompt does so in each request. Once that was found twice in a row,
at the same place, the next prompts are assumed to be the same, and only some of them are compared: the time for
comparisons is spent on new cases. If no time is left, the last comparison of the conversation, or of its template, is
the best available result. An assumed finding has no excerpts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from msgspec import Struct

from router.core.insights.difference.compare import Compared
from router.core.types.cache_misses import Difference

FINDING_BYTES = 1_600  # one of them, with two excerpts and a path
SURE_MIN = 2  # equal findings in a row before the next prompts are assumed to be alike
ASSUMED_MAX = 7  # prompts that are not compared before the next one is
OFFSET_BYTES_MAX = 64  # bytes between two places that count as one: digits of a time, of which some may be the same
TOKEN_GROWS = 4  # bytes by which a token may be longer the next time


class Finding(Struct, eq=False):
    """Result of the last comparison of a conversation, or of a template."""

    difference: Difference | None  # None: the prompts parted for good
    offset: int  # first byte at which the prompts differed
    in_template: bool  # before the user's first words, so it is in the same place each time
    share: float  # repeated fraction of the bytes after the difference that could repeat
    sure: int = 1  # comparisons in a row that found the same
    assumed: int = 0  # prompts since then for which the finding was assumed

    def fits(self, at: int, *, in_template: bool) -> bool:
        """True if the finding may be assumed for a prompt that departs from the known text at byte `at`."""
        return in_template == self.in_template and (not in_template or self.is_at(at))

    def is_at(self, at: int) -> bool:
        """True if byte `at` is the finding's place: not after the token that changed there."""
        of, behind = self.difference, at - self.offset
        most = OFFSET_BYTES_MAX
        if of is not None and of.token_bytes >= 0:
            most = of.token_bytes - of.at_bytes + len(of.shape) + TOKEN_GROWS
        return -OFFSET_BYTES_MAX <= behind <= most

    def stands(self, at: int) -> bool:
        """True if a prompt that departs from the known text at byte `at` need not be compared. Each True is counted."""
        if self.sure < SURE_MIN or self.assumed >= ASSUMED_MAX or not self.is_at(at):
            return False
        self.assumed += 1
        return True

    def adapt_to_prompt(self, at: int, span: int) -> Compared:
        """Return the finding, adapted to a prompt that differs from byte `at` on, of which `span` bytes could
        repeat."""
        of = self.difference
        if of is None:
            return Compared(None, 0, at, False)
        lost, piece = int(self.share * span), of.piece_hash
        made = Difference(of.change, of.message, of.role, of.path, of.offset_bytes, of.at_bytes, lost, of.shape, piece)
        made.token_bytes = of.token_bytes
        return Compared(made, lost, at, False)


class RecentFindings:
    """The latest findings, by conversation and by template."""

    def __init__(self, findings_max: int) -> None:
        self._findings_max = findings_max
        self._all: OrderedDict[int, Finding] = OrderedDict()

    def find_assumable(self, names: Iterable[int], at: int, *, in_template: bool) -> Finding | None:
        """Return the first finding of these names that may be assumed for a prompt that departs from the known text at
        byte `at`."""
        for name in names:
            found = self._all.get(name)
            if found is not None and found.fits(at, in_template=in_template):
                return found
        return None

    def add(self, names: Iterable[int], compared: Compared, span: int, *, in_template: bool) -> None:
        """Store the result of a comparison in which `span` bytes could repeat."""
        share = min(1.0, compared.repeated_bytes / span) if span > 0 else 0.0
        for name in names:
            if not name:
                continue
            made = Finding(compared.difference, compared.same_bytes, in_template, share)
            before = self._all.pop(name, None)
            if before is not None and before.in_template == in_template and before.is_at(made.offset):
                made.sure += before.sure * _same(before.difference, made.difference)
            self._all[name] = made
            if len(self._all) > self._findings_max:
                self._all.popitem(last=False)


def _same(one: Difference | None, other: Difference | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.change is other.change and one.path == other.path

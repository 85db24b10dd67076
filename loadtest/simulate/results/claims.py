"""Claims about `warm` in the race, computed from its rows. The documents claim only these.

Rivals are all rows except upper bounds and variants of `warm` itself. In each workload at each load `warm` is compared
with the rival that is best there in the judged figure. That is another rival nearly every time, and none is chosen in
advance: no single rival reaches this bar. The figures are those that a user notices: time to first token, time to the
last token, and output tokens per second.

Seeds are pairs, because both rows had the same requests. A figure is a factor better or worse. The averaged value is
therefore the logarithm of the ratio, and its 95 % interval is Student's t for that number of pairs. A bootstrap would
need no normal distribution, but its intervals for five to ten pairs are known to be too narrow. `within` passes if the
mean is within the margin, or if the interval contains "no difference". A mean over workloads has no interval, and a
figure that must never be worse has no interval either. With fewer than five pairs an interval is too uncertain and
forgives no miss. Goodput, and the mean against the best single rival, are reported and not judged (`ok` is None).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import fmean, median, stdev

from loadtest.common.report import Row

WARM = "warm"
WITHIN = 0.05
"""Difference from the best rival that counts as level, as a part of each figure."""
NEVER_WORSE = 0.03
BASELINE_WORSE = 0.03
"""Limit by which p90 TTFT or p90 end-to-end may exceed the mean of an earlier `warm`."""
PAIRS_MIN = 5
"""Least number of seeds for an interval."""
TTFT_P99_MAX_S = 60.0
SATURATED = ("above", "twice")
YARDSTICKS = ("round_robin", "least_loaded")
ODD_PREFIX = "odd_"
"""Prefix of the names of scenarios with odd fleets."""

LEAST = 1e-6


@dataclass(frozen=True, slots=True)
class Figure:
    """A judged figure and its direction."""

    name: str
    field: str
    more_is_better: bool = False

    def get_value(self, row: Row) -> float:
        """Return the figure, always above 0 because ratios are made of it."""
        return max(getattr(row, self.field) or 0.0, LEAST)

    @property
    def never(self) -> str:
        """Name of the goal that this figure is never worse."""
        return f"{self.name}, never worse"


TTFT = Figure("p90 TTFT", "ttft_p90_s")
E2E = Figure("p90 end-to-end", "e2e_p90_s")
OUTPUT = Figure("output tokens/s", "output_tokens_per_s", more_is_better=True)
FIGURES = (TTFT, E2E, OUTPUT)

P90, GOODPUT, MEAN = TTFT.name, "goodput", "mean p90 TTFT"
BASELINE, BASELINE_E2E = "mean p90 TTFT, to an earlier warm", "mean p90 end-to-end, to an earlier warm"
HELD, P99, FAILED = "held back while the fleet was idle", "p99 TTFT above saturation", "failed requests"
OF_ALL = (MEAN, BASELINE, BASELINE_E2E)
"""Claims about all workloads together."""
_IN_POINTS, _IN_SECONDS, _COUNTED = (GOODPUT,), (P99,), (HELD, FAILED)

# Student's t, two-sided 95 %, for 1 to 30 degrees of freedom, from a standard table.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)

Cell = tuple[str, str]
"""(workload, load)"""
Seeds = dict[int, Row]
Baseline = Mapping[Cell, Mapping[int, tuple[float, float]]]
"""(p90 TTFT, p90 end-to-end) of an earlier `warm` by seed, in seconds."""


class ClaimsError(ValueError):
    """Rows that cannot be compared; the message names the missing rows."""


def is_rival(row: Row) -> bool:
    """True if `warm` is compared with this row."""
    return not row.bound and row.policy is not None and row.policy.partition("_")[0] != WARM


def judge(rows: Sequence[Row], baseline: Baseline | None = None) -> list[Row]:
    """Return a row for each claim: the limit (`expected`), the figure (`got`) and the rival. Raises ClaimsError."""
    cells = _cells(rows)
    judged: list[Row] = []
    for cell, policies in cells.items():
        judged += [_within(cell, policies, figure) for figure in FIGURES]
        judged += [_never_worse(cell, policies, figure, name) for figure in FIGURES for name in YARDSTICKS]
        judged += _waits(cell, policies)
        judged.append(_goodput(cell, policies))
    judged.append(_mean(cells))
    if baseline is not None:
        judged += _to_baseline(cells, baseline)
    return judged


def list_missed(judged: Sequence[Row]) -> list[str]:
    """Return a line for each claim that does not hold."""
    return [_line(row) for row in judged if row.ok is False]


MISSED_HEADS = ("scenario", "load", "missed", "got", "allowed", "note")


def lines_missed(judged: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return a row of the table for each claim that does not hold, under MISSED_HEADS."""
    return [
        (row.workload or "", row.load_name or "", row.goal or "", got_text(row), _allowed(row), row.note or "")
        for row in judged
        if row.ok is False
    ]


def compute_mean_interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and its 95 % interval. For a single pair the interval is the value itself."""
    mean, freedom = fmean(differences), len(differences) - 1
    if not freedom:
        return mean, mean, mean
    t = _T[min(freedom, len(_T)) - 1]
    half = t * stdev(differences) / sqrt(len(differences))
    return mean, mean - half, mean + half


def got_text(row: Row) -> str:
    """Return the figure of a claim in the unit of its goal, and its rival."""
    got, of = row.got or 0.0, f" `{row.policy}`" if row.policy else ""
    if row.goal in _IN_POINTS:
        return f"{100 * got:+.1f} points against{of}"
    if row.goal in _IN_SECONDS:
        return f"{got:.1f} s"
    return f"{got:.0f}" if row.goal in _COUNTED else f"{got:.3f} x{of}"


def worst(same: Sequence[Row]) -> Row:
    """Return the row of one goal that is furthest on the wrong side."""
    more = same[0].goal in {GOODPUT, OUTPUT.name, OUTPUT.never}
    return (min if more else max)(same, key=lambda row: row.got or 0.0)


def _cells(rows: Sequence[Row]) -> dict[Cell, dict[str, Seeds]]:
    """Return rows of single runs by workload and load, policy and seed. All policies of a cell must have the same
    seeds."""
    cells: dict[Cell, dict[str, Seeds]] = {}
    rivals: set[str] = set()
    for row in rows:
        if row.seed is None or row.case is not None or row.workload is None or row.policy is None:
            continue
        if row.policy != WARM and not is_rival(row):
            continue
        cells.setdefault((row.workload, row.load_name or ""), {}).setdefault(row.policy, {})[row.seed] = row
        if row.policy != WARM:
            rivals.add(row.policy)
    if not rivals:
        raise ClaimsError("no rows of rivals to compare with")
    if not any(WARM in policies for policies in cells.values()):
        raise ClaimsError(f"no rows of {WARM} to compare")
    if absent := [name for name in YARDSTICKS if name not in rivals]:
        raise ClaimsError(f"no rows of {' and '.join(absent)}, which are required for the comparison")
    for (workload, load), policies in cells.items():
        seeds = policies.get(WARM, {}).keys()
        for name in (WARM, *sorted(rivals)):
            if not seeds or policies.get(name, {}).keys() != seeds:
                raise ClaimsError(f"{workload}, {load}: not the same seeds of {name} as of {WARM}")
    return cells


def _mean_log(seeds: Seeds, figure: Figure = TTFT) -> float:
    return fmean(log(figure.get_value(row)) for row in seeds.values())


def _share(seeds: Seeds) -> float:
    return fmean(row.goodput_share or 0.0 for row in seeds.values())


def _log_ratios(ours: Seeds, theirs: Seeds, figure: Figure) -> list[float]:
    return [log(figure.get_value(row) / figure.get_value(theirs[seed])) for seed, row in ours.items()]


def _compute_limit(figure: Figure, margin: float) -> float:
    return 1 - margin if figure.more_is_better else 1 + margin


def _keeps(figure: Figure, ratio: float, margin: float) -> bool:
    allowed = _compute_limit(figure, margin)
    return ratio >= allowed if figure.more_is_better else ratio <= allowed


def _within(cell: Cell, policies: dict[str, Seeds], figure: Figure) -> Row:
    rivals = [name for name in policies if name != WARM]
    pick = max if figure.more_is_better else min
    best = pick(rivals, key=lambda name: _mean_log(policies[name], figure))
    mean, low, high = compute_mean_interval(_log_ratios(policies[WARM], policies[best], figure))
    row = _claim(figure.name, cell, best, _compute_limit(figure, WITHIN), exp(mean))
    row.ok = _keeps(figure, exp(mean), WITHIN)
    if len(policies[WARM]) >= PAIRS_MIN:
        row.ok = row.ok or (high >= 0 if figure.more_is_better else low <= 0)
    row.note = _interval(f"{exp(low):.3f}", f"{exp(high):.3f}", policies[WARM])
    return row


def _goodput(cell: Cell, policies: dict[str, Seeds]) -> Row:
    best = max((name for name in policies if name != WARM), key=lambda name: _share(policies[name]))
    theirs = policies[best]
    mean, low, high = compute_mean_interval(
        [(row.goodput_share or 0.0) - (theirs[seed].goodput_share or 0.0) for seed, row in policies[WARM].items()]
    )
    row = _claim(GOODPUT, cell, best, None, mean)
    row.note = _interval(f"{low:+.3f}", f"{high:+.3f}", policies[WARM])
    return row


def _interval(low: str, high: str, seeds: Seeds) -> str:
    return f"95 % interval {low} to {high}" if len(seeds) >= PAIRS_MIN else f"{len(seeds)} seeds, so no interval"


def _never_worse(cell: Cell, policies: dict[str, Seeds], figure: Figure, name: str) -> Row:
    ratio = exp(fmean(_log_ratios(policies[WARM], policies[name], figure)))
    row = _claim(figure.never, cell, name, _compute_limit(figure, NEVER_WORSE), ratio)
    row.ok = _keeps(figure, ratio, NEVER_WORSE)
    return row


def _waits(cell: Cell, policies: dict[str, Seeds]) -> list[Row]:
    """Return the claims about deferred requests, late first tokens and clients that gave up, in cells that they apply
    to."""
    ours, rivals = policies[WARM], {name: seeds for name, seeds in policies.items() if name != WARM}
    idle = _claim(HELD, cell, None, 0, sum(row.held_while_idle or 0 for row in ours.values()))
    idle.ok = not idle.got
    claims = [idle]
    if cell[1] in SATURATED:
        p99s = {name: median(row.ttft_p99_s or 0.0 for row in seeds.values()) for name, seeds in policies.items()}
        late = _claim(P99, cell, None, TTFT_P99_MAX_S, p99s[WARM])
        late.ok = p99s[WARM] <= TTFT_P99_MAX_S
        best = min(rivals, key=lambda name: p99s[name])
        late.note = f"the best of the others is {best} with {p99s[best]:.1f} s"
        claims.append(late)
    if any(row.patience_s is not None for row in ours.values()):
        failed = {name: sum(row.failed for row in seeds.values()) for name, seeds in policies.items()}
        best = min(rivals, key=lambda name: failed[name])
        given_up = _claim(FAILED, cell, best, failed[best], failed[WARM])
        given_up.ok = failed[WARM] <= failed[best]
        claims.append(given_up)
    return claims


def beaten_bounds(rows: Sequence[Row]) -> list[str]:
    """Return a line for each upper bound that some row beats by more than WITHIN. The bound does not hold there."""
    cells: dict[Cell, dict[str, Seeds]] = {}
    bounds = {row.policy for row in rows if row.bound and row.policy}
    for row in rows:
        if row.seed is not None and row.case is None and row.workload and row.policy and row.ttft_p90_s is not None:
            policies = cells.setdefault((row.workload, row.load_name or ""), {})
            policies.setdefault(row.policy, {})[row.seed] = row
    lines = []
    for (workload, load), policies in cells.items():
        logs = {name: _mean_log(seeds) for name, seeds in policies.items()}
        best = min((name for name in logs if name not in bounds), key=lambda name: logs[name], default=None)
        if best is None:
            continue
        for bound in sorted(bounds & logs.keys()):
            ratio = exp(logs[bound] - logs[best])
            if ratio > 1 + WITHIN:
                lines.append(f"{workload}, {load}: {bound} is no bound, it takes {ratio:.2f} x the p90 TTFT of {best}")
    return lines


def _mean(cells: dict[Cell, dict[str, Seeds]]) -> Row:
    names = next(iter(cells.values()))
    logs = {name: fmean(_mean_log(policies[name]) for policies in cells.values()) for name in names}
    best = min((name for name in logs if name != WARM), key=lambda name: logs[name])
    row = _claim(MEAN, ("all", "all"), best, None, exp(logs[WARM] - logs[best]))
    row.note = f"geometric mean over {len(cells)} workloads and loads"
    return row


def _to_baseline(cells: dict[Cell, dict[str, Seeds]], baseline: Baseline) -> list[Row]:
    """Compare the means over the cells of both races, of usual fleets and of odd ones."""
    rows = []
    for fleets, are_odd in (("usual", False), ("odd", True)):
        group = [cell for cell in cells if cell[0].startswith(ODD_PREFIX) is are_odd and cell in baseline]
        for place, (goal, figure) in enumerate(((BASELINE, TTFT), (BASELINE_E2E, E2E))):
            ratios = []
            for cell in group:
                then, now = baseline[cell], cells[cell][WARM]
                logs = [
                    log(figure.get_value(now[seed]) / max(then[seed][place], LEAST)) for seed in now if seed in then
                ]
                if logs:
                    ratios.append(fmean(logs))
            if ratios:
                mean = exp(fmean(ratios))
                row = _claim(goal, ("all", fleets), WARM, 1 + BASELINE_WORSE, mean)
                row.ok = mean <= 1 + BASELINE_WORSE
                row.note = f"geometric mean over {len(ratios)} workloads and loads"
                rows.append(row)
    return rows


def _claim(goal: str, cell: Cell, rival: str | None, expected: float | None, got: float) -> Row:
    return Row(workload=cell[0], load_name=cell[1], policy=rival, goal=goal, expected=expected, got=got)


def _line(row: Row) -> str:
    note = f" ({row.note})" if row.note else ""
    return f"{row.workload}, {row.load_name}, {row.goal}: {got_text(row)}, {_allowed(row)} allowed{note}"


def _allowed(row: Row) -> str:
    wanted = row.expected or 0.0
    return f"{wanted:.0f}" if row.goal in (*_COUNTED, *_IN_SECONDS) else f"{wanted:.2f}"

"""What must be seen of `warm` in the race, computed from its rows: the README says nothing else of it.

Rivals are all rows but upper bounds and `warm`'s own variants. In each workload at each load `warm` is held against
the rival that is best there, which is another one nearly every time and nobody's choice in advance: a bar that no
single rival reaches.

Seeds are pairs: both rows were asked the same requests. A p90 is a factor better or worse, so what is averaged is the
logarithm of the ratio, and its 95 % interval is Student's t for so many pairs. A bootstrap would need no
normal distribution, but of five to ten pairs it draws intervals that are known to be too narrow. `within` passes where
the mean is within the margin, or the interval holds "no difference"; a mean over workloads has no interval, and
neither has what must never be worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, sqrt
from statistics import fmean, stdev

from loadtest.report import Row

WARM = "warm"
WITHIN = 0.03
"""As part of the best rival's p90 TTFT, and in points of goodput."""
NEVER_WORSE = 0.02
MEAN_RATIO_MAX = 0.9
ADVERSARIAL = ("one_group", "all_unique")
YARDSTICKS = ("round_robin", "least_loaded")

P90, GOODPUT, MEAN = "p90 TTFT", "goodput", "mean p90 TTFT"
P90_NEVER, GOODPUT_NEVER = "p90 TTFT, never worse", "goodput, never worse"

# Student's t, two-sided 95 %, for 1 to 30 degrees of freedom: any table of it.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
LEAST_S = 1e-6

Cell = tuple[str, str]
"""(workload, load)"""
Seeds = dict[int, Row]


class ClaimsError(ValueError):
    """Rows that cannot be compared; the message says what is missing."""


def is_rival(row: Row) -> bool:
    """Whether `warm` has to stand against it."""
    return not row.bound and row.policy is not None and row.policy.partition("_")[0] != WARM


def judge(rows: Sequence[Row]) -> list[Row]:
    """A row for each claim: what was wanted (`expected`), what was seen (`got`), of which rival. Raises ClaimsError."""
    cells = _cells(rows)
    judged: list[Row] = []
    for cell, policies in cells.items():
        judged += [_within_p90(cell, policies), _within_goodput(cell, policies)]
        if cell[0] in ADVERSARIAL:
            judged += [row for name in YARDSTICKS for row in _never_worse(cell, policies, name)]
    return [*judged, _mean(cells)]


def missed(judged: Sequence[Row]) -> list[str]:
    """A line for each claim that does not hold."""
    return [_line(row) for row in judged if not row.ok]


def paired(differences: Sequence[float]) -> tuple[float, float, float]:
    """The mean with its 95 % interval; of a single pair nothing is known but itself."""
    mean, freedom = fmean(differences), len(differences) - 1
    if not freedom:
        return mean, mean, mean
    t = _T[min(freedom, len(_T)) - 1]
    half = t * stdev(differences) / sqrt(len(differences))
    return mean, mean - half, mean + half


def _cells(rows: Sequence[Row]) -> dict[Cell, dict[str, Seeds]]:
    """Rows of single runs by workload and load, policy and seed; all of a cell have the same seeds."""
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
    for (workload, load), policies in cells.items():
        seeds = policies.get(WARM, {}).keys()
        for name in (WARM, *sorted(rivals)):
            if not seeds or policies.get(name, {}).keys() != seeds:
                raise ClaimsError(f"{workload}, {load}: not the same seeds of {name} as of {WARM}")
    return cells


def p90_s(row: Row) -> float:
    """Seconds, over 0: ratios are made of it."""
    return max(row.ttft_p90_s or 0.0, LEAST_S)


def _mean_log(seeds: Seeds) -> float:
    return fmean(log(p90_s(row)) for row in seeds.values())


def _share(seeds: Seeds) -> float:
    return fmean(row.goodput_share or 0.0 for row in seeds.values())


def _log_ratios(ours: Seeds, theirs: Seeds) -> list[float]:
    return [log(p90_s(row) / p90_s(theirs[seed])) for seed, row in ours.items()]


def _share_differences(ours: Seeds, theirs: Seeds) -> list[float]:
    return [(row.goodput_share or 0.0) - (theirs[seed].goodput_share or 0.0) for seed, row in ours.items()]


def _within_p90(cell: Cell, policies: dict[str, Seeds]) -> Row:
    best = min((name for name in policies if name != WARM), key=lambda name: _mean_log(policies[name]))
    mean, low, high = paired(_log_ratios(policies[WARM], policies[best]))
    row = _claim(P90, cell, best, 1 + WITHIN, exp(mean))
    row.ok = exp(mean) <= 1 + WITHIN or low <= 0
    row.note = _interval(f"{exp(low):.3f}", f"{exp(high):.3f}", policies[WARM])
    return row


def _within_goodput(cell: Cell, policies: dict[str, Seeds]) -> Row:
    best = max((name for name in policies if name != WARM), key=lambda name: _share(policies[name]))
    mean, low, high = paired(_share_differences(policies[WARM], policies[best]))
    row = _claim(GOODPUT, cell, best, -WITHIN, mean)
    row.ok = mean >= -WITHIN or high >= 0
    row.note = _interval(f"{low:+.3f}", f"{high:+.3f}", policies[WARM])
    return row


def _interval(low: str, high: str, seeds: Seeds) -> str:
    return f"95 % interval {low} to {high}" if len(seeds) > 1 else "one seed, so no interval"


def _never_worse(cell: Cell, policies: dict[str, Seeds], name: str) -> list[Row]:
    if name not in policies:
        raise ClaimsError(f"{', '.join(cell)}: no rows of {name}")
    ratio = exp(fmean(_log_ratios(policies[WARM], policies[name])))
    points = fmean(_share_differences(policies[WARM], policies[name]))
    p90 = _claim(P90_NEVER, cell, name, 1 + NEVER_WORSE, ratio)
    p90.ok = ratio <= 1 + NEVER_WORSE
    goodput = _claim(GOODPUT_NEVER, cell, name, -NEVER_WORSE, points)
    goodput.ok = points >= -NEVER_WORSE
    return [p90, goodput]


def beaten_bounds(rows: Sequence[Row]) -> list[str]:
    """A line for each upper bound that some row is better than: then it bounds nothing there."""
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


def _mean_logs(cells: dict[Cell, dict[str, Seeds]]) -> dict[str, float]:
    names = next(iter(cells.values()))
    return {name: fmean(_mean_log(policies[name]) for policies in cells.values()) for name in names}


def _mean(cells: dict[Cell, dict[str, Seeds]]) -> Row:
    logs = _mean_logs(cells)
    best = min((name for name in logs if name != WARM), key=lambda name: logs[name])
    ratio = exp(logs[WARM] - logs[best])
    row = _claim(MEAN, ("all", "all"), best, MEAN_RATIO_MAX, ratio)
    row.ok = ratio <= MEAN_RATIO_MAX
    row.note = f"geometric mean over {len(cells)} workloads and loads"
    return row


def _claim(goal: str, cell: Cell, rival: str, expected: float, got: float) -> Row:
    return Row(workload=cell[0], load_name=cell[1], policy=rival, goal=goal, expected=expected, got=got)


def _line(row: Row) -> str:
    about = f"{row.workload}, {row.load_name}, {row.goal}"
    note = f" ({row.note})" if row.note else ""
    if row.goal in {GOODPUT, GOODPUT_NEVER}:
        got, wanted = 100 * (row.got or 0.0), 100 * (row.expected or 0.0)
        return f"{about}: {got:+.1f} points against {row.policy}, {wanted:+.0f} allowed{note}"
    return f"{about}: {row.got:.3f} x {row.policy}, {row.expected:.2f} allowed{note}"

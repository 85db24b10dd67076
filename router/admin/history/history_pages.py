"""Pages of the past: `/admin/decisions`, `/admin/series`, and a request's page for its own client."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from router.admin.decision_rows import client_row
from router.admin.history.breakdowns import RangeRows
from router.admin.history.file import COARSE_S
from router.admin.history.intervals import STEP_S, point
from router.admin.history.query_filters import PARAMETERS, DecisionFilter, filter_of, ids_of
from router.admin.history.request_history import NUMBER_MAX, RouterHistory
from router.admin.page_table import AdminRequest, AdminResponse, AdminRoute, get_route, json_answer
from router.admin.query_params import BadParameter, parse_int, seconds
from router.placement_api import REQUESTS, HttpPage, RequestPrincipal, json_page

LIMIT, LIMIT_MAX = 20, 500  # decisions of one answer: default and maximum
POINTS_MAX = 720  # points of one answer, a chart's maximum
SPAN_S = 600  # default span of time
STEPS_S = (5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 21_600, 86_400)
ID_CHARS_MAX = 128
SLICE_POINTS = 10  # points made, encoded and released without a break: below a millisecond
NOT_FOUND = "unknown_request"


class HistoryPages:
    """Handlers of pages of the past."""

    def __init__(self, history: RouterHistory) -> None:
        self._history = history

    def routes(self) -> list[AdminRoute]:
        """Return the routes for the admin listener."""
        return [
            get_route("/admin/decisions", self.decisions, *PARAMETERS, "before", "limit"),
            get_route("/admin/series", self.series, "from_s", "to_s", "step_s"),
        ]

    async def decisions(self, call: AdminRequest) -> AdminResponse:
        """Answer with requests that ended and match the parameters, newest first, each with its most relevant
        candidates."""
        query = call.query
        limit = parse_int("limit", query.get("limit"), 1, LIMIT_MAX) or LIMIT
        before = parse_int("before", query.get("before"), 1, NUMBER_MAX) or NUMBER_MAX
        found = await self._history.find(filter_of(query), limit=limit, before=before)
        return json_answer(
            {
                "decisions": [msgspec.Raw(row) for row in found.rows],
                "more": found.next_before is not None,
                "next_before": found.next_before,
                "kept": self._history.retention() | ({"why": found.why_not_all} if found.why_not_all else {}),
            }
        )

    async def series(self, call: AdminRequest) -> AdminResponse:
        """Answer with sums of requests, in even steps over a span of time, and by model and group over all of it."""
        query, now_s = call.query, self._history.now_s()
        to_s = seconds("to_s", query.get("to_s"))
        to_s = now_s if to_s is None else to_s
        from_s = seconds("from_s", query.get("from_s"))
        from_s = to_s - SPAN_S if from_s is None else from_s
        if from_s >= to_s:
            raise BadParameter("'from_s' must be before 'to_s'.")
        step_s = self._step_s(parse_int("step_s", query.get("step_s"), STEP_S, STEPS_S[-1]), from_s, to_s, now_s)
        begin, end = int(from_s // step_s) * step_s, -int(-to_s // step_s) * step_s
        steps = await self._history.downsample(begin, end, step_s)
        points, by = list[msgspec.Raw](), RangeRows()
        if end >= now_s:
            by.add(self._history.current_breakdown())
        for at_s in range(begin, end, step_s):
            # Encoding all points, or freeing all steps, at once would hold up the event loop for milliseconds.
            step = steps.pop(at_s, None)
            by.add(step or {})
            points.append(msgspec.Raw(msgspec.json.encode(point(at_s, step))))
            if not len(points) % SLICE_POINTS:
                await asyncio.sleep(0)
        span = {"now_s": round(now_s, 3), "from_s": begin, "to_s": end, "step_s": step_s}
        rows = {"models": by.models(), "groups": by.groups()}
        page: dict[str, Any] = {**span, "kept": self._history.retention(), "points": points, **rows}
        return json_answer(page)

    def _step_s(self, wished_s: int | None, from_s: float, to_s: float, now_s: float) -> int:
        """Return the length of a step: the requested one, or the shortest round one with few enough points and with
        data for the whole span. Raises BadParameter."""
        least_s = COARSE_S if from_s < self._history.fine_since_s(now_s) - STEP_S else STEP_S
        fits = [step_s for step_s in STEPS_S if step_s >= least_s and (to_s - from_s) / step_s <= POINTS_MAX]
        if not fits:
            raise BadParameter(f"A span of more than {POINTS_MAX * STEPS_S[-1] // 86_400} days is too long.")
        if wished_s is None:
            return fits[0]
        if wished_s % (COARSE_S if wished_s > COARSE_S else STEP_S):
            raise BadParameter(
                f"'step_s' must be a multiple of {STEP_S}, and above {COARSE_S} a multiple of {COARSE_S}."
            )
        if wished_s < least_s or (to_s - from_s) / wished_s > POINTS_MAX:
            why = f"give more than {POINTS_MAX} points" if wished_s >= least_s else "are no longer kept"
            raise BadParameter(f"Steps of {wished_s} s {why} for this span; use steps of {fits[0]} s.")
        return wished_s

    async def own_request(self, path: str, owner: RequestPrincipal) -> HttpPage:
        """Return the page of one request for its own client: the last request of this owner with this id. The page does
        not distinguish an unknown request from another client's request."""
        id_ = path.removeprefix(REQUESTS)
        if 0 < len(id_) <= ID_CHARS_MAX:
            wanted = DecisionFilter(ids=ids_of(id_), tenant=owner.tenant)
            found = await self._history.find(wanted, limit=1)
            if found.rows:
                return json_page(client_row(msgspec.json.decode(found.rows[0]), owner))
        message = "The request is unknown, belongs to another tenant, or is too old."
        error = {"message": message, "type": "not_found_error", "param": None, "code": NOT_FOUND}
        return json_page({"error": error}, status=404)

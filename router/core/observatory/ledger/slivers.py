"""Which templates the map draws one by one, and which it draws as one: "others".

Shuffled tools make a template of every order, each with next to none of the traffic. The least served templates, which
together have a quarter of all tokens at most and a fiftieth each, are slivers; those of one parent are one branch of
the map, if they are more than a few. So are those that there is no room for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SLIVER_SHARE = 0.02  # a template that serves less of all tokens may be a sliver
SLIVERS_SHARE = 0.25  # most of all tokens that slivers may have together
OTHERS_MIN = 4  # fewer slivers of one parent are drawn one by one


def slivers(
    most: Sequence[int],
    parents: Mapping[int, int],
    through: Mapping[int, float],
    own: Mapping[int, float],
    rows_max: int,
) -> dict[int, list[int]]:
    """The templates that are not drawn one by one, by the nearest one that is and that they begin with (0: none).
    `most` are all, the most served first and each behind its parent; `through` are the tokens of requests that begin
    with each, `own` of those that begin with none of its branches."""
    total = sum(own.values())
    small: set[int] = set()
    left = total * SLIVERS_SHARE
    for id_ in reversed(most):
        left -= own[id_]
        if left < 0 or through[id_] >= total * SLIVER_SHARE:
            break
        small.add(id_)
    few = {id_ for group in _grouped(most, parents, small).values() if len(group) < OTHERS_MIN for id_ in group}
    small -= few
    drawn = 0
    for id_ in most:
        if id_ not in small and (drawn := drawn + 1) > rows_max:
            small.add(id_)
    return _grouped(most, parents, small)


def _grouped(most: Sequence[int], parents: Mapping[int, int], small: set[int]) -> dict[int, list[int]]:
    """Slivers by the nearest template that is none and that they begin with."""
    above: dict[int, int] = {}
    groups: dict[int, list[int]] = {}
    for id_ in most:
        parent = parents.get(id_, 0)
        above[id_] = above[parent] if parent in small and parent in above else parent
        if id_ in small:
            groups.setdefault(above[id_], []).append(id_)
    return groups

"""Templates that the map draws one by one, and those that it draws as one: "others".

Shuffled tools make a template of every order, each with a tiny part of the traffic. Slivers are the least served
templates that together have at most a quarter of all tokens, and at most a fiftieth each. Slivers of one parent are one
branch of the map, if they are more than a few. The same holds for templates beyond the map's limit.
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
    """Return the templates that are not drawn one by one, by the nearest drawn one that they begin with (0: no such
    template).

    - `most`: all templates, the most served first and each after its parent.
    - `through`: tokens of requests that begin with each.
    - `own`: tokens of those that begin with none of its branches.
    """
    total = sum(own.values())
    small: set[int] = set()
    left = total * SLIVERS_SHARE
    for id_ in reversed(most):
        left -= own[id_]
        if left < 0 or through[id_] >= total * SLIVER_SHARE:
            break
        small.add(id_)
    few = {id_ for group in _group_by_parent(most, parents, small).values() if len(group) < OTHERS_MIN for id_ in group}
    small -= few
    drawn = 0
    for id_ in most:
        if id_ not in small and (drawn := drawn + 1) > rows_max:
            small.add(id_)
    return _group_by_parent(most, parents, small)


def _group_by_parent(most: Sequence[int], parents: Mapping[int, int], small: set[int]) -> dict[int, list[int]]:
    """Return slivers by the nearest template that is not a sliver and that they begin with."""
    above: dict[int, int] = {}
    groups: dict[int, list[int]] = {}
    for id_ in most:
        parent = parents.get(id_, 0)
        above[id_] = above[parent] if parent in small and parent in above else parent
        if id_ in small:
            groups.setdefault(above[id_], []).append(id_)
    return groups

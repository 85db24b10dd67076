"""The tables of former names, from router/former_names.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from loadtest.docgen.markdown import table
from router.former_names import (
    HEADERS,
    KEY_FIELDS,
    LABEL_VALUES,
    LOG_EVENTS,
    METRICS,
    REMOVED,
    REMOVED_VALUES,
    SETTING_VALUES,
    SETTINGS,
)

_PLACES = {
    "fate": "`fate` of `warmroute_token_fate_total`; `places` in the log, `/admin/decisions` and `/admin/series`",
    "cause": "`cause` of `warmroute_spills_total` and `warmroute_spilled_tokens_total`; `spill` in `/admin/decisions`",
    "result": "`result` of `warmroute_p2p_transfers_total`",
}
"""Label -> the metrics and pages with its values."""


def former_names_tables() -> str:
    """Return a table of each kind of former names, each with a heading. A kind without former names is left out."""
    head = ("former name", "name")
    sections: dict[str, tuple[Sequence[str], Sequence[Sequence[str]]]] = {
        "Settings": (head, [*_names(SETTINGS)]),
        "Values of settings": (("setting", "former value", "value"), [*_setting_values()]),
        "Fields of the keys file": (head, [*_names(KEY_FIELDS)]),
        "Metrics": ((*head, "labels"), [*_metrics()]),
        "Headers": (head, [*_names(HEADERS)]),
        "Log events": (head, [*_names(LOG_EVENTS)]),
        "Label values": (("former value", "value", "place"), [*_values()]),
        "Removed settings": (("setting", "replacement"), [(f"`{key}`", text) for key, text in sorted(REMOVED.items())]),
        "Removed values of settings": (("setting", "removed value", "replacement"), [*_removed_values()]),
    }
    return "\n\n".join(f"## {title}\n\n{table(head, rows)}" for title, (head, rows) in sections.items() if rows)


def _names(names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for former, name in sorted(names.items()):
        yield f"`{former}`", f"`{name}`"


def _setting_values() -> Iterator[tuple[str, str, str]]:
    for key, values in SETTING_VALUES.items():
        for former, value in sorted(values.items()):
            yield f"`{key}`", f"`{former}`", f"`{value}`"


def _removed_values() -> Iterator[tuple[str, str, str]]:
    for key, values in sorted(REMOVED_VALUES.items()):
        for value, replacement in sorted(values.items()):
            yield f"`{key}`", f"`{value}`", replacement


def _metrics() -> Iterator[tuple[str, str, str]]:
    for former, renamed in sorted(METRICS.items()):
        labels = ", ".join(f"`{old}` is `{label}`" for old, label in renamed.labels.items())
        yield f"`{former}`", f"`{renamed.name}`", labels


def _values() -> Iterator[tuple[str, str, str]]:
    for label, values in LABEL_VALUES.items():
        for former, value in sorted(values.items()):
            yield f"`{former}`", f"`{value}`", _PLACES[label]

"""The reference says what the code does: its tables are those of settings, metrics, policies, paths and headers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtest.docgen import command as pages
from loadtest.simulate.policies import ROWS
from loadtest.simulate.scenarios.registry import LADDERS
from router import former_names
from router.admin.pages import Pages
from router.cli.config_loader import load
from router.config.api_keys import Keys
from router.config.runtime import resolve
from router.config.schema import Settings, field_keys
from router.core.dialects import PATHS
from router.core.placement.policies import POLICIES
from router.core.types.placements import Confidence, PlacementReason
from router.http.client_timeouts import REASONS
from router.router_server import RouterServer
from tests.house.documents import DOCUMENTS, NAMES, ROOT, anchors, block, code_blocks, page, section, table
from tests.support.histories import no_history

METRICS = block(page(pages.BLOCKS["metrics"]), "metrics")


@pytest.mark.parametrize("name", pages.TABLES)
def test_rendered_tables_are_up_to_date(name: str) -> None:
    """A table that the code has is the one that `python -m loadtest pages` makes now."""
    assert block(page(pages.BLOCKS[name]), name).strip() == pages.TABLES[name](), "run: python -m loadtest pages"


def test_every_scenario_is_named() -> None:
    """The page of the race names the ladder's scenarios, whose figures its table has as they are made now."""
    text = page(pages.BLOCKS["scenarios"])
    assert all(f"`{name}`" in text for name in LADDERS)


def test_left_out_of_rules_names_rows() -> None:
    """Every row of which the simulation's page says what is left out is one that there is."""
    (told,) = re.findall(r"\| row \| omission \|\n((?:\|.*\n)+)", page("docs/evidence/simulation.md"))
    names = {name for row in table(told) for name in re.findall(r"`(\w+)`", row[0])}
    assert names <= ROWS.keys()
    assert len(names) >= 10


def test_every_setting_has_its_true_default(tmp_path: Path) -> None:
    """Settings that spell out every documented default are the defaults, and no setting is missing or unknown. Each
    has an anchor of its name, under the heading of its section."""
    text = block(page(pages.BLOCKS["settings"]), "settings")
    rows = {row[0].partition("</a>")[2].strip("`"): row for row in table(text)}
    assert [row[0].partition(">")[0] for row in rows.values()] == [f'<a id="{key}"' for key in rows]
    assert anchors(text) == {key.rpartition(".")[0] or "top-level" for key in rows}
    tree: dict[str, Any] = {}
    for key, row in rows.items():
        part, _, name = key.rpartition(".")
        default = yaml.safe_load(re.findall(r"`([^`]*)`", row[1])[0])
        (tree.setdefault(part, {}) if part else tree)[name] = default
        assert len(row[3]) > 10, key
    file = tmp_path / "all.yaml"
    file.write_text(yaml.safe_dump(tree))

    assert rows.keys() == field_keys().keys()
    assert load(file) == Settings()


async def test_every_metric_is_in_the_table() -> None:
    """A router's own page has exactly the metrics of the table, with their types and no other labels, and the former
    names of renamed metrics."""
    documented = {row[0].strip("`"): row for row in table(METRICS)}
    settings = Settings(replicas=("http://127.0.0.1:1",), listen=on_free_ports())
    async with RouterServer(resolve(settings)) as app:
        app.control.metrics.requests.count_attempt_failure("http://127.0.0.1:1", "connect")
        families = list(app.control.metrics.registry.collect())
    emitted = {f"{f.name}_total" if f.type == "counter" else f.name: f for f in families}

    assert emitted.keys() == documented.keys() | former_names.METRICS.keys()
    for name, family in emitted.items():
        if name in former_names.METRICS:
            continue
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert documented[name][1] == family.type
        assert labels <= set(re.findall(r"`(\w+)`", documented[name][2])), name


def on_free_ports() -> Any:
    """Listeners on free ports."""
    return type(Settings().listen)(port=0, admin_port=0)


def test_no_document_names_a_metric_that_is_not() -> None:
    """Every `warmroute_...` name in any document is a metric in the table, or a former name of one."""
    known = {row[0].strip("`") for row in table(METRICS)} | former_names.METRICS.keys()
    for document in DOCUMENTS:
        named = set(re.findall(r"\bwarmroute_[a-z_]+\b", document.read_text(encoding="utf-8")))
        assert named <= known, document.name


def test_every_policy_is_in_the_table() -> None:
    """The table of policies has every row of POLICIES and no other, and says which look at caches."""
    rows = {row[0].strip("`"): row[1] for row in table(block(page(pages.BLOCKS["policies"]), "policies"))}
    assert rows == {name: "yes" if policy().cache_aware else "no" for name, policy in POLICIES.items()}


def test_every_path_is_in_the_table() -> None:
    """Every path that the router answers is in the table of endpoints."""
    endpoints = page("docs/reference/endpoints.md")
    never_asked: Any = None
    pages = Pages(never_asked, never_asked, ready=bool, clock=float, history=no_history())
    own = [route.path for route in pages.routes()]

    for path in [*PATHS, *Settings().api.passthrough, *own, "/v1/models", "/v1/responses/{id}"]:
        assert re.search(rf"(?<![\w/]){re.escape(path)}`", endpoints), path


def test_every_response_header_is_in_the_table() -> None:
    """Headers that answers are given and headers in the table are the same."""
    sources = [(ROOT / "router" / name).read_text() for name in ("proxy/http_proxy.py", "ingress/local_responses.py")]
    emitted = set(re.findall(r'(?:f"|header_lines\(")(x-[a-z0-9-]+)(?:: \{|",)', "".join(sources)))
    documented = {row[0].strip("`") for row in table(page("docs/guide/receipts.md")) if row[0][:3] == "`x-"}
    assert emitted == documented
    assert len(emitted) >= 5


def test_every_reason_and_grade_is_explained() -> None:
    """Every value of x-warmroute-reason and x-warmroute-grade is in a table, and no other is."""
    names = {row[0].strip("`") for row in table(page("docs/guide/receipts.md"))}
    assert {name for name in names if not name.startswith("x-")} == {*PlacementReason, *Confidence}


def test_every_reason_to_close_a_connection_is_explained() -> None:
    """All labels of `warmroute_connections_closed_total` are named where the limits are."""
    for reason in REASONS:
        assert f"`{reason}`" in section(page("docs/guide/access.md"), "Client limits"), reason


def test_settings_file_loads(tmp_path: Path) -> None:
    """Each settings file that a guide shows is one that the router takes, and so is the keys file, a list."""
    shown = [text for name in NAMES if name.startswith("docs/") for text in code_blocks(page(name), "yaml")]
    assert len(shown) >= 4
    for number, text in enumerate(shown):
        file = tmp_path / f"{number}.yaml"
        file.write_text(text)
        if text.startswith("- "):
            assert len(Keys.load(file, isolate=False, receipts=False))
        else:
            load(file)

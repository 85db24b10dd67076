"""The documents say what the code does: tables, names, commands and figures' places."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from loadtest import __main__
from loadtest.agree import command as agree
from loadtest.common.report import Row, envelope
from loadtest.evidence import command as evidence
from loadtest.faults import command as faults
from loadtest.pages import render
from loadtest.replay import command as replay
from loadtest.replay import demo
from loadtest.simulate import options as simulate_options
from loadtest.simulate.rules import ROWS
from loadtest.simulate.scenarios.table import LADDERS
from router.admin.pages import Pages
from router.app import App
from router.commands import main as command
from router.commands.loading import load
from router.core.dialects import PATHS
from router.core.facts.placements import Grade, Reason
from router.core.placement.policies import POLICIES
from router.http.deadlines import REASONS
from router.http.failures import BrokeMidway, Failure
from router.settings.keys import Keys
from router.settings.schema import Settings, field_keys

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [
    ROOT / name
    for name in (
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "SECURITY.md",
        "loadtest/README.md",
        "deploy/README.md",
        "deploy/RUNBOOK.md",
        "helm/README.md",
        "helm/warmroute/README.md",
    )
]
SOURCES = sorted((ROOT / "router").rglob("*.py"))


def block(name: str) -> str:
    """What stands between README's markers of this name."""
    return README.split(f"<!-- {name}:begin -->")[1].split(f"<!-- {name}:end -->")[0]


def table(text: str) -> list[list[str]]:
    """Cells of every row of every Markdown table in the text, heads and rules left out."""
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("| ")]
    heads = {i - 1 for i, row in enumerate(rows) if row[0].strip() == "---"}
    cells = [[cell.strip() for cell in row] for i, row in enumerate(rows) if i not in heads]
    return [row for row in cells if row[0] != "---"]


def section(title: str, page: str = "") -> str:
    """README's text, or another page's, from a heading to the next of its level or above."""
    level, rest = re.split(rf"^(#+) {title}$", page or README, flags=re.MULTILINE)[1:3]
    return re.split(rf"^#{{1,{len(level)}}} ", rest, flags=re.MULTILINE)[0]


def code_blocks(text: str, language: str) -> list[str]:
    """Fenced blocks of one language, with continued lines joined."""
    return [found.replace("\\\n", " ") for found in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)]


def commands() -> Iterator[list[str]]:
    """Every command with an argument in any document, in a block or in a sentence, as its words up to a redirection."""
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for line in "\n".join(code_blocks(text, "sh")).splitlines():
            yield list(takewhile(not_redirected, shlex.split(line, comments=True)))
        for words in re.findall(r"`(make [^`]+|warmroute [a-z-]+ [^`]+|python -m loadtest [a-z]+ [^`]+)`", text):
            yield list(takewhile(not_redirected, shlex.split(words.replace("\\|", "|"))))


def not_redirected(word: str) -> bool:
    """Whether a word is the command's own."""
    return word not in (">", ">>")


def called_with_code(name: str) -> Iterator[tuple[int, str]]:
    """(status, code) of every call in the router that makes an error of ours: `Refusal(status, code, ...)` and others
    of that shape, `BadBody(code, ...)` as a 400, `Shed(code, ...)` as a 429."""
    statuses = {"BadBody": 400, "Shed": 429}
    for constants, calls in _calls():
        for node in calls:
            if _name(node.func) != name:
                continue
            values = [_choices(argument, constants) for argument in node.args[:2]]
            if name in statuses:
                yield from ((statuses[name], code) for code in values[0])
            elif len(values) > 1:
                yield from ((status, code) for status in values[0] for code in values[1])


@cache
def _calls() -> list[tuple[dict[str, Any], list[ast.Call]]]:
    """Of each source what it calls by a name of its own, and its calls."""
    trees = [ast.parse(source.read_text(encoding="utf-8")) for source in SOURCES]
    places = [source.relative_to(ROOT).with_suffix("").parts for source in SOURCES]
    own = {".".join(place): dict(_constants(tree)) for place, tree in zip(places, trees, strict=True)}
    return [
        (
            {name: own[module][name] for module, name in _imported(tree) if name in own.get(module, {})}
            | dict(_constants(tree)),
            [node for node in ast.walk(tree) if isinstance(node, ast.Call)],
        )
        for tree in trees
    ]


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """What a module takes from others by name: (module, name)."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


def _constants(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """What a module calls by a name of its own."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)):
                yield name, value


def _name(called: ast.expr) -> str:
    """Of a function, or of a method behind its dot."""
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


def _choices(node: ast.expr, constants: dict[str, Any]) -> list[Any]:
    """Constants that an expression may be: `404 if model else 400` is either; `error.code` none of ours."""
    if isinstance(node, ast.IfExp):
        return [*_choices(node.body, constants), *_choices(node.orelse, constants)]
    if isinstance(node, ast.Name) and node.id in constants:
        return [constants[node.id]]
    return [node.value] if isinstance(node, ast.Constant) else []


# Tables that are rendered


def test_rendered_tables_are_up_to_date() -> None:
    """README's tables of settings, metrics and policies are those that `python -m loadtest pages --tables`
    makes."""
    assert render.with_tables(README) == README, "run: python -m loadtest pages --tables"


def test_rendered_tables_of_the_race_are_up_to_date() -> None:
    """So are the tables of scenarios and rows in loadtest/README.md, with figures of workloads as they are made now."""
    page = (ROOT / render.PAGE).read_text(encoding="utf-8")
    assert render.with_tables(page, render.PAGE_TABLES) == page, "run: python -m loadtest pages --tables"
    for name in LADDERS:
        assert f"`{name}`" in page, name


def test_left_out_of_rules_names_rows() -> None:
    """Every row of which loadtest/README.md says what is left out is one that there is."""
    page = (ROOT / render.PAGE).read_text(encoding="utf-8")
    (told,) = re.findall(r"\| row \| what is left out \|\n((?:\|.*\n)+)", page)
    names = {name for row in table(told) for name in re.findall(r"`(\w+)`", row[0])}
    assert names <= ROWS.keys()
    assert len(names) >= 10


def test_every_setting_has_its_true_default(tmp_path: Path) -> None:
    """Settings that spell out every documented default are the defaults, and no setting is missing or unknown."""
    rows = {row[0].strip("`"): row for row in table(block("settings"))}
    tree: dict[str, Any] = {}
    for key, row in rows.items():
        part, _, name = key.rpartition(".")
        default = yaml.safe_load(re.findall(r"`([^`]*)`", row[1])[0])
        (tree.setdefault(part, {}) if part else tree)[name] = default
        assert len(row[2]) > 10, key
    file = tmp_path / "all.yaml"
    file.write_text(yaml.safe_dump(tree))

    assert rows.keys() == field_keys().keys()
    assert load(file) == Settings()


async def test_every_metric_is_in_the_table() -> None:
    """A router's own page has exactly the metrics of the table, with their types and no other labels."""
    documented = {row[0].strip("`"): row for row in table(block("metrics"))}
    async with App(Settings(replicas=("http://127.0.0.1:1",), listen=on_free_ports())) as app:
        app.hub.metrics.failed("http://127.0.0.1:1", "connect")
        families = list(app.hub.metrics.registry.collect())
    emitted = {f"{f.name}_total" if f.type == "counter" else f.name: f for f in families}

    assert emitted.keys() == documented.keys()
    for name, family in emitted.items():
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert documented[name][1] == family.type
        assert labels <= set(re.findall(r"`(\w+)`", documented[name][2])), name


def on_free_ports() -> Any:
    """Listeners on free ports."""
    return type(Settings().listen)(port=0, admin_port=0)


def test_no_document_names_a_metric_that_is_not() -> None:
    """Every `warmroute_...` name in any document is a metric in the table."""
    known = {row[0].strip("`") for row in table(block("metrics"))}
    for document in DOCUMENTS:
        named = set(re.findall(r"\bwarmroute_[a-z_]+\b", document.read_text(encoding="utf-8")))
        assert named <= known, document.name


def test_every_policy_is_in_the_table() -> None:
    """The table of policies has every row of POLICIES and no other, and says which look at caches."""
    rows = {row[0].strip("`"): row[1] for row in table(block("policies"))}
    assert rows == {name: "yes" if policy().cache_aware else "no" for name, policy in POLICIES.items()}


# Tables that are written


def test_every_path_is_in_the_table() -> None:
    """Every path that the router answers is in the table of endpoints."""
    endpoints = section("Endpoints")
    never_asked: Any = None
    pages = Pages(never_asked, never_asked, ready=bool, clock=float, decisions_max=1)
    own = [str(route.path) for route in pages.routes() if isinstance(route, web.RouteDef)]

    for path in [*PATHS, *Settings().api.passthrough, *own, "/v1/models", "/v1/responses/{id}"]:
        assert re.search(rf"(?<![\w/]){re.escape(path)}`", endpoints), path


def test_every_response_header_is_in_the_table() -> None:
    """Headers that proxy.py adds and headers in the table are the same."""
    emitted = set(re.findall(r'f"(x-[a-z-]+): \{', (ROOT / "router" / "edge" / "proxy.py").read_text()))
    documented = {row[0].strip("`") for row in table(section("Why did my request go there")) if row[0][:3] == "`x-"}
    assert emitted == documented
    assert len(emitted) >= 5


def test_every_reason_and_grade_is_explained() -> None:
    """Every value of x-warmroute-reason and x-warmroute-grade is in a table, and no other is."""
    names = {row[0].strip("`") for row in table(section("Why did my request go there"))}
    assert {name for name in names if not name.startswith("x-")} == {*Reason, *Grade}


def test_every_error_code_is_in_the_table() -> None:
    """The router's own errors, status and code, are exactly those in the table."""
    documented = {(int(row[0]), code) for row in table(section("Errors")) for code in re.findall(r"`(\w+)`", row[1])}
    made = {error for name in ("Refusal", "BadBody", "BadRequest", "Shed") for error in called_with_code(name)}
    assert made == documented


def test_every_error_of_a_stream_is_explained() -> None:
    """The codes of error events that streams end in are those in the table."""
    documented = {row[0].strip("`") for row in table(section("Endings of streams")) if re.fullmatch(r"`\w+`", row[0])}
    assert {code for _, code in called_with_code("error_event")} == documented


def test_every_error_of_the_admin_listener_is_in_the_table() -> None:
    """Its errors, status and code, are exactly those in the table."""
    rows = table(section("Admin listener"))
    documented = {(int(row[0]), code) for row in rows for code in re.findall(r"`(\w+)`", row[1])}
    assert documented == {*called_with_code("refused")}


def test_every_kind_of_failure_is_explained() -> None:
    """The kinds that failures are counted under are in a table where the metrics are, and no other is."""
    rows = section("Metrics").split("<!-- metrics:end -->")[1]
    kinds = {failure.kind for made in (Failure, BrokeMidway) for failure in descendants(made)}
    assert {row[0].strip("`") for row in table(rows) if row[0][0] == "`"} - {"kind"} == {*kinds, BrokeMidway.kind}


def descendants(made: type[Any]) -> Iterator[type[Any]]:
    """All classes that are made of this one."""
    for each in made.__subclasses__():
        yield each
        yield from descendants(each)


def test_every_room_is_on_the_map() -> None:
    """ARCHITECTURE.md names every room of the router and of its core, and the files beside them."""
    page = section("Floors", (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"))
    parts = {source.relative_to(ROOT / "router").with_suffix("").parts for source in SOURCES}
    rooms = {part[0] for part in parts} | {part[1] for part in parts if part[0] == "core"}
    for room in rooms - {"__init__"}:
        assert re.search(rf"^ *(.* \| )?{room}( \| \w+)?  ", page, re.MULTILINE), room


def test_every_reason_to_close_a_connection_is_explained() -> None:
    """All labels of `warmroute_connections_closed_total` are named where the limits are."""
    for reason in REASONS:
        assert f"`{reason}`" in section("Limits on clients"), reason


def test_every_promise_has_its_test() -> None:
    """Each row of SECURITY.md's promises names tests, and these are there: a module, and functions in it."""
    promises = (ROOT / "SECURITY.md").read_text(encoding="utf-8").split("## Promises\n")[1]
    rows = table(promises)
    for promise, kept_by in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)((?:::\w+)*)`", kept_by)
        assert named, promise
        for module, path in named:
            source = (ROOT / module).read_text(encoding="utf-8")
            for name in filter(None, path.split("::")):
                assert re.search(rf"^((async )?def|class) {name}\b|^{name} = ", source, re.MULTILINE), (
                    f"{module}::{name}"
                )
    assert len(rows) >= 30


# Commands, files and figures


def test_commands_parse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every `warmroute` and `python -m loadtest` command in the documents is one that the program accepts."""
    monkeypatch.chdir(tmp_path)
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    seen = 0
    for words in commands():
        if words[:1] == ["warmroute"] and words[1:2] == ["demo"]:
            demo._parser().parse_args(words[2:])
        elif words[:1] == ["warmroute"] and words[1:2] == ["serve"]:
            options = command._parser().parse_args(words[1:])
            assert {key.partition("=")[0] for key in options.set} <= field_keys().keys()
        elif words[:1] == ["warmroute"]:
            command._parser().parse_args(words[1:])
        elif words[:3] == ["python", "-m", "loadtest"]:
            assert words[3] in __main__.INSTRUMENTS
            if words[3] == "replay":
                replay._parser().parse_args(words[4:])
            elif words[3] == "simulate":
                simulate_options.parser().parse_args(words[4:])
            elif words[3] == "agree":
                agree._parser().parse_args(words[4:])
            elif words[3] == "faults":
                faults.parser().parse_args(words[4:])
            elif words[3] == "evidence":
                evidence.parser().parse_args(words[4:])
        elif words[:1] == ["make"]:
            assert {word for word in words[1:] if "=" not in word} <= targets, words
        else:
            continue
        seen += 1
    assert seen >= 10


def test_ci_asks_nothing_of_the_clock() -> None:
    """No stage judges a time, and a stage that is not there is refused with the names of those that are."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    commands_ = [line for line in script.splitlines() if re.search(r"\brun \w+ ", line)]
    assert not [line for line in commands_ if re.search(r"--check|--slack|evidence|figures", line)]
    assert all("--counts" in line for line in commands_ if "loadtest faults" in line)
    done = subprocess.run([ROOT / ".ci" / "run", "nothing"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    stages = done.stderr.partition(": ")[2].strip().split(", ")
    assert {"check", "test", "coverage", "faults", "engines"} <= set(stages)
    assert all(re.search(rf"^    {name}\)", script, re.MULTILINE) for name in stages)


def test_settings_file_loads(tmp_path: Path) -> None:
    """The settings file that README shows is one that the router takes, and so is the keys file, a list."""
    shown = code_blocks(README, "yaml")
    assert shown
    for number, text in enumerate(shown):
        file = tmp_path / f"{number}.yaml"
        file.write_text(text)
        if text.startswith("- "):
            assert len(Keys.load(file, isolate=False, receipts=False))
        else:
            load(file)


def test_python_compiles() -> None:
    """Python in the documents is Python."""
    for document in DOCUMENTS:
        for text in code_blocks(document.read_text(encoding="utf-8"), "python"):
            compile(text, document.name, "exec")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    """Every link to a file leads to one, and every file or folder named in code is there."""
    text = document.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("https://") or (document.parent / link).exists(), link
    for name in re.findall(r"`((?:router|loadtest|tests|core)/[\w/]+(?:\.py)?/?)`", text):
        assert (ROOT / name).exists() or (ROOT / "router" / name).exists(), name


def rows(hits: float, ttft_s: float) -> list[Row]:
    """A demo in which round robin has a hit rate of 0.2 and a p90 TTFT of 10 s, and warm these, everywhere."""
    figures = {"round_robin": (0.2, 10.0), "warm": (hits, ttft_s)}
    return [
        Row(workload=w.name, policy=policy, requests=w.requests, errors=0, token_hit_rate=rate, ttft_p90_s=ttft)
        for w in demo.WORKLOADS
        for policy, (rate, ttft) in figures.items()
    ]


@pytest.mark.parametrize(
    ("hits", "ttft_s", "broken"),
    [
        (0.6, 5.0, 0),
        (0.59, 5.0, 1),
        (0.6, 5.1, 1),
        (0.2, 10.0, 4),
    ],
)
def test_promise_of_the_demo(hits: float, ttft_s: float, broken: int, tmp_path: Path) -> None:
    """`--check` fails unless agents see 3 times the hits at half the p90 TTFT, and conversations better of both."""
    file = tmp_path / "demo.json"
    file.write_text(json.dumps(envelope("warmroute demo --exit", rows(hits, ttft_s))))
    assert len(render.broken_promises([json.loads(file.read_text())])) == broken
    assert render.main(["--check", str(file)]) == (1 if broken else 0)


def test_several_runs_are_a_median() -> None:
    """Of three runs each figure is the median of its own, and errors of all runs count."""
    runs = [{"rows": rows(hits, ttft_s)} for hits, ttft_s in ((0.6, 9.0), (0.9, 5.0), (0.7, 1.0))]
    warm = next(row for row in render.median_rows(runs) if (row.workload, row.policy) == ("agent", "warm"))
    assert (warm.token_hit_rate, warm.ttft_p90_s) == (0.7, 5.0)


def test_demo_figures_are_rendered(tmp_path: Path) -> None:
    """The demo's block is made from its JSON, can be made again, and is refused for a run of another length."""
    target, file = tmp_path / "README.md", tmp_path / "demo.json"
    target.write_text(README)
    file.write_text(json.dumps(envelope("warmroute demo --exit", rows(0.6, 5.0))))
    for _ in range(2):
        assert render.main([str(file), "--readme", str(target)]) == 0
        assert target.read_text().count("| agent | warm | ") == 1
    file.write_text(file.read_text().replace(f'"requests": {demo.AGENT.requests}', '"requests": 7'))

    assert render.main([str(file), "--readme", str(target)]) == 1


def test_demo_figures_are_of_this_demo() -> None:
    """README's figures were measured with the parameters that the demo has now."""
    shown = block("demo")
    for note in (demo.FIXED, *(workload.describe() for workload in demo.WORKLOADS)):
        assert note in shown, "run the demo and render README again, as CONTRIBUTING.md says"

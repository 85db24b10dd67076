"""Alerts: the chart's rules, evaluated by `promtool` over the metrics that were scraped from the router.

Rules compare with an hour ago, and a router on call has run for longer than a benchmark does. So the series begin with
a history: for HISTORY_S before the first scrape, counters grow at their mean rate of the quiet time, and gauges have
the value of the first scrape. A rule is evaluated at each scrape. An alert is `pending` once its condition holds; it
fires after the time that its rule gives.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from prometheus_client.parser import text_string_to_metric_families

RULES = Path(__file__).resolve().parents[3] / "helm" / "warmroute" / "files" / "rules.yaml"
SCRAPE_S = 15.0  # the chart's interval
HISTORY_S = 6_000.0
STARTED = "process_start_time_seconds"
TARGET = {"job": "warmroute", "namespace": "prod", "instance": "warmroute-0:8001"}
TIMEOUT_S = 300.0
GROWING = ("counter", "histogram", "summary")
_NAMES = re.compile(r"\b(?:warmroute_\w+|process_start_time_seconds)")
_STEP = re.compile(r'expr: "ALERTS", time: (\S+),\s+exp: nil\s+got: (.*)')
_ALERT = re.compile(r'\{__name__="ALERTS", (.*?)\} 1E\+00')
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_UNITS = {"h": 3_600.0, "m": 60.0, "s": 1.0, "ms": 0.001}

Key = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class Scrape:
    """All samples of one moment; no samples if the router did not answer."""

    at_s: float
    values: Mapping[Key, float]
    growing: frozenset[Key]
    """Series that are counters."""


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert at one scrape."""

    at_s: float
    name: str
    state: str
    labels: Mapping[str, str]
    fires_after: str

    def __str__(self) -> str:
        names = ", ".join(f"{name}={value}" for name, value in sorted(self.labels.items()) if name not in TARGET)
        return f"{self.name}{{{names}}} {self.state}, fires after {self.fires_after}"


async def scrape(session: aiohttp.ClientSession, admin_url: str, at_s: float) -> Scrape:
    """Scrape the metrics that the rules use."""
    try:
        async with session.get(f"{admin_url}/metrics") as response:
            text = await response.text()
    except (aiohttp.ClientError, TimeoutError):
        return Scrape(at_s, {}, frozenset())
    used = set(_NAMES.findall(RULES.read_text(encoding="utf-8")))
    values, growing = dict[Key, float](), set[Key]()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in used:
                key = sample.name, tuple(sorted(sample.labels.items()))
                values[key] = sample.value
                if family.type in GROWING:
                    growing.add(key)
    return Scrape(at_s, values, frozenset(growing))


def find_promtool() -> str | None:
    """Return the path of promtool, if it is installed."""
    return shutil.which("promtool")


async def evaluate(promtool: str, scrapes: Sequence[Scrape], quiet: int, folder: Path) -> list[Alert]:
    """Return the alerts at each scrape. The first `quiet` scrapes are of the quiet time. Raises RuntimeError."""
    past = round(HISTORY_S / SCRAPE_S)
    steps = range(past, past + len(scrapes))
    test = {
        "interval": f"{SCRAPE_S:g}s",
        "input_series": [{"series": series, "values": values} for series, values in _series(scrapes, quiet, past)],
        "promql_expr_test": [{"expr": "ALERTS", "eval_time": f"{step * SCRAPE_S:g}s"} for step in steps],
    }
    document = {"rule_files": [str(RULES)], "evaluation_interval": f"{SCRAPE_S:g}s", "tests": [test]}
    file = folder / "alerts.yaml"
    file.write_text(yaml.safe_dump(document), encoding="utf-8")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(promtool, "test", "rules", file, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    said = (out + err).decode()
    if "SUCCESS" not in said and "FAILED" not in said:
        raise RuntimeError(f"promtool: {said.strip()[:500]}")
    return _parse(said, scrapes, past)


def _series(scrapes: Sequence[Scrape], quiet: int, past: int) -> list[tuple[str, str]]:
    """Return each series with its values, in promtool's notation."""
    found = [(_name("up", ()), " ".join([f"1x{past - 1}", *("1" if each.values else "0" for each in scrapes)]))]
    calm = [each for each in scrapes[:quiet] if each.values]
    for key in {key for each in scrapes for key in each.values}:
        first, last = calm[0].values.get(key), calm[-1].values.get(key)
        grows = any(key in each.growing for each in scrapes)
        before, offset = f"_x{past}", 0.0
        if first is not None and last is not None:
            slope = (last - first) / max(1, len(calm) - 1) if grows else 0.0
            offset = max(0.0, slope * past - first) if grows else 0.0
            before = f"{first + offset - slope * past:.10g}+{slope:.10g}x{past - 1}"
        found.append((_name(*key), " ".join([before, *_values(key, scrapes, offset)])))
    return found


def _values(key: Key, scrapes: Sequence[Scrape], offset: float) -> list[str]:
    """Return the scraped values. Counters continue their history until the router is another process."""
    started: Key = (STARTED, ())
    born = scrapes[0].values.get(started)
    return [
        "_" if (value := each.values.get(key)) is None
        else f"{value + (offset if each.values.get(started) == born else 0.0):.10g}"
        for each in scrapes
    ]  # fmt: skip


def _name(name: str, labels: Sequence[tuple[str, str]]) -> str:
    escaped = ((key, value.replace("\\", "\\\\").replace('"', '\\"')) for key, value in [*labels, *TARGET.items()])
    inner = ", ".join(f'{key}="{value}"' for key, value in escaped)
    return f"{name}{{{inner}}}"


def _parse(said: str, scrapes: Sequence[Scrape], past: int) -> list[Alert]:
    after = _fires_after()
    found = []
    for step in _STEP.finditer(said):
        scraped = scrapes[round(_seconds(step[1]) / SCRAPE_S) - past]
        for each in _ALERT.finditer(step[2]):
            labels = dict(_LABEL.findall(each[1]))
            name, state = labels.pop("alertname"), labels.pop("alertstate")
            labels.pop("severity", None)
            found.append(Alert(scraped.at_s, name, state, labels, after[name]))
    return found


def _fires_after() -> dict[str, str]:
    groups: Any = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule["for"] for group in groups for rule in group["rules"] if "alert" in rule}


def _seconds(text: str) -> float:
    """Return the seconds of a time such as 1h40m15s."""
    return sum(float(number) * _UNITS[unit] for number, unit in re.findall(r"([\d.]+)(ms|h|m|s)", text))

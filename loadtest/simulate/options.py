"""Command line of `python -m loadtest simulate`: its flags, and an error message of one line for a wrong value."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, NoReturn

from loadtest.common import flags
from loadtest.common.answer_limits import FLAG, HELP, LimitsAction
from loadtest.fake_engine.zoo.members import MEMBERS
from loadtest.simulate.engine.cluster_spec import REPLICAS_MAX, Fault
from loadtest.simulate.results import pulls
from loadtest.simulate.results.baseline import SHIPPED
from loadtest.simulate.results.multi_router import VARIANTS
from loadtest.simulate.results.tiers import LINKS
from loadtest.simulate.scenarios.generated import STAGES
from loadtest.simulate.scenarios.registry import CLAIM_SEEDS, GROUPS, LOADS, TUNE_SEEDS

FAULTS = ("restart", "slow", "join")
GRADES = ("exact", "estimated", "none")
SEEDS = {"tune": TUNE_SEEDS, "claim": CLAIM_SEEDS}


class _Parser(argparse.ArgumentParser):
    """Parser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"simulate: {message}\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser of `python -m loadtest simulate`."""
    made = _Parser(
        prog="python -m loadtest simulate",
        description="Compare placement policies on workloads in virtual time.",
        epilog="All times, in flags and in results, are simulated seconds.",
    )
    add = made.add_argument
    add("--list", action="store_true", help="list scenarios, policies and calibrations")
    add("--race", action="store_true", help="run all scenarios at their loads, and check the requirements of warm")
    add("--sweep", action="store_true", help="run warm with other values of its constants")
    stages = "compare llm-d's ladder with published results; all or some stages"
    add("--ladder", nargs="*", type=_stage, metavar="QPS", help=stages)
    labels = "compare several connected routers with one router; all of " + ", ".join(
        f"{label!r}" for label in VARIANTS
    )
    add("--several", nargs="*", choices=VARIANTS, metavar="LABEL", help=f"{labels}, or some".replace("%", "%%"))
    text = "compare request classes with and without deadlines to first come, first served"
    add("--deadlines", action="store_true", help=text)
    add("--predictions", action="store_true", help="compare times of first tokens with predictions in receipts")
    text = "compare engine variants with their own metrics pages and with correct ones; all or some"
    add("--zoo", nargs="*", choices=MEMBERS, metavar="NAME", help=text)
    links = "prices of loads from a tier, by link speed; all of " + ", ".join(LINKS)
    add("--tiers", nargs="*", choices=LINKS, metavar="LINK", help=f"{links}, or some")
    links = "P2P KV transfers between replicas, by kind of link; all of " + ", ".join(pulls.LINKS)
    add("--pulls", nargs="*", choices=pulls.LINKS, metavar="LINK", help=f"{links}, or some")
    links = "disaggregated prefill, by kind of link: " + ", ".join(pulls.LINKS)
    add("--split", nargs="*", choices=pulls.LINKS, metavar="LINK", help=f"{links}; default: rdma")
    add("--scenario", nargs="+", default=[], metavar="NAME")
    groups = "the scenarios of a group: " + ", ".join(GROUPS)
    add("--group", nargs="+", choices=GROUPS, default=[], metavar="GROUP", help=groups)
    text = "trace file instead of scenarios, as for `python -m loadtest replay`"
    add("--trace", type=Path, metavar="FILE", help=text)
    add("--policy", nargs="+", default=[], metavar="NAME", help="default: all, upper bounds first")
    share = f"{', '.join(LOADS)}, or a fraction of the sustained load"
    add("--load", nargs="+", default=[], type=_load, metavar="LOAD", help=share)
    add("--seed", "--seeds", nargs="+", action=_Seeds, default=[], metavar="N", help="6, 6-15, tune or claim")
    add("--requests", type=flags.integer(1), metavar="N", help="only N requests of a workload, after its warm-up")
    replicas = flags.integer(1, REPLICAS_MAX)
    add("--replicas", type=replicas, metavar="N", help=f"1 to {REPLICAS_MAX}; loads do not change")
    add("--calibration", metavar="NAME", help="calibration of all replicas")
    add("--kv-tokens", type=flags.integer(1), metavar="N", help="tokens of a replica's KV cache")
    add("--routers", type=flags.integer(1), metavar="N", help="number of independent routers, used in turns")
    text = "connected routers with a message delay of S"
    add("--share", dest="share_delay_s", type=flags.number(), metavar="S", help=text)
    cut = "disconnect the first router from the others at AT for LASTS"
    add("--share-partition", type=_partition, metavar="AT:LASTS", help=cut)
    add("--grade", choices=GRADES, help="cache state of routers: from KV events, from forwarded requests, or none")
    text = "answers do not pass the routers, as with a gateway's picker"
    add("--unseen", action="store_const", const=True, help=text)
    text = "routers ignore storage tiers outside the GPU"
    add("--no-tiers", dest="tier_told", action="store_const", const=False, help=text)
    add(FLAG, nargs="+", action=LimitsAction, metavar="N", help=HELP)
    add("--event-delay-s", type=flags.number(), metavar="S", help="delay of KV events")
    add("--event-loss", type=flags.number(1), metavar="P", help="probability of a lost batch of KV events")
    add("--probe-interval-s", type=flags.positive(), metavar="S")
    fault_help = "restart, slow or join, such as slow@30:2:60:4 (at 30 s, replica 2, for 60 s, 4 times as slow)"
    add("--fault", action="append", default=[], type=_fault, metavar="KIND@S:REPLICA", help=fault_help)
    add("--jobs", type=flags.integer(1), default=os.cpu_count() or 1, metavar="N", help="processes; default: all cores")
    add("--rows", nargs="+", default=[], type=Path, metavar="FILE", help="include rows from the JSON of earlier runs")
    add("--no-run", action="store_true", help="only report --rows, without runs")
    add("--missing", action="store_true", help="run only cases that are not in --rows")
    add("--json", type=Path, metavar="FILE", help="write all rows, rows over seeds, and claims as JSON")
    add("--svg", type=Path, metavar="FILE", help="draw hit rate against TTFT, and TTFT over load")
    text = "baseline of an earlier warm; default: the shipped one"
    add("--baseline", type=Path, default=SHIPPED, metavar="FILE", help=text)
    add("--save-baseline", type=Path, metavar="FILE", help="write a baseline from the rows of warm, without checks")
    add("--check", action="store_true", help="exit with 1 unless warm meets all requirements")
    return made


class _Seeds(argparse.Action):
    """Seeds in any number: `6`, `6-15`, `tune` and `claim`."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any) -> None:  # noqa: ANN401 - argparse's
        try:
            seeds = [seed for text in values for seed in seeds_of(text)]
        except ValueError:
            parser.error(f"--seed {' '.join(values)}: not a number, a range such as 6-15, tune or claim")
        setattr(namespace, self.dest, list(dict.fromkeys(seeds)))


def seeds_of(text: str) -> list[int]:
    """Return the seeds of a name in SEEDS, or from one number to another as in `6-8`. Raises ValueError."""
    if text in SEEDS:
        return list(SEEDS[text])
    first, dash, last = text.partition("-")
    found = list(range(int(first), int(last if dash else first) + 1))
    if not found:
        raise ValueError(text)
    return found


def _load(text: str) -> str:
    if text not in LOADS:
        try:
            flags.positive()(text)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not {', '.join(LOADS)} or a number above 0") from error
    return text


def _stage(text: str) -> tuple[int, int]:
    stages = {str(rate): (rate, lasts_s) for rate, lasts_s in STAGES}
    if text not in stages:
        raise argparse.ArgumentTypeError(f"{text!r} is not a stage: must be one of {', '.join(stages)}")
    return stages[text]


def _partition(text: str) -> tuple[float, float]:
    at, colon, lasts = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r} is not AT:LASTS in seconds")
    return flags.number()(at), flags.positive()(lasts)


def _fault(text: str) -> Fault:
    kind, at, where = text.partition("@")
    fields = where.split(":")
    if kind not in FAULTS or not at or not 2 <= len(fields) <= 4:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not KIND@SECONDS:REPLICA[:LASTS[:FACTOR]] with {', '.join(FAULTS)} for KIND"
        )
    at_s, replica = flags.number()(fields[0]), flags.integer(0, REPLICAS_MAX - 1)(fields[1])
    more = dict(zip(("lasts_s", "factor"), map(flags.positive(), fields[2:]), strict=False))
    return Fault(kind, at_s, replica, **more)

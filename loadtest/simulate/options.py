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
        description="Race placement policies over workloads in virtual time.",
        epilog="All times, in flags and in results, are simulated seconds.",
    )
    add = made.add_argument
    add("--list", action="store_true", help="say what scenarios, policies and calibrations there are")
    add("--race", action="store_true", help="all scenarios at their loads, judged by what must be seen of warm")
    add("--sweep", action="store_true", help="warm under other values of its constants")
    stages = "llm-d's ladder beside what was published; all stages or some"
    add("--ladder", nargs="*", type=_stage, metavar="QPS", help=stages)
    labels = "several routers that share, beside one; all of " + ", ".join(f"{label!r}" for label in VARIANTS)
    add("--several", nargs="*", choices=VARIANTS, metavar="LABEL", help=f"{labels}, or some".replace("%", "%%"))
    add("--deadlines", action="store_true", help="classes of requests, with deadlines and without, beside first come")
    add("--predictions", action="store_true", help="first tokens against what receipts foretold")
    text = "engines of the zoo, each with its own metrics pages and with right ones; all, or some"
    add("--zoo", nargs="*", choices=MEMBERS, metavar="NAME", help=text)
    links = "prices of a load from a tier, on links of several speeds; all of " + ", ".join(LINKS)
    add("--tiers", nargs="*", choices=LINKS, metavar="LINK", help=f"{links}, or some")
    links = "pulls between replicas, on links of several kinds; all of " + ", ".join(pulls.LINKS)
    add("--pulls", nargs="*", choices=pulls.LINKS, metavar="LINK", help=f"{links}, or some")
    links = "one replica prefills, another one decodes, on links of a kind or several: " + ", ".join(pulls.LINKS)
    add("--split", nargs="*", choices=pulls.LINKS, metavar="LINK", help=f"{links}; default: rdma")
    add("--scenario", nargs="+", default=[], metavar="NAME")
    groups = "the scenarios of a group: " + ", ".join(GROUPS)
    add("--group", nargs="+", choices=GROUPS, default=[], metavar="GROUP", help=groups)
    add("--trace", type=Path, metavar="FILE", help="a trace file instead, as for `python -m loadtest replay`")
    add("--policy", nargs="+", default=[], metavar="NAME", help="default: all, upper bounds first")
    share = f"{', '.join(LOADS)}, or a share of what is sustained"
    add("--load", nargs="+", default=[], type=_load, metavar="LOAD", help=share)
    add("--seed", "--seeds", nargs="+", action=_Seeds, default=[], metavar="N", help="6, 6-15, tune or claim")
    add("--requests", type=flags.integer(1), metavar="N", help="only N of a workload, after its warm-up")
    replicas = flags.integer(1, REPLICAS_MAX)
    add("--replicas", type=replicas, metavar="N", help=f"1 to {REPLICAS_MAX}; loads stay as they are")
    add("--calibration", metavar="NAME", help="of all replicas")
    add("--kv-tokens", type=flags.integer(1), metavar="N", help="what a replica's KV cache holds")
    add("--routers", type=flags.integer(1), metavar="N", help="independent routers in front, asked by turns")
    add("--share", dest="share_delay_s", type=flags.number(), metavar="S", help="they tell each other, S late")
    add("--share-loss", type=flags.number(1), metavar="P", help="chance that a message between them is lost")
    cut = "from AT on the first router is cut off from the others for LASTS"
    add("--share-partition", type=_partition, metavar="AT:LASTS", help=cut)
    add("--grade", choices=GRADES, help="what routers know of caches: by events, by what they sent, nothing")
    add("--unseen", action="store_const", const=True, help="answers go past the routers, as past a gateway's picker")
    text = "routers take no note of what is behind the replicas' GPUs"
    add("--no-tiers", dest="tier_told", action="store_const", const=False, help=text)
    add(FLAG, nargs="+", action=LimitsAction, metavar="N", help=HELP)
    add("--event-delay-s", type=flags.number(), metavar="S", help="of KV events on their way")
    add("--event-loss", type=flags.number(1), metavar="P", help="chance that a batch of KV events is lost")
    add("--probe-interval-s", type=flags.positive(), metavar="S")
    fault_help = "restart, slow or join, such as slow@30:2:60:4 (at 30 s, replica 2, for 60 s, 4 times as slow)"
    add("--fault", action="append", default=[], type=_fault, metavar="KIND@S:REPLICA", help=fault_help)
    add(
        "--jobs",
        type=flags.integer(1),
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes; default: all cores",
    )
    add("--rows", nargs="+", default=[], type=Path, metavar="FILE", help="take in rows of earlier runs' JSON")
    add("--no-run", action="store_true", help="run nothing: only report --rows")
    add("--missing", action="store_true", help="run only what --rows do not have")
    add("--json", type=Path, metavar="FILE", help="write all rows, those over seeds, and the claims")
    add("--svg", type=Path, metavar="FILE", help="draw hit rate against TTFT, and TTFT over load")
    add("--baseline", type=Path, default=SHIPPED, metavar="FILE", help="an earlier warm, default: the one shipped")
    add("--save-baseline", type=Path, metavar="FILE", help="write such a file from the rows of warm, and judge nothing")
    add("--check", action="store_true", help="exit 1 unless all that must be seen of warm is seen")
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
            raise argparse.ArgumentTypeError(f"{text!r} is not {', '.join(LOADS)} or a number over 0") from error
    return text


def _stage(text: str) -> tuple[int, int]:
    stages = {str(rate): (rate, lasts_s) for rate, lasts_s in STAGES}
    if text not in stages:
        raise argparse.ArgumentTypeError(f"{text!r} is not a stage: there are {', '.join(stages)}")
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

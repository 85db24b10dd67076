"""`python -m tests.attack`: every target for a minute, for a minute by the clock, then 100,000 random cuts.

Exits 1 if anything was found. `--clock` runs the search for slow inputs alone, on native code if there is some;
`--coverage` prints the lines of the parsers that the attacks reach.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import random
import re
import subprocess
import sys
from pathlib import Path

from tests.attack import clock, cuts, reach
from tests.attack.drive import FOLDER, ROOT, Finding, broken, drive, for_seconds, replay_line
from tests.attack.target import Target
from tests.attack.targets import TARGETS

SECONDS = 60
CUTS = 100_000
SLACK_S = 600  # longer than the time that was asked for, a fuzzer hangs
CALL_S = 120  # likewise the search by the clock, of which no call should take a second


def attack(target: Target, seconds: int, seed: int, *, guided: bool) -> str:
    """One target; what was found, or ""."""
    if not guided:
        attacks, finding = drive(target, seed, for_seconds(seconds))
        print(f"{target.name}: {attacks} attacks, {'broken' if finding else 'nothing'}", flush=True)
        return finding.told() if finding else ""
    command = [sys.executable, "-m", "tests.attack.guided", target.name, str(seconds)]
    before = set((FOLDER / "findings").glob(f"{target.name}-*"))
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=seconds + SLACK_S,
    )
    units = re.search(r"number_of_executed_units:\s*(\d+)", done.stdout)
    attacks = units[1] if units is not None else "?"
    ended = f"broken (status {done.returncode})" if done.returncode else "nothing"
    print(f"{target.name}: {attacks} attacks, {ended}", flush=True)
    if not done.returncode:
        return ""
    files = sorted(set((FOLDER / "findings").glob(f"{target.name}-*")) - before)
    return "\n".join([done.stdout[-4_000:], *map(replay_line, files)])


def hurried(target: Target, seconds: int, seed: int) -> str:
    """One target by the clock, in a process of its own with native code; what was found, or ""."""
    native = os.pathsep.join((str(ROOT / ".compiled"), str(ROOT)))
    command = [sys.executable, "-m", "tests.attack.clock", target.name, str(seconds), str(seed)]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=seconds + CALL_S,
            env=os.environ | {"PYTHONPATH": native, "PYTHONSAFEPATH": "1"},
        )
    except subprocess.TimeoutExpired:
        return f"{target.name}: a call took over {CALL_S} s; its recipe is {FOLDER.name}/{clock.RUNNING}"
    print(done.stdout.partition("\n")[0], flush=True)
    return done.stdout.partition("\n")[2] or done.stdout if done.returncode else ""


def replay(file: Path) -> str:
    """One input again, its cost judged; what it breaks, or ""."""
    if file.suffix == ".json" and (file.parent.name == "findings" or file.parent.parent.name == "grown"):
        slow = clock.replayed(
            TARGETS[file.parent.name if file.parent.name in TARGETS else file.name.partition("-")[0]], file
        )
        return "\n".join(each.told() for each in slow)
    target = TARGETS[file.name.partition("-")[0]] if file.parent.name not in TARGETS else TARGETS[file.parent.name]
    error = broken(target, file.read_bytes(), metered=True)
    if error is None:
        print(f"{target.name}: the parser holds against {file}")
        return ""
    return Finding(target, file.read_bytes(), error).told()


def told(found: str) -> str:
    """The same, printed at once."""
    if found:
        print(found, flush=True)
    return found


def main() -> int:
    """The exit status."""
    options = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    options.add_argument("targets", nargs="*", metavar="TARGET", help="targets, and `cuts`; all unless given")
    options.add_argument("--seconds", type=int, default=SECONDS, help="seconds for each target (default: %(default)s)")
    options.add_argument("--cuts", type=int, default=CUTS, help="messages cut at random (default: %(default)s)")
    options.add_argument("--seed", type=int, default=None, help="begin of the random numbers; random unless given")
    options.add_argument("--plain", action="store_true", help="mutate seeds blindly, also where Atheris is installed")
    options.add_argument("--clock", action="store_true", help="only search for inputs that take too long")
    options.add_argument("--coverage", action="store_true", help="only say which lines of the parsers attacks reach")
    options.add_argument(
        "--keep", action="store_true", help="with --coverage: inputs that reach new lines become seeds"
    )
    options.add_argument("--replay", type=Path, metavar="FILE", help="run one input again")
    options.add_argument("--cut", nargs=2, metavar=("SEED", "NUMBER"), help="cut one message again")
    options.add_argument("--list", action="store_true", help="name the targets")
    given = options.parse_args()
    logging.disable()
    if given.list:
        print(*TARGETS, "cuts", sep="\n")
        return 0
    if given.cut is not None:
        cuts.once(random.Random(" ".join(given.cut)))
        return 0
    if given.replay is not None:
        found = [told(replay(given.replay))]
    else:
        unknown = set(given.targets) - {*TARGETS, "cuts"}
        if unknown:
            options.error(f"no target is named {', '.join(sorted(unknown))}; --list names all")
        if given.coverage:
            return reach.main(given.targets, given.seconds, given.seed or 0, keeps=given.keep)
        found = run(given)
    return 1 if any(found) else 0


def run(given: argparse.Namespace) -> list[str]:
    """All targets that are wanted, and the cuts; what was found."""
    seed = random.randrange(1 << 32) if given.seed is None else given.seed
    guided = not given.plain and importlib.util.find_spec("atheris") is not None
    how = "Atheris" if guided else "blind mutation (pip install -e '.[attack]' brings Atheris)"
    print(f"{how}, seed {seed}", flush=True)
    wanted = [target for name, target in TARGETS.items() if name in (given.targets or TARGETS)]
    found = [] if given.clock else [told(attack(target, given.seconds, seed, guided=guided)) for target in wanted]
    found += [told(hurried(target, given.seconds, seed)) for target in wanted]
    if not given.clock and (not given.targets or "cuts" in given.targets):
        found.append(told(cuts.many(seed, given.cuts)))
    return found


if __name__ == "__main__":
    sys.exit(main())

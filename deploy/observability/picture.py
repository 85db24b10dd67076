"""`python -m deploy.observability.picture`: the overview dashboard as a picture, from data of a real Prometheus.

Starts simulated replicas, the router, and Prometheus. It plays agents' sessions through round robin, then through warm,
each in front of separate replicas with empty caches. If sessions still run KILL_AFTER_S later, it kills a replica.
Needs Prometheus (its package) and matplotlib (`make test-k8s` has it in .venv-k8s). Takes about two minutes of an
otherwise idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from deploy.observability.scene import Scene, SceneError, routing, scene

REPO = Path(__file__).resolve().parents[2]
PYTHON = REPO / ".venv-k8s" / "bin" / "python"
BOARD = REPO / "helm" / "warmroute" / "files" / "dashboards" / "overview.json"
PICTURE = REPO / "docs" / "operate" / "overview.png"
REPLICAS, SESSIONS, TIME_SCALE = 4, 12, 5.0
SETTLE_S, KILL_AFTER_S = 8.0, 75.0
ROOMY = {"queue_requests_max": 1_000, "in_flight_max": 64}
CAPTION = (
    f"{REPLICAS} simulated replicas of Qwen3-32B on 2 x H100 at {TIME_SCALE:g} times life's speed, with KV events;"
    f" {SESSIONS} agents' sessions of a published trace at a time."
    " Drawn from what Prometheus scraped by deploy/observability/picture.py."
)


async def gather(folder: Path, requests: int) -> dict[str, Any]:
    """Run the scenes, and return the data of the dashboard's panels."""
    board: dict[str, Any] = json.loads(BOARD.read_text(encoding="utf-8"))
    async with scene(folder, replicas=2 * REPLICAS, time_scale=TIME_SCALE) as it:
        begun_s, marks = time.time(), []
        it.replicas, fresh = it.replicas[:REPLICAS], it.replicas[REPLICAS:]
        async with routing(it, "round_robin", **ROOMY):
            marks.append((time.time(), "round robin"))
            await it.replay(requests, SESSIONS)
        it.replicas = fresh
        async with routing(it, "warm", **ROOMY):
            marks.append((time.time(), "warm, with fresh replicas"))
            warm = asyncio.create_task(it.replay(3 * requests, SESSIONS))
            await trouble(it, warm, marks)
            await warm
            end_s = time.time()
            await asyncio.sleep(SETTLE_S)
            for panel in board["panels"]:
                asked = [target["expr"] for target in panel.get("targets", ())]
                panel["answers"] = [await it.query(expr, begun_s, end_s) for expr in asked]
    board["marks"] = [((at_s - begun_s) / 60, text) for at_s, text in marks]
    return board | {"begun_s": begun_s, "minutes": (end_s - begun_s) / 60, "caption": CAPTION}


async def trouble(it: Scene, load: asyncio.Task[Any], marks: list[tuple[float, str]]) -> None:
    """Kill a replica while sessions run."""
    await asyncio.wait({load}, timeout=KILL_AFTER_S)
    if not load.done():
        marks.append((time.time(), "a replica ends"))
        await it.kill(it.replicas[0])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 if something that it needs is missing."""
    parser = argparse.ArgumentParser(prog="python -m deploy.observability.picture", description=__doc__)
    parser.add_argument("--requests", type=int, default=100, help="of round robin; warm gets three times as many")
    parser.add_argument("--out", type=Path, default=PICTURE)
    parser.add_argument("--data", type=Path, help="also write the data of the chart to this file")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        try:
            data = uvloop.run(gather(Path(folder), options.requests))
        except SceneError as error:
            print(f"picture: {error}", file=sys.stderr)
            return 1
        file = options.data or Path(folder) / "data.json"
        file.write_text(json.dumps(data), encoding="utf-8")
        return subprocess.run(
            [PYTHON, Path(__file__).with_name("drawing.py"), file, options.out], check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())

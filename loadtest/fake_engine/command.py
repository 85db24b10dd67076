"""`python -m loadtest engine`: N simulated replicas with vLLM's HTTP and KV events in one process.

Each replica is an engine model (`model.py`) stepped in real time (`replica.py`) behind vLLM's routes (`http.py`). All
run on one event loop, and listen on loopback by default.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from aiohttp import web

from loadtest.common import flags
from loadtest.fake_engine.calibration import CALIBRATION, CALIBRATIONS, Calibration
from loadtest.fake_engine.disagg_http import Link, bootstrap, link
from loadtest.fake_engine.host_tier import TierLimits
from loadtest.fake_engine.http import FakeEngineApp
from loadtest.fake_engine.model import EngineModel
from loadtest.fake_engine.peers import PeerLimits, Peers
from loadtest.fake_engine.replica import SimulatedReplica
from loadtest.fake_engine.step import Limits
from loadtest.fake_engine.zoo.member import DENSE, Member
from loadtest.fake_engine.zoo.members import MEMBERS
from router.core.types.disagg_types import KvConnector, Role

if TYPE_CHECKING:
    from loadtest.fake_engine.kv_publisher import KvPublisher

REPLICAS_MAX = 256
COUNT_MAX = 1 << 40  # the largest number of tokens, sequences and blocks
ZMTP_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
TAKEN_OVER = ("replicas", "host", "port", "model", "time_scale", "tell_ttft", "prefills", "bootstrap_port")
"""Options that are settings of the same name."""
SHUTDOWN_S = 0.01
"""Nearly at once; aiohttp treats 0 as no limit."""


@dataclass(frozen=True, slots=True)
class KvEventsSettings:
    """Ports of the first replica; the next ones follow. 0: free ports."""

    port: int = 5557
    replay_port: int = 6557
    topic: str = ""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of one process of simulated replicas; `port` 0 takes free ports."""

    replicas: int = 4
    host: str = "127.0.0.1"
    port: int = 9100
    model: str = "sim"
    calibration: Calibration = CALIBRATIONS[CALIBRATION]
    kv_tokens: int | None = None
    """KV tokens of a replica. None: the calibration's."""
    limits: Limits = field(default_factory=Limits)
    tier: TierLimits | None = None
    """CPU memory tier of each replica. None: no tier."""
    peers: PeerLimits | None = None
    """Link between two replicas. None: no P2P KV transfer, and default transfer times for disaggregated prefill."""
    p2p_port: int = 0
    """Port at which the first replica accepts its peers' P2P requests; the next ones follow. 0: free ports."""
    handshake: KvConnector | None = None
    """KV connector between the prefill and the decode replica. None: no disaggregated prefill."""
    prefills: int = 0
    """Number of SGLang prefill servers, the first of the replicas; the others are decode servers."""
    bootstrap_port: int = 0
    """Port at which decode replicas contact the first replica (Mooncake, SGLang); the next ones follow. 0: free
    ports."""
    time_scale: float = 1.0
    tick_s: float = 0.005
    kv_events: KvEventsSettings | None = None
    member: Member = DENSE
    """Kind of engine of all replicas."""
    tell_ttft: bool = False
    """If true, `usage` has `ttft_s`, which vLLM's lacks: simulated seconds from receipt of the request to the first
    token."""


class Engines:
    """Running replicas. `urls`, `replicas` and `addresses` (for peers) are in order of the replicas.

    Use `async with`, or `start` and `stop`; `stop` ends everything that `start` began.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.urls: list[str] = []
        self.replicas: list[SimulatedReplica] = []
        self.addresses: list[str] = []
        self.surfaces: list[FakeEngineApp] = []
        self.links: list[Link] = []  # in order; empty without a KV connector
        self._directory: dict[str, Link] = {}
        self._crashes: set[asyncio.Task[None]] = set()
        pulls = settings.handshake in (None, KvConnector.OFFLOADING)  # the other connectors have no p2p tier
        self.peers = Peers(settings.peers) if settings.peers is not None and pulls else None
        self._listeners: list[asyncio.Server] = []
        self._settings = replace(settings, limits=settings.member.limits(settings.limits))
        self._runners: list[web.AppRunner] = []
        self._surfaces: list[web.AppRunner] = []  # of these, the replicas' own
        self.publishers: list[KvPublisher] = []  # in order; empty without KV events

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen on all ports. Raises `OSError` (including zmq's) and leaves no port open on failure."""
        try:
            for index in range(self._settings.replicas):
                await self._start_one(index)
        except BaseException:
            await self.stop()
            raise

    async def _start_one(self, index: int) -> None:
        settings = self._settings
        publisher = self._publisher(index)
        address = await self._take_orders(index) if self.peers is not None else ""
        model = EngineModel(
            settings.calibration.times,
            settings.kv_tokens or settings.calibration.kv_tokens,
            settings.limits,
            record_events=publisher is not None,
            tier=settings.tier,
            peers=self.peers,
            name=address,
            legs=settings.handshake is not None and settings.tier is None,
        )
        replica = SimulatedReplica(
            model,
            time_scale=settings.time_scale,
            tick_s=settings.tick_s,
            on_events=publisher.publish if publisher else None,
        )
        self.replicas.append(replica)
        sources = publisher.sources() if publisher else {}
        link = await self._link(index, replica) if settings.handshake is not None else None
        surface = FakeEngineApp(
            replica, settings.model, sources, tell_ttft=settings.tell_ttft, link=link, member=settings.member
        )
        self.surfaces.append(surface)
        runner = web.AppRunner(
            surface.application(), access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S
        )
        self._runners.append(runner)
        self._surfaces.append(runner)
        await runner.setup()
        await web.TCPSite(runner, settings.host, settings.port + index if settings.port else 0).start()
        port = runner.addresses[0][1]
        self.urls.append(f"http://{settings.host}:{port}")

    async def _link(self, index: int, replica: SimulatedReplica) -> Link:
        """Return the replica's side of the KV connector, and start the listener at which its peers contact it."""
        settings = self._settings
        handshake = settings.handshake or KvConnector.NIXL
        role = Role.BOTH
        if handshake is KvConnector.SGLANG:
            role = Role.PREFILL if index < settings.prefills else Role.DECODE
        made = link(
            handshake,
            role,
            self._directory,
            clock=lambda: time.monotonic() * replica.time_scale,
            crash=lambda: self._crash(index),
            limits=settings.peers,
        )
        self.links.append(made)
        if handshake is KvConnector.OFFLOADING and self.peers is None:
            await self._take_orders(index)
        elif handshake in (KvConnector.MOONCAKE, KvConnector.SGLANG):
            runner = web.AppRunner(bootstrap(made), access_log=None, shutdown_timeout=SHUTDOWN_S)
            self._runners.append(runner)
            await runner.setup()
            port = settings.bootstrap_port + index if settings.bootstrap_port else 0
            await web.TCPSite(runner, settings.host, port).start()
            self.addresses.append(f"{settings.host}:{runner.addresses[0][1]}")
        if self.addresses:
            self._directory[self.addresses[-1]] = made
        return made

    def _crash(self, index: int) -> None:
        """End a replica like a process exit: its listener and all connections are closed."""
        task = asyncio.get_running_loop().create_task(self.kill(index))
        self._crashes.add(task)
        task.add_done_callback(self._crashes.discard)

    async def kill(self, index: int) -> None:
        """Close a replica's listener and all connections, which looks like `kill -9` from outside."""
        if self.links:
            self.links[index].gone = True
        self.replicas[index].stop()
        await self._surfaces[index].cleanup()

    async def _take_orders(self, index: int) -> str:
        """Listen for peers, with only the ZeroMQ greeting that a router checks. Returns the address."""
        settings = self._settings
        port = settings.p2p_port + index if settings.p2p_port else 0
        listener = await asyncio.start_server(_greet, settings.host, port)
        self._listeners.append(listener)
        self.addresses.append(f"{settings.host}:{listener.sockets[0].getsockname()[1]}")
        return self.addresses[-1]

    def _publisher(self, index: int) -> KvPublisher | None:
        events = self._settings.kv_events
        if events is None:
            return None
        from loadtest.fake_engine.kv_publisher import KvPublisher  # only events need pyzmq

        publisher = KvPublisher(
            self._settings.limits.block_tokens,
            port=events.port + index if events.port else 0,
            replay_port=events.replay_port + index if events.replay_port else 0,
            host=self._settings.host,
            topic=events.topic,
            member=self._settings.member,
        )
        publisher.start()
        self.publishers.append(publisher)
        return publisher

    async def stop(self) -> None:
        """Stop at once; open requests are cut off."""
        for replica in self.replicas:
            replica.stop()
        for listener in self._listeners:
            listener.close()
        for runner in self._runners:
            await runner.cleanup()
        for publisher in self.publishers:
            await publisher.stop()


async def _greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(ZMTP_SIGNATURE)
    writer.close()


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser; its defaults are those of `EngineSettings`."""
    defaults, limits, events = EngineSettings(), Limits(), KvEventsSettings()
    whole, port = flags.integer(1, COUNT_MAX), flags.integer(0, 65_535)
    command = argparse.ArgumentParser(
        prog="python -m loadtest engine",
        description="Simulated LLM replicas with vLLM's HTTP surface and KV events. Prints one line `ready URL` "
        "per replica when all listen; SIGTERM or SIGINT stops immediately. All model times are simulated seconds: wall "
        "time is simulated time / --time-scale.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = command.add_argument
    text = "number of replicas, each with a separate port"
    add("--replicas", type=flags.integer(1, REPLICAS_MAX), default=defaults.replicas, help=text)
    add("--host", default=defaults.host, help="address to listen on")
    add("--port", type=port, default=defaults.port, help="port of the first replica; 0: free ports")
    text = "kind of engine; without a name or with an unknown name, prints all"
    add("--like", metavar="NAME", nargs="?", const="", default=DENSE.name, help=text)
    add("--model", default=defaults.model, help="served model name")
    add("--calibration", choices=sorted(CALIBRATIONS), default=CALIBRATION, help="calibration of step times")
    add("--kv-tokens", type=whole, default=argparse.SUPPRESS, help="tokens of a KV cache; else from the calibration")
    tier = TierLimits(0)
    text = "tokens of each replica's CPU memory tier (vLLM's OffloadingConnector); else none"
    add("--cpu-tier-tokens", type=whole, default=argparse.SUPPRESS, help=text)
    text = "time to load a token from the tier, in microseconds"
    add("--load-us-per-token", type=flags.positive(), default=tier.token_s * 1e6, help=text)
    text = "minimum time of a load, in milliseconds"
    add("--load-floor-ms", type=flags.number(), default=tier.floor_s * 1e3, help=text)
    text = "port of the first replica for P2P KV transfers between CPU memories, on request (vLLM's p2p tier)"
    add("--p2p-port", type=port, default=argparse.SUPPRESS, help=f"{text}; 0: free ports")
    peers = PeerLimits()
    text = "time to pull a token, in microseconds"
    add("--pull-us-per-token", type=flags.positive(), default=peers.token_s * 1e6, help=text)
    text = "minimum time of a pull, in milliseconds"
    add("--pull-floor-ms", type=flags.number(), default=peers.floor_s * 1e3, help=text)
    text = "KV connector for disaggregated prefill; else none"
    add("--handshake", choices=[each.value for each in KvConnector], default=argparse.SUPPRESS, help=text)
    text = "with --handshake sglang: number of prefill servers; the other replicas are decode servers"
    add("--prefills", type=flags.integer(0, REPLICAS_MAX), default=defaults.prefills, help=text)
    text = "with --handshake mooncake or sglang: bootstrap port of the first replica; 0: free ports"
    add("--bootstrap-port", type=port, default=defaults.bootstrap_port, help=text)
    add("--block-size", type=whole, default=limits.block_tokens, help="tokens in a KV block")
    longest, text = flags.integer(2, COUNT_MAX), "maximum length of prompt and answer; else from the calibration"
    add("--max-model-len", type=longest, default=argparse.SUPPRESS, help=text)
    add("--max-num-batched-tokens", type=whole, default=limits.batched_tokens_max, help="tokens in one step")
    add("--max-num-seqs", type=whole, default=limits.sequences_max, help="requests in one batch")
    add("--time-scale", type=flags.positive(), default=defaults.time_scale, help="simulated seconds per wall second")
    text = "interval of SSE events in wall milliseconds"
    add("--tick-ms", type=flags.positive(), default=defaults.tick_s * 1e3, help=text)
    add("--kv-events", action="store_true", help="publish KV events over ZMQ")
    add("--kv-events-port", type=port, default=events.port, help="port of the first replica; 0: free ports")
    text = "replay port of the first replica; 0: free ports"
    add("--kv-replay-port", type=port, default=events.replay_port, help=text)
    add("--kv-events-topic", default=events.topic, help="first frame of every batch")
    add("--tell-ttft", action="store_true", help="report ttft_s of the engine in usage, in simulated seconds")
    return command


def settings(argv: Sequence[str]) -> EngineSettings:
    """Return the settings of a command line; exits as argparse does on an error."""
    command = parser()
    args = command.parse_args(argv)
    if args.like not in MEMBERS:
        kinds = "\n".join(f"  {member.name:18} {member.text}" for member in MEMBERS.values())
        command.exit(2, f"unknown kind of engine '{args.like}'; available kinds:\n{kinds}\n")
    calibration = CALIBRATIONS[args.calibration]
    limits = Limits(
        args.block_size,
        args.max_num_batched_tokens,
        args.max_num_seqs,
        getattr(args, "max_model_len", None) or calibration.context_tokens_max,
    )
    events = KvEventsSettings(args.kv_events_port, args.kv_replay_port, args.kv_events_topic)
    return EngineSettings(
        **{name: getattr(args, name) for name in TAKEN_OVER},
        handshake=KvConnector(args.handshake) if hasattr(args, "handshake") else None,
        member=MEMBERS[args.like],
        calibration=calibration,
        kv_tokens=getattr(args, "kv_tokens", None),
        tier=_tier(args),
        peers=PeerLimits(args.pull_floor_ms / 1e3, args.pull_us_per_token / 1e6) if hasattr(args, "p2p_port") else None,
        p2p_port=getattr(args, "p2p_port", 0),
        limits=limits,
        tick_s=args.tick_ms / 1e3,
        kv_events=events if args.kv_events else None,
    )


def _tier(args: argparse.Namespace) -> TierLimits | None:
    tokens = getattr(args, "cpu_tier_tokens", 0)
    return TierLimits(tokens, args.load_floor_ms / 1e3, args.load_us_per_token / 1e6) if tokens else None


async def serve(chosen: EngineSettings) -> int:
    """Serve until SIGTERM or SIGINT. Returns 1 if a port is unavailable."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    engines = Engines(chosen)
    try:
        await engines.start()
    except (OSError, ImportError, ValueError, RuntimeError) as error:
        print(f"engine: {error}", file=sys.stderr)
        return 1
    for url in engines.urls:
        print(f"ready {url}", flush=True)
    await stop.wait()
    await engines.stop()
    return 0


def main(argv: Sequence[str]) -> int:
    """Return the exit status of `python -m loadtest engine`."""
    chosen = settings(argv)
    try:
        import uvloop
    except ImportError:
        return asyncio.run(serve(chosen))
    return uvloop.run(serve(chosen))

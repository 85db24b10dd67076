"""The command line: reads arguments, loads settings, and runs the command."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from router.cli.arguments import CommandParser
from router.cli.config_loader import load_config
from router.cli.optional_deps import describe_missing_extra
from router.config.api_keys import KeysError, entry_of, make_key
from router.config.fd_limits import raise_limit
from router.config.file_contents import install
from router.config.former_settings import FormerNames
from router.config.runtime import RuntimeConfig
from router.config.schema import SettingsError, field_keys
from router.core.placement.policies import POLICIES
from router.core.types.requests import Priority
from router.telemetry import logs
from router.telemetry.build import build, log_start

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

OWN_COMMANDS = frozenset(("serve", "config", "check-config", "make-key", "audit", "top", "explain"))
SERVE = "Run the router: each request goes to the replica with the lowest cost, by its cached prefixes."
SERVE_NOTES = """\
example:
  warmroute serve --replica http://10.0.0.1:8000 --replica http://10.0.0.2:8000

settings:
  Every setting is a key of the YAML file (listen: {port: 8000}), an environment variable
  (WARMROUTE_LISTEN_PORT=8000; lists with commas) and a flag (--set listen.port=8000).
  Flags override the environment, and the environment overrides the file.

signals:
  SIGTERM ends it after running answers are complete; Ctrl-C omits the additional
  seconds for load balancers; SIGHUP reloads settings, keys and certificates.
"""
CONFIG = """\
Print the effective settings as YAML, each with its source: default, file, environment or flag.
Secrets are masked. With an invalid configuration it prints one line for each problem, and
exits with status 2. It takes the arguments of serve.

example:
  warmroute config --config warmroute.yaml | grep -v '# default'
"""
CHECK = """\
Check a settings file: print one line for each problem, and exit with status 2 if any.
The environment (WARMROUTE_*) and --set apply as with serve.

example:
  warmroute check-config warmroute.yaml
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `warmroute`. Returns the exit status."""
    _open_standard_streams()
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments and (installed := _find_plugin_command(arguments[0])) is not None:
        return _run_installed(installed, arguments[1:])
    options = _parser().parse_args(arguments)
    if options.command == "config":
        return _print_config(options)
    if options.command == "check-config":
        return _check(options)
    if options.command == "make-key":
        return _make_key(options)
    if options.command == "audit":
        from router.cli.audit import report as audit

        return audit.run(options, shlex.join(arguments))
    if options.command == "top":
        return _top(options)
    if options.command == "explain":
        from router.cli.explain.client import main as explain

        return explain(options.id, options.url, options.token_file)
    raise_limit()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # ignored until there are settings to read again

    former = FormerNames()

    def read() -> RuntimeConfig:
        return load_config(options.config, os.environ, _overrides(options), former)

    try:
        config = read()
    except SettingsError as error:
        return _complain(error)
    log = config.settings.log
    logs.setup(log.level, log.format, requests=log.requests)
    former.log()
    install(config.files)
    from router.eventloop import run

    return run(_serve(config, read, options.config))


def _find_plugin_command(name: str) -> EntryPoint | None:
    """Return the command of this name that another package installs in addition to the router's own, such as `demo`."""
    if name in OWN_COMMANDS:
        return None  # searching all distributions takes 30 ms
    from importlib.metadata import entry_points

    return next(iter(entry_points(group="warmroute.commands", name=name)), None)


def _run_installed(command: EntryPoint, arguments: list[str]) -> int:
    """Run a command that another package installs in addition to the router's own, such as `demo`. Returns the exit
    status."""
    try:
        run = command.load()
    except ModuleNotFoundError as error:
        print(f"warmroute: {describe_missing_extra(command.name, str(error.name), command.name)}", file=sys.stderr)
        return 2
    status: int = run(arguments)
    return status


def _open_standard_streams() -> None:
    """Open standard streams that were closed. Otherwise a socket would take their place, and libuv would end the
    process."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)


def _parser() -> CommandParser:
    parser = CommandParser(prog="warmroute", description="A KV-cache-aware router for LLM servers.")
    parser.add_argument("--version", action="version", version=f"warmroute {build()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    raw = argparse.RawDescriptionHelpFormatter
    serve = commands.add_parser(
        "serve", help="run the router", description=SERVE, epilog=SERVE_NOTES, formatter_class=raw
    )
    config = commands.add_parser(
        "config", help="print the effective settings with their sources", description=CONFIG, formatter_class=raw
    )
    for command in (serve, config):
        _add_flags(command)
    check = commands.add_parser(
        "check-config",
        help="check a settings file and the environment",
        description=CHECK,
        formatter_class=raw,
    )
    check.add_argument("file", type=Path, metavar="FILE", help="YAML file of settings, as for serve --config")
    for command in (serve, config, check):
        command.settings = tuple(field_keys())
        command.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", help="any setting by its dotted key"
        )
    _add_make_key(commands.add_parser("make-key", help="make an API key and its entry for the keys file"))
    _add_audit(commands.add_parser("audit", help="analyze cache reuse in request logs, without a running router"))
    _add_top(commands.add_parser("top", help="watch a running router: hit rate, reasons of cache misses, advice"))
    _add_explain(commands.add_parser("explain", help="explain the placement of a request"))
    commands.add_parser("demo", help="compare warmroute with round robin on this machine", add_help=False)
    return parser


def _add_flags(parser: CommandParser) -> None:
    """Add the flags that are short for settings."""
    parser.add_argument("--replica", action="append", metavar="URL", help="base URL of an engine; repeat for each")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of settings")
    parser.add_argument(
        "--mode",
        metavar="MODE",
        help="proxy: HTTP requests; extproc: endpoint picker of a gateway (gRPC); both (default: proxy)",
    )
    parser.add_argument("--face", help=argparse.SUPPRESS)  # former name of --mode
    parser.add_argument("--host", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", help="port to listen on (8000)")
    parser.add_argument("--admin-port", metavar="PORT", help="port of the admin listener (8001)")
    parser.add_argument("--policy", metavar="NAME", help=f"placement policy (warm): {', '.join(POLICIES)}")
    parser.add_argument(
        "--tokenizer", action="append", metavar="[MODEL=]PATH", help="tokenizer of a model; repeat for each"
    )


def _add_make_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tenant", help="tenant of the key; a tenant may have several keys")
    parser.add_argument("--model", action="append", metavar="NAME", help="an allowed model; repeat for each")
    parser.add_argument(
        "--requests-per-min", type=int, metavar="N", help="requests per minute of the tenant, over all its keys"
    )
    parser.add_argument(
        "--tokens-per-min",
        type=int,
        metavar="N",
        help="tokens of prompts and answers per minute of the tenant, over all its keys",
    )
    parser.add_argument("--ttft-ms", type=float, metavar="MS", help="deadline of the first token in milliseconds")
    parser.add_argument(
        "--priority",
        choices=[priority.name.lower() for priority in Priority],
        help="priority of the tenant's requests when replicas are full",
    )


def _add_audit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="request log, by lines or as JSON; also .gz, .zst; - is standard input",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results as JSON to this file")
    parser.add_argument("--excerpts", action="store_true", help="quote differing parts of prompts")
    parser.add_argument(
        "--prefill-tokens-per-s",
        type=_positive,
        default=8_000,
        metavar="N",
        help="assumed prefill speed of a GPU in prompt tokens per second (8000)",
    )
    parser.add_argument("--tokenizer", metavar="PATH", help="tokenizer for requests without logged usage")
    parser.add_argument(
        "--memory-mb", type=_positive, default=512, metavar="N", help="memory for prompt texts in MB (512)"
    )
    parser.add_argument(
        "--requests-max",
        type=_positive,
        default=10_000_000,
        metavar="N",
        help="stop after this number of requests (10000000)",
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _add_top(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", default="http://127.0.0.1:8001", help="URL of the admin listener (http://127.0.0.1:8001)"
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="file with the admin token, if the router has one"
    )
    parser.add_argument("--interval-s", type=float, default=2.0, metavar="S", help="refresh interval in seconds (2)")
    parser.add_argument(
        "--once", action="store_true", help="print one page and exit, as without a terminal; needs no library"
    )


def _add_explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help="value of x-warmroute-request-id, or of the request's x-request-id")
    parser.add_argument(
        "--admin", "--url", dest="url", default="http://127.0.0.1:8001", metavar="URL",
        help="URL of the admin listener (http://127.0.0.1:8001)",
    )  # fmt: skip
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="file with the admin token, if the router has one"
    )


def _top(options: argparse.Namespace) -> int:
    from router.cli.top.command import main as top

    return top(options.url, options.token_file, interval_s=options.interval_s, once=options.once)


def _make_key(options: argparse.Namespace) -> int:
    """Print the entry to standard output, for `>> keys.yaml`, and the key to standard error. The key is shown only
    once."""
    key = make_key()
    try:
        entry = entry_of(
            key,
            options.tenant,
            models=options.model,
            requests_per_min=options.requests_per_min,
            tokens_per_min=options.tokens_per_min,
            priority=options.priority,
            ttft_ms=options.ttft_ms,
        )
    except KeysError as error:
        for problem in error.problems:
            print(f"warmroute: {problem}", file=sys.stderr)
        return 2
    print(entry, end="", flush=True)
    print(f"The key (shown only once): {key}", file=sys.stderr)
    return 0


def _overrides(options: argparse.Namespace) -> dict[str, Any]:
    flags = {
        "replicas": options.replica,
        "listen.mode": options.mode,
        "listen.face": options.face,
        "listen.host": options.host,
        "listen.port": options.port,
        "listen.admin_port": options.admin_port,
        "routing.policy": options.policy,
        "tokens.sources": options.tokenizer,
    }
    return {key: value for key, value in flags.items() if value is not None} | _assignments(options.set)


def _assignments(texts: Sequence[str]) -> dict[str, str]:
    """Return the values of `--set`, by key. Raises SettingsError."""
    assigned = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise SettingsError([f"--set {text}: must be KEY=VALUE"])
        assigned[key] = value
    return assigned


def _print_config(options: argparse.Namespace) -> int:
    """Print the settings as `serve` would load them here, after the same checks."""
    from router.cli.effective_settings import render

    former, sources = FormerNames(), dict[str, str]()
    try:
        config = load_config(options.config, os.environ, _overrides(options), former, sources)
    except SettingsError as error:
        return _complain(error)
    if names := former.describe():
        print(f"warmroute: {names}", file=sys.stderr)
    print(render(config.settings, sources), end="")
    return 0


def _check(options: argparse.Namespace) -> int:
    """Check the settings as `serve` would load them here, including the environment, which may contain secrets and
    mistakes."""
    former = FormerNames()
    try:
        load_config(options.file, os.environ, _assignments(options.set), former)
    except SettingsError as error:
        return _complain(error)
    if names := former.describe():
        print(f"warmroute: {names}", file=sys.stderr)
    print(f"{options.file}: valid")
    return 0


def _complain(error: SettingsError) -> int:
    for problem in error.problems:
        print(f"warmroute: {problem}", file=sys.stderr)
    return 2


async def _serve(config: RuntimeConfig, read: Callable[[], RuntimeConfig], file: Path | None) -> int:
    from router.config.reload import Reloader
    from router.router_server import RouterServer

    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    stop: asyncio.Future[int] = loop.create_future()
    serving = False

    def signalled(number: int) -> None:
        if (stop.done() or not serving) and task is not None:
            task.cancel()  # a second signal ends the drain; before serving begins, the first one ends the process
        if not stop.done():
            stop.set_result(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled, number)
    app = RouterServer(config)
    reloader = Reloader(config.settings, read, app.apply, app.control.count_reload, file=file)
    loop.add_signal_handler(signal.SIGHUP, reloader.ask)
    try:
        async with app:
            serving = True
            reloading = asyncio.create_task(reloader.watch())
            log_start(app.admin_url)
            logs.log_listening(app.url, app.admin_url)
            first = await stop
            reloading.cancel()
            if first == signal.SIGTERM:
                app.lame_duck()
                await asyncio.sleep(reloader.settings.listen.lame_duck_s)
    except asyncio.CancelledError:
        return 130
    except SettingsError as error:
        return _complain(error)
    except OSError as error:
        print(f"warmroute: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

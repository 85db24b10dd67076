"""Routers that `python -m loadtest overhead` compares: their start commands and their locations.

Rivals run as their makers ship them, with logs at `warn` and with their own cache-aware policy, because ours is
cache-aware too. nginx places in rotation and is the yardstick: a proxy that looks at nothing. Every choice was made in
the rival's favour: no access log, no traces, one nginx worker, which is cheapest per byte.

A command line takes {port}, {metrics_port}, {folder} (a temporary one) and {urls}. A word that is `{urls}` alone
becomes one word for each replica; within a longer word the URLs are separated by blanks. `{replicas}` alone becomes
`--replica URL` for each.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from filecmp import cmp
from pathlib import Path

from loadtest.common.processes import free_port
from router import __version__
from router.telemetry.build import build

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-rivals"
COMPILED = ROOT / ".compiled"
INSTALL_TIMEOUT_S = 900
NGINX_PLACES = ("/usr/sbin/nginx", "/usr/local/sbin/nginx", "/usr/local/bin/nginx")
OURS, PURE, YARDSTICK = "warmroute", "warmroute (pure)", "nginx"

# Two of the three install commands of the same name, so each is started by its module.
_RUN = "import sys; from {module} import main; sys.exit(main())"
_FLAGS = (
    *("--host", "127.0.0.1", "--port", "{port}", "--prometheus-host", "127.0.0.1", "--prometheus-port"),
    *("{metrics_port}", "--policy", "cache_aware", "--worker-urls", "{urls}"),
)


@dataclass(frozen=True, slots=True)
class Package:
    """A rival from PyPI."""

    module: str
    words: tuple[str, ...]


RIVALS = {
    "sglang-router": Package("sglang_router.cli", ("launch", *_FLAGS, "--log-level", "warn")),
    "smg": Package("smg.cli", ("launch", *_FLAGS, "--log-level", "warn")),
    "vllm-router": Package("vllm_router.launch_router", (*_FLAGS, "--log-level", "warning")),
}

_NGINX = """\
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/nginx-error.log warn;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    tcp_nodelay on;
    keepalive_requests 1000000;
    client_max_body_size 0;
    client_body_buffer_size 1m;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    upstream replicas {{
{servers}
        keepalive 1024;
        keepalive_requests 1000000;
    }}
    server {{
        listen 127.0.0.1:{port} backlog=1024;
        location / {{
            proxy_pass http://replicas;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 600s;
        }}
    }}
}}
"""


class RivalError(Exception):
    """A router cannot be started or installed; the message names the reason."""


@dataclass(frozen=True, slots=True)
class Rival:
    """Name and command line of a router."""

    name: str
    command: tuple[str, ...]
    nginx: bool = False
    """True if the router starts from a configuration file that is written for it."""

    def words(self, port: int, urls: Sequence[str], folder: Path) -> list[str]:
        """Return the command line for this port and these replicas, and put the files that it needs into the folder.

        Raises RivalError if the command has an unknown placeholder.
        """
        if self.nginx:
            servers = "\n".join(f"        server {url.removeprefix('http://')};" for url in urls)
            (folder / "nginx.conf").write_text(_NGINX.format(folder=folder, servers=servers, port=port))
        known = {"port": port, "metrics_port": free_port(), "folder": folder, "urls": " ".join(urls)}
        words: list[str] = []
        for word in self.command:
            if word == "{urls}":
                words += urls
            elif word == "{replicas}":
                words += [part for url in urls for part in ("--replica", url)]
            else:
                try:
                    words.append(word.format(**known))
                except (KeyError, IndexError, ValueError) as error:
                    raise RivalError(
                        f"{self.name}: {word!r} takes only {{port}}, {{metrics_port}}, {{folder}}, {{urls}}"
                    ) from error
        return words


def ours(flags: Sequence[str] = ()) -> Rival:
    """Return warmroute with its defaults: policy `warm`, with metrics and the log line."""
    serve = ("serve", "--set", "listen.lame_duck_s=0", "--host", "127.0.0.1", "--port", "{port}")
    ports = ("--admin-port", "{metrics_port}", "{replicas}")
    return Rival(OURS, (*interpreter(), "-m", "router", *serve, *ports, *flags))


def pure(flags: Sequence[str] = ()) -> dict[str, Rival]:
    """Return the same router without native code, by name.

    Empty if `ours` has no native code, or if the native code is installed and so cannot be left out.
    """
    if not is_compiled() or build().native:
        return {}
    native = ours(flags)
    return {PURE: Rival(PURE, (sys.executable, *native.command[len(interpreter()) :]))}


def ours_version() -> dict[str, str]:
    """Return the version of warmroute that `ours` starts, by name."""
    return {OURS: f"{__version__} (native code)" if native() else f"{__version__} (pure Python)"}


def native() -> bool:
    """True if the router that `ours` starts runs native code, from `make is_compiled` or as installed here."""
    return is_compiled() or build().native


def is_compiled() -> bool:
    """True if `make is_compiled` has built native code from these sources, as the image has it."""
    ours, theirs = ROOT / "router", COMPILED / "router"
    if not any(theirs.rglob("*.so")):
        return False
    paths = [path.relative_to(ours) for path in ours.rglob("*.py")]
    return all((theirs / path).is_file() and cmp(ours / path, theirs / path, shallow=False) for path in paths)


def interpreter() -> tuple[str, ...]:
    """Return the command that runs warmroute, with native code if it is built."""
    if not is_compiled():
        return (sys.executable,)
    return ("env", "PYTHONSAFEPATH=1", f"PYTHONPATH={COMPILED}", sys.executable)


def custom(assignment: str) -> Rival:
    """Parse a flag `NAME=CMD` into a router. Raises RivalError."""
    name, equals, command = assignment.partition("=")
    replicas = "{urls}" in command or "{replicas}" in command
    if not equals or not name or "{port}" not in command or not replicas:
        expected = "must be NAME=COMMAND, with {port} and {urls} or {replicas} in the command"
        raise RivalError(f"{assignment!r}: {expected}")
    return Rival(name, tuple(shlex.split(command)))


def find_installed(environment: Path) -> dict[str, Rival]:
    """Return the installed rivals, the yardstick first."""
    found: dict[str, Rival] = {}
    if nginx := nginx_path():
        found[YARDSTICK] = Rival(YARDSTICK, (nginx, "-p", "{folder}", "-c", "{folder}/nginx.conf"), nginx=True)
    for name, package in RIVALS.items():
        for place in (environment / name, environment):
            if any(place.glob(f"lib/python*/site-packages/{package.module.partition('.')[0]}/__init__.py")):
                start = (str(place / "bin" / "python"), "-c", _RUN.format(module=package.module))
                found[name] = Rival(name, (*start, *package.words))
                break
    return found


def nginx_path() -> str | None:
    """Return the path of nginx, or None if it is not installed."""
    return shutil.which(YARDSTICK) or next((place for place in NGINX_PLACES if Path(place).exists()), None)


def versions(environment: Path) -> dict[str, str]:
    """Return the versions of the installed rivals, and of warmroute."""
    found = {OURS: __version__}
    if nginx := nginx_path():
        said = subprocess.run([nginx, "-v"], capture_output=True, text=True, check=False, timeout=10).stderr
        found[YARDSTICK] = said.rpartition("/")[2].strip()
    for name in find_installed(environment).keys() & RIVALS.keys():
        pattern = f"lib/python*/site-packages/{name.replace('-', '_')}-*.dist-info"
        for folder in (f for place in (environment / name, environment) for f in place.glob(pattern)):
            found.setdefault(name, folder.name.removesuffix(".dist-info").rpartition("-")[2])
    return found


def install(environment: Path) -> None:
    """Install the missing ones of the three rivals, each into its own environment. Raises RivalError."""
    there = find_installed(environment)
    for name in RIVALS:
        if name in there:
            continue
        folder = environment / name
        venv.create(folder, with_pip=True, clear=folder.exists())
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        try:
            subprocess.run([*pip, name], check=True, timeout=INSTALL_TIMEOUT_S)
        except (OSError, subprocess.SubprocessError) as error:
            raise RivalError(f"{name} cannot be installed: {error}") from error

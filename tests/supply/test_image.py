"""deploy/Dockerfile: linted, and built for real, by buildah and without a daemon, from a Debian of its own.

The base image is made on the spot by debootstrap, so no image registry is needed; buildah runs the steps in a chroot.
What comes out is then run as a cluster would: another user, a root that cannot be written, an empty /tmp.
"""

from __future__ import annotations

import json
import os
import platform
import re
import select
import shutil
import signal
import subprocess
import sysconfig
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.compiled import MODULES
from loadtest.common.processes import free_ports
from router import __version__
from tests.supply.install import REPO, VENV
from tests.supply.tool import program, quick_compiler

BASE = "localhost/warmroute-base:test"
BUILD_TIMEOUT_S = 900.0
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 120.0
EPOCH_S = "1700000000"
# What a cluster does with `readOnlyRootFilesystem: true`, `runAsUser: 65532` and an emptyDir on /tmp.
CONFINED = """
set -e
mount --make-rprivate /
mount --bind "$1" "$2"
mount -o remount,ro,bind "$2"
mount -t tmpfs tmpfs "$2/tmp"
mount -t proc proc "$2/proc"
for device in null urandom; do mount --bind "/dev/$device" "$2/dev/$device"; done
root="$2"
shift 2
exec chroot --userspec=65532:65532 "$root" /usr/bin/env -i "$@"
"""


def run(command: list[str | Path], **others: str) -> str:
    """What a command prints; the test fails with all it said when it fails."""
    done = program(command, timeout_s=BUILD_TIMEOUT_S, **others)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def base_root() -> Path:
    """A minimal Debian with Python, made once."""
    root = VENV / "base"
    stamp = VENV / "base-stamp"
    if not stamp.exists():
        shutil.rmtree(root, ignore_errors=True)
        run(["debootstrap", "--variant=minbase", "--include=python3,python3-venv,ca-certificates", "bookworm", root])
        # Devices are the machine's; an image has none.
        for folder in ("dev", "var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale"):
            shutil.rmtree(root / folder)
        (root / "dev").mkdir()
        for name in ("null", "urandom"):
            (root / "dev" / name).touch()
        stamp.touch()
    return root


@dataclass(frozen=True)
class Built:
    """An image as it lies on disk, and what it says of itself."""

    root: Path
    config: dict[str, object]
    store: Path

    def command(self, *words: str) -> list[str]:
        """A command in the image, confined as in a cluster."""
        environment = [entry for entry in self.config["Env"] if isinstance(entry, str)]  # type: ignore[attr-defined]
        mount = self.store / "confined"
        mount.mkdir(exist_ok=True)
        return ["unshare", "--mount", "sh", "-c", CONFINED, "sh", str(self.root), str(mount), *environment, *words]

    def say(self, *words: str) -> subprocess.CompletedProcess[str]:
        """What such a command says."""
        return subprocess.run(self.command(*words), capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """The default target, built for real."""
    missing = [name for name in ("buildah", "debootstrap", "unshare", "chroot") if not shutil.which(name)]
    if missing or os.getuid() != 0:
        pytest.skip(
            f"building needs root and {', '.join(missing) or 'nothing else'}: apt-get install buildah debootstrap"
        )
    store = tmp_path_factory.mktemp("image")
    buildah: list[str | Path] = [
        *("buildah", "--root", store / "root", "--runroot", store / "run", "--storage-driver", "vfs")
    ]
    empty = run([*buildah, "from", "scratch"]).strip()
    run([*buildah, "add", "--quiet", empty, base_root(), "/"])
    run([*buildah, "commit", "--quiet", "--rm", empty, BASE])
    # The machine's certificates: whoever stands between it and the package index may have its own.
    build = [*buildah, "bud", "--isolation", "chroot", "--format", "docker", "--pull-never", "--quiet"]
    build += ["--ignorefile", ".dockerignore", "--volume", "/etc/ssl/certs:/etc/ssl/certs:ro"]
    # Found before the base's own, by the name that its Python has for it.
    compiler = f"{platform.machine()}-linux-gnu-gcc"
    quick = quick_compiler(store / "cc", f"/usr/bin/{compiler}")
    build += ["--volume", f"{quick}:/usr/local/bin/{compiler}:ro"]
    build += ["--build-arg", f"BASE={BASE}", "--build-arg", f"SOURCE_DATE_EPOCH={EPOCH_S}"]
    name = run([*build, "-f", "deploy/Dockerfile", "."]).split()[-1]
    container = run([*buildah, "from", "--pull-never", name]).strip()
    try:
        described = json.loads(run([*buildah, "inspect", "--type", "image", name]))
        yield Built(Path(run([*buildah, "mount", container]).strip()), described["Docker"]["config"], store)
    finally:
        run([*buildah, "umount", container])
        shutil.rmtree(store)


def test_hadolint_finds_nothing() -> None:
    """No warning of any level; what is ignored is ignored beside the line."""
    run([VENV / "bin" / "hadolint", "--failure-threshold", "style", "deploy/Dockerfile"])


def test_only_what_the_image_needs_is_sent() -> None:
    """Everything that COPY names is let through by .dockerignore, and nothing else is."""
    lines = (REPO / ".dockerignore").read_text(encoding="utf-8").splitlines()
    wanted = {line.removeprefix("!").rstrip("/") for line in lines if line.startswith("!")}
    assert lines[1] == "*"
    copied: set[str] = set()
    for words in re.findall(
        r"^COPY (?!--from)(.+) \S+$", (REPO / "deploy/Dockerfile").read_text("utf-8"), re.MULTILINE
    ):
        copied |= {word.rstrip("/") for word in words.split()}
    assert copied == wanted
    assert all((REPO / name).exists() for name in wanted)


def test_the_base_is_an_argument_and_each_stage_takes_it() -> None:
    """One base for all stages, given from outside: a release gives it by digest."""
    text = (REPO / "deploy/Dockerfile").read_text(encoding="utf-8")
    outside = [line for line in re.findall(r"^FROM (\S+)", text, re.MULTILINE) if line not in ("build", "runtime")]
    assert outside == ["${BASE}", "${BASE}"]


def test_image_says_what_it_is(image: Built) -> None:
    """Another user than root, SIGTERM, both ports, a health check, and labels with the version."""
    config = image.config
    assert config["User"] == "65532:65532"
    assert config["Entrypoint"] == ["warmroute"]
    assert config["StopSignal"] == "SIGTERM"
    assert set(config["ExposedPorts"]) == {"8000/tcp", "8001/tcp"}  # type: ignore[call-overload]
    assert config["Healthcheck"]["Test"][0] == "CMD"  # type: ignore[index]
    assert config["Labels"]["org.opencontainers.image.version"] == __version__  # type: ignore[index]
    assert config["Labels"]["org.opencontainers.image.base.name"] == BASE  # type: ignore[index]


@pytest.mark.promise("The image runs as an unprivileged user, on a read-only root, without pip.", "supply")
def test_image_holds_the_router_and_no_tools(image: Built) -> None:
    """No pip, no compiler's leftovers, no tests, no sources of the build; nothing that anybody but root may write."""
    assert not list(image.root.glob("src/*"))
    assert not (image.root / "dist").exists()
    installed = image.root / "opt/warmroute"
    assert not list(installed.rglob("pip/__init__.py"))
    assert not list(installed.rglob("site-packages/tests"))
    writable = [path for path in installed.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o022]
    assert not writable
    assert not list(installed.rglob("kubernetes/**/v1_pod.*"))
    size_mb = sum(path.lstat().st_size for path in installed.rglob("*") if not path.is_symlink()) / 1e6
    print(f"\nthe image adds {size_mb:.0f} MB to its base")


@pytest.mark.promise("Wheel and sdist are reproducible byte by byte, and the image has that wheel.", "supply")
def test_image_installs_the_same_wheel(image: Built, tmp_path: Path) -> None:
    """The files in the image are those of the wheel of a release, byte for byte."""
    run([VENV / "bin" / "python", "-m", "deploy.dist", tmp_path], SOURCE_DATE_EPOCH=EPOCH_S)
    run(["python3", "-m", "zipfile", "-e", next(tmp_path.glob("*.whl")), tmp_path / "wheel"])
    site = next(image.root.glob("opt/warmroute/lib/python3*/site-packages"))
    files = [path for path in (tmp_path / "wheel").rglob("*") if path.is_file() and path.name != "RECORD"]
    assert len(files) > 100
    for path in files:
        assert (site / path.relative_to(tmp_path / "wheel")).read_bytes() == path.read_bytes()


def test_image_has_native_code(image: Built) -> None:
    """Beside every module that deploy/compiled.py names, and it is what runs; no compiler came with it."""
    site = next(image.root.glob("opt/warmroute/lib/python3*/site-packages"))
    for module in MODULES:
        assert list((site / module).parent.glob(f"{Path(module).stem}.*.so")), module
    said = image.say("python", "-c", "import router.core.placement.router as routing; print(routing.__file__)").stdout
    assert said.strip().endswith(".so")
    assert not list(image.root.glob("usr/bin/gcc*"))
    assert not list(site.glob("mypy*"))


@pytest.mark.promise("The image runs as an unprivileged user, on a read-only root, without pip.", "supply")
def test_image_runs_as_nobody_on_a_root_that_cannot_be_written(image: Built) -> None:
    """The command starts, every extra can be imported, and only /tmp takes a file."""
    assert image.say("warmroute", "--version").stdout.startswith(f"warmroute {__version__} (native code, Python 3.")
    assert (
        image.say(
            "python", "-c", "import kubernetes.aio.config, tokenizers, jinja2, opentelemetry.sdk.trace"
        ).returncode
        == 0
    )
    assert image.say("python", "-c", "open('/tmp/probe', 'w')").returncode == 0
    for place in ("/probe", "/opt/warmroute/probe", "/etc/probe"):
        said = image.say("python", "-c", f"open({place!r}, 'w')")
        assert "Read-only file system" in said.stderr
    assert "uid=65532" in image.say("id").stdout


def test_image_serves_and_is_healthy(image: Built) -> None:
    """The router serves from the image, and the image's own health check passes."""
    ports = free_ports(2)
    listen = [f"--port={ports[0]}", f"--admin-port={ports[1]}"]
    serve = image.command("warmroute", "serve", "--replica", "http://127.0.0.1:9", *listen)
    process = subprocess.Popen(serve, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        said, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
        assert said
        assert process.stdout.readline().startswith(b"listening ")
        with urllib.request.urlopen(f"http://127.0.0.1:{ports[1]}/healthz", timeout=60) as answer:
            assert answer.status == 200
        check = [word.replace(":8001", f":{ports[1]}") for word in image.config["Healthcheck"]["Test"][1:]]  # type: ignore[index]
        assert image.say(*check).returncode == 0
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_TIMEOUT_S) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert image.say(*check).returncode != 0


def test_this_python_is_one_the_locks_are_for() -> None:
    """The locks hold for CPython 3.11 to 3.13: here they are tried on one of them."""
    assert sysconfig.get_python_version() in ("3.11", "3.12", "3.13")

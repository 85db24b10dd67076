"""What both sides of the seam (placing.py) need to be put together and to run."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from router.settings.pairs import template_kwargs, tokenizers
from router.core.dialects.repairs import in_order
from router.engines.discovery import Discovery
from router.engines.discovery.dns import DnsDiscovery
from router.settings.keys import Keys, KeysError
from router.tokens.encoder import Prompts
from router.settings.schema import DiscoverySettings, Settings, SettingsError

log = logging.getLogger(__name__)
_T = TypeVar("_T")

SWITCH_S = 0.0005  # how long a thread that parses a long body may keep the event loop waiting, between two bytecodes
# Objects made, net of those freed, until the youngest are searched for cycles; how often the older are. CPython's own
# 700, 10, 10 spend a quarter of a busy router's time walking its index, which has none.
COLLECT = (10_000, 50, 100)


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """Run on the fastest event loop there is, with the interpreter set up for a server."""
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()  # modules and settings are here to stay
    gc.set_threshold(*COLLECT)
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


def make_prompts(settings: Settings) -> Prompts:
    """Templates and tokenizers as the settings name them."""
    s = settings.tokens
    return Prompts(
        tokenizers(s.sources),
        deadline_s=s.deadline_s,
        cache_bytes_max=s.cache_bytes_max,
        template_kwargs=template_kwargs(s.template_kwargs),
    )


def keys_of(settings: Settings) -> Keys | None:
    """The keys file that the settings name, as it is now; None where they name none. Raises KeysError."""
    auth, observatory = settings.auth, settings.observatory
    if not auth.keys_file:
        return None
    return Keys.load(
        Path(auth.keys_file),
        isolate=auth.isolate,
        receipts=auth.receipts,
        repairs=in_order(observatory.repairs),
        append_only=observatory.append_only,
    )


def source_of(s: DiscoverySettings) -> Discovery | None:
    """What finds replicas besides those that are listed; None: nothing does. Raises SettingsError."""
    if s.source == DnsDiscovery.source:
        return DnsDiscovery(s.dns_name, port=int(s.port), scheme=s.scheme, interval_s=s.dns_interval_s)
    if s.source == "kubernetes":
        from router.engines.discovery.kubernetes import KubernetesDiscovery  # of an extra, and heavy

        try:
            return KubernetesDiscovery(s)
        except ValueError as error:  # what a kubeconfig holds, or that there is none and we are in no pod
            raise SettingsError([str(error)]) from error
    return None


@contextmanager
def files_of_settings() -> Iterator[None]:
    """What is wrong with a file that settings name is a SettingsError: it was checked, but that is a moment ago."""
    try:
        yield
    except KeysError as error:
        raise SettingsError(error.problems) from error
    except UnicodeDecodeError as error:
        raise SettingsError(["a file that the settings name is no text"]) from error
    except OSError as error:  # of TLS too
        raise SettingsError([f"{error.filename or 'a file of TLS'}: {error.strerror or error}"]) from error


def in_background(work: Coroutine[None, None, None]) -> Callable[[], Coroutine[None, None, None]]:
    """Start a task; what is returned stops it."""
    task = asyncio.create_task(guarded(work))

    async def stop() -> None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        work.close()  # it may not have begun

    return stop


async def guarded(work: Coroutine[None, None, None]) -> None:
    """A background task that fails says so in the log; it is a bug."""
    try:
        await work
    except Exception:
        log.exception("background task failed")
        raise


def url_of(host: str, port: int, *, tls: bool = False) -> str:
    """The URL of a bound address."""
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def cannot_listen(error: OSError, host: str, port: int) -> OSError:
    """Says which address it was, and which settings name it."""
    why = f"cannot listen on {host}:{port} (listen.host, listen.port, listen.admin_port): {error.strerror}"
    return OSError(error.errno, why)

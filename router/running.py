"""What both sides of the seam (placing.py) need to be put together and to run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress

from router.addresses import template_kwargs, tokenizers
from router.prompts import Prompts
from router.settings import Settings

log = logging.getLogger(__name__)


def make_prompts(settings: Settings) -> Prompts:
    """Templates and tokenizers as the settings name them."""
    s = settings.tokens
    return Prompts(
        tokenizers(s.sources),
        deadline_s=s.deadline_s,
        cache_bytes_max=s.cache_bytes_max,
        template_kwargs=template_kwargs(s.template_kwargs),
    )


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


def url_of(host: str, port: int) -> str:
    """The URL of a bound address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def cannot_listen(error: OSError, host: str, port: int) -> OSError:
    """Says which address it was, and which settings name it."""
    why = f"cannot listen on {host}:{port} (listen.host, listen.port, listen.admin_port): {error.strerror}"
    return OSError(error.errno, why)

"""Request logs as the installed releases of vLLM, SGLang and LiteLLM write them, read by `warmroute audit`.

The loggers are the software's own, called with the software's own request objects. Logs of these releases are also kept
in tests/data/audit; this test fails if a newer release writes another format.
"""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from router.cli.audit.log_formats import LogReader
from router.cli.audit.log_requests import NotRequest
from tests.real.install import VENV
from tests.real.install_litellm import VENV_LITELLM
from tests.real.install_sglang import VENV_SGLANG

TOOLS = [{"type": "function", "function": {"name": "tides", "parameters": {"type": "object"}}}]
MESSAGES = [
    {"role": "system", "content": 'You know all "tides". It\'s true.\n' * 100},
    {"role": "user", "content": "When?"},
]
VLLM = """
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging
configure_logging(LoggingConfig())
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.utils.request_logger import RequestLogger
from vllm.sampling_params import SamplingParams
log = RequestLogger(max_log_len=None)
log.log_request_body(ChatCompletionRequest.model_validate(BODY))
log.log_inputs("chatcmpl-1", "rendered", [1, 2], None, SamplingParams(), None)
"""
SGLANG = """
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.utils.request_logger import RequestLogger
for format in ("text", "json"):
    log = RequestLogger(True, 3, format, ["stdout"])
    log.log_openai_received_request(ChatCompletionRequest.model_validate(BODY))
    log.log_received_request(GenerateReqInput(rid="1", input_ids=[1, 2]))
"""
LITELLM = """
import asyncio, json, litellm
from litellm.integrations.custom_logger import CustomLogger
class Log(CustomLogger):
    async def async_log_success_event(self, kwargs, response_obj, start_time, end_time):
        print(json.dumps(kwargs["standard_logging_object"], default=str), flush=True)
        done.set()
async def call():
    await litellm.acompletion(**BODY | {"model": "openai/m"}, mock_response="At 6.")
    await asyncio.wait_for(done.wait(), 60)
done = asyncio.Event()
litellm.callbacks = [Log()]
asyncio.run(call())
"""


@pytest.mark.parametrize(
    ("venv", "script", "requests"), [(VENV, VLLM, 1), (VENV_SGLANG, SGLANG, 2), (VENV_LITELLM, LITELLM, 1)]
)
def test_a_log_of_the_installed_release_is_read(venv: Path, script: str, requests: int) -> None:
    """A request's messages and tools are found once."""
    if not (venv / "bin/python").exists():
        pytest.skip(f"{venv.name} is not installed")
    body = {"model": "m", "messages": MESSAGES, "tools": TOOLS}
    done = subprocess.run(
        [venv / "bin/python", "-c", f"BODY = {body!r}\n{script}"],
        env=os.environ | {"VLLM_LOGGING_LEVEL": "DEBUG", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        capture_output=True,
        timeout=300,
        check=True,
    )
    log, found = LogReader(), []
    for line in (done.stdout + done.stderr).splitlines():
        with suppress(NotRequest):  # a line of another logger
            found += log.read(line)
    assert len(found) == requests
    for each in found:
        read = json.loads(each.body)
        assert read["messages"] == MESSAGES
        assert [tool["function"]["name"] for tool in read["tools"]] == ["tides"]
        assert each.at_s is not None

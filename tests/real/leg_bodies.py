"""Has the request models of an installed engine take bodies, in the engine's own Python:
`python leg_bodies.py vllm|sglang < [[path, body], ...]` prints what each became, a line of JSON each."""

from __future__ import annotations

import json
import sys
from typing import Any

_TOLD = ("stream", "bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank", "kv_transfer_params")


def models_of(engine: str) -> dict[str, Any]:
    """The engine's models by path."""
    if engine == "vllm":
        from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

        return {
            "/v1/chat/completions": ChatCompletionRequest.model_validate,
            "/v1/completions": CompletionRequest.model_validate,
            "/v1/messages": AnthropicMessagesRequest.model_validate,
            "/v1/responses": ResponsesRequest.model_validate,
        }
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, ResponsesRequest
    from sglang.srt.managers.io_struct import GenerateReqInput

    return {
        "/v1/chat/completions": ChatCompletionRequest.model_validate,
        "/v1/completions": CompletionRequest.model_validate,
        "/v1/responses": ResponsesRequest.model_validate,
        "/generate": lambda fields: GenerateReqInput(**fields),
    }


def main() -> None:
    """Print what the bodies on standard input became."""
    models = models_of(sys.argv[1])
    for path, body in json.load(sys.stdin):
        made = models[path](json.loads(body))
        told = {name: getattr(made, name) for name in _TOLD if getattr(made, name, None) is not None}
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"):
            if getattr(made, name, None) is not None:
                told[name] = getattr(made, name)
        print("told " + json.dumps(told), flush=True)


if __name__ == "__main__":
    main()

"""What vLLM and SGLang answer, as far as their backends ask; a test bends it."""

from __future__ import annotations

from typing import Any

from tests.libraries.backends.wrong_servers import Routes

EOS = 2


def vllm_routes(**changes: Any) -> Routes:
    """Generates the prompt's tokens plus one, then the stop token, as vLLM tells it."""

    def complete(body: Any) -> Any:
        prompt = body["prompt"]
        ids = [token + 1 for token in prompt] if isinstance(prompt, list) else [7, 8]
        ended = len(ids) < body["max_tokens"]
        ids = [*ids, EOS] if ended else ids[: body["max_tokens"]]
        logprobs = None
        if body["logprobs"] is not None:
            logprobs = {
                "tokens": [f"token_id:{token}" for token in ids],
                "token_logprobs": [-0.5] * len(ids),
                "top_logprobs": [{f"token_id:{token}": -0.5} for token in ids],
            }
        choice = {
            "text": "text",
            "finish_reason": "stop" if ended else "length",
            "stop_reason": None,
            "token_ids": ids,
            "logprobs": logprobs,
        }
        return {"choices": [choice], "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}}

    def chat(body: Any) -> Any:
        choice = {
            "message": {"content": body["messages"][-1]["content"].upper()},
            "finish_reason": "stop",
            "token_ids": [5, EOS],
        }
        return {"choices": [choice], "usage": {"prompt_tokens": 4, "completion_tokens": 2}}

    return {
        "/health": {},
        "/version": {"version": "0.32.0+cpu"},
        "/v1/models": {"data": [{"id": "m", "max_model_len": 16}]},
        "/v1/completions": complete,
        "/v1/chat/completions": chat,
        "/metrics": b"# HELP x y\n"
        b'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 1.0\n',
        **dict.fromkeys(("/sleep", "/wake_up", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"), b"done"),
        **changes,
    }


def sglang_routes(**changes: Any) -> Routes:
    """The same generation, as SGLang tells it."""

    def generate(body: Any) -> Any:
        prompt, most = body.get("input_ids") or [6, 7], body["sampling_params"]["max_new_tokens"]
        ids = [token + 1 for token in prompt]
        ended = len(ids) < most
        ids = [*ids, EOS] if ended else ids[:most]
        reason = {"type": "stop", "matched": EOS} if ended else {"type": "length", "length": most}
        meta: dict[str, Any] = {"finish_reason": reason, "prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[-0.5, token, None] for token in ids]
            meta["output_top_logprobs"] = [[[-0.5, token, None]] for token in ids]
        return {"text": "text", "output_ids": ids, "meta_info": meta}

    return {
        "/health": {},
        "/server_info": {"version": "0.5.23"},
        "/v1/models": {"data": [{"id": "m", "max_model_len": 16}]},
        "/generate": generate,
        "/v1/chat/completions": vllm_routes()["/v1/chat/completions"],
        "/metrics": b"sglang:token_usage 0.25\n",
        **dict.fromkeys(
            (
                *("/release_memory_occupation", "/resume_memory_occupation", "/flush_cache", "/abort_request"),
                *("/load_lora_adapter", "/unload_lora_adapter"),
            ),
            b"done",
        ),
        **changes,
    }

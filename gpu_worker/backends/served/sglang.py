"""SGLang's own server interface.

Seeds are followed only by a server with --enable-deterministic-inference (backend.config.server_args); another one
draws anew each time, without a word.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gpu_worker.backends.served.dialect import Generated, Prompt, Served, TokenLogprob
from gpu_worker.backends.served.failures import BadAnswer, ServerRefused
from gpu_worker.backends.served.vllm import convert
from gpu_worker.backends.served.web import WebClient

Entry = tuple[float | None, int, str | None]
"""(logprob, token id, text) as SGLang writes them."""


class _Info(msgspec.Struct):
    version: str


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class _Finish(msgspec.Struct):
    type: str
    matched: int | str | None = None
    message: str | None = None


class _Meta(msgspec.Struct):
    finish_reason: _Finish
    prompt_tokens: int
    completion_tokens: int
    output_token_logprobs: list[Entry] | None = None
    output_top_logprobs: list[list[Entry] | None] | None = None


class _Answer(msgspec.Struct):
    text: str
    meta_info: _Meta
    output_ids: list[int] | None = None


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0


class _Chat(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage


class SglangDialect:
    """Implements Dialect. `program` is a Python interpreter that has SGLang."""

    name = "sglang"
    least = "0.5"
    below = "0.6"

    def command(self, program: str, source: str, name: str, port: int, sleeps: bool, adapters: bool) -> list[str]:
        return [
            *(program, "-m", "sglang.launch_server", "--model-path", source, "--served-model-name", name),
            *("--host", "127.0.0.1", "--port", str(port), "--enable-metrics"),
            *(["--enable-memory-saver"] if sleeps else []),
            *(["--enable-lora"] if adapters else []),
        ]

    def environment(self, sleeps: bool, adapters: bool) -> list[str]:
        return ["HF_HUB_OFFLINE=1"]

    def ready(self, web: WebClient) -> bool:
        return web.ok("/health")

    def version(self, web: WebClient, timeout_s: float) -> str:
        try:
            body = web.get("/server_info", timeout_s)
        except ServerRefused:  # its name in earlier releases
            body = web.get("/get_server_info", timeout_s)
        return convert(body, _Info, "server info").version

    def models(self, web: WebClient, timeout_s: float) -> dict[str, int]:
        cards = convert(web.get("/v1/models", timeout_s), _Cards, "models").data
        context = max((card.max_model_len or 0 for card in cards), default=0)
        return {card.id: card.max_model_len or context for card in cards}

    def generate(self, web: WebClient, served: Served, prompt: Prompt, timeout_s: float) -> Generated:
        sampling = prompt.sampling
        chosen: dict[str, Any] = {
            **{
                name: getattr(sampling, name)
                for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")
            },
            "frequency_penalty": sampling.frequency_penalty,
            "stop": list(sampling.stop_texts) or None,
            "stop_token_ids": sampling.stop_token_ids or None,
            "top_k": sampling.top_k or -1,
        }
        if prompt.messages is not None:
            if sampling.logprobs is not None or sampling.min_tokens:
                raise ServerRefused(400, "logprobs and min_tokens are not followed for messages.")
            body = {
                "model": served.name,
                "messages": prompt.messages,
                "max_tokens": prompt.max_tokens,
                "seed": prompt.seed,
                "rid": prompt.request_id,
                **({"lora_path": served.name} if served.adapter else {}),
                **chosen,
            }
            return _chatted(convert(web.post("/v1/chat/completions", body, timeout_s), _Chat, "completion"))
        body = {
            "rid": prompt.request_id,
            "sampling_params": {
                **chosen,
                "max_new_tokens": prompt.max_tokens,
                "min_new_tokens": sampling.min_tokens,
                "sampling_seed": prompt.seed,
            },
            **({"text": prompt.text} if prompt.token_ids is None else {"input_ids": prompt.token_ids}),
        }
        if served.adapter:
            body["lora_path"] = served.name
        if sampling.logprobs is not None:
            body |= {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": sampling.logprobs}
        return _generated(convert(web.post("/generate", body, timeout_s), _Answer, "answer"), prompt)

    def abort(self, web: WebClient, request_id: str, timeout_s: float) -> None:
        web.order("/abort_request", {"rid": request_id}, timeout_s)

    def sleep(self, web: WebClient, timeout_s: float) -> None:
        web.order("/flush_cache", {}, timeout_s)
        web.order("/release_memory_occupation", {}, timeout_s)

    def wake(self, web: WebClient, timeout_s: float) -> None:
        web.order("/resume_memory_occupation", {}, timeout_s)

    def load_adapter(self, web: WebClient, name: str, path: str, timeout_s: float) -> None:
        web.order("/load_lora_adapter", {"lora_name": name, "lora_path": path}, timeout_s)

    def unload_adapter(self, web: WebClient, name: str, timeout_s: float) -> None:
        web.order("/unload_lora_adapter", {"lora_name": name}, timeout_s)
        # The next adapter of this name may have other weights; nothing cached under the old ones may be found.
        web.order("/flush_cache", {}, timeout_s)


def _generated(answer: _Answer, prompt: Prompt) -> Generated:
    meta = answer.meta_info
    if meta.finish_reason.type not in ("stop", "length"):
        raise BadAnswer(f"the generation ended with {meta.finish_reason.type!r}: {meta.finish_reason.message or ''}")
    ids = answer.output_ids
    if ids is None:
        raise BadAnswer("the answer has no output_ids")
    if len(ids) != meta.completion_tokens:
        raise BadAnswer(f"the answer holds {len(ids)} tokens and counts {meta.completion_tokens}")
    logprobs = _logprobs(meta, len(ids)) if prompt.sampling.logprobs is not None else None
    if ids and meta.finish_reason.type == "stop" and meta.finish_reason.matched == ids[-1]:
        ids = ids[:-1]
        logprobs = logprobs[: len(ids)] if logprobs is not None else None
    return Generated(ids, answer.text, meta.finish_reason.type, meta.prompt_tokens, len(ids), logprobs)


def _logprobs(meta: _Meta, count: int) -> list[TokenLogprob]:
    entries = meta.output_token_logprobs or []
    tops = meta.output_top_logprobs or [None] * len(entries)
    if not len(entries) == len(tops) == count:
        raise BadAnswer(f"logprobs: {len(entries)} entries for {count} tokens")
    return [
        TokenLogprob(token, logprob or 0.0, [(one, value or 0.0) for value, one, _ in top or []])
        for (logprob, token, _), top in zip(entries, tops, strict=True)
    ]


def _chatted(answer: _Chat) -> Generated:
    if len(answer.choices) != 1 or answer.choices[0].finish_reason not in ("stop", "length"):
        raise BadAnswer("the answer is not one finished choice")
    (choice,) = answer.choices
    assert choice.finish_reason is not None
    return Generated(
        None,
        choice.message.content or "",
        choice.finish_reason,
        answer.usage.prompt_tokens,
        answer.usage.completion_tokens,
    )

"""vLLM's OpenAI-compatible server."""

from __future__ import annotations

from typing import Any

import msgspec

from gpu_worker.backends.served.dialect import Generated, Prompt, Served, TokenLogprob
from gpu_worker.backends.served.failures import BadAnswer
from gpu_worker.backends.served.web import WebClient


class _Version(msgspec.Struct):
    version: str


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class _Logprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    top_logprobs: list[_ChatLogprob] = []


class _ChatLogprobs(msgspec.Struct):
    content: list[_ChatLogprob] | None = None


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None
    text: str | None = None
    message: _Message | None = None
    logprobs: dict[str, Any] | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage


class VllmDialect:
    """Implements Dialect. `program` is a Python interpreter that has vLLM."""

    name = "vllm"
    least = "0.10.2"  # the first whose completions tell token ids
    below = "1"

    def command(self, program: str, source: str, name: str, port: int, sleeps: bool, adapters: bool) -> list[str]:
        # `vllm serve` of the CPU package fails on the package's metadata; the module is the same server.
        return [
            *(program, "-m", "vllm.entrypoints.openai.api_server", "--model", source, "--served-model-name", name),
            *("--host", "127.0.0.1", "--port", str(port)),
            *(["--enable-sleep-mode"] if sleeps else []),
            *(["--enable-lora"] if adapters else []),
        ]

    def environment(self, sleeps: bool, adapters: bool) -> list[str]:
        return [
            *("HF_HUB_OFFLINE=1", "VLLM_NO_USAGE_STATS=1"),
            *(["VLLM_SERVER_DEV_MODE=1"] if sleeps else []),
            *(["VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"] if adapters else []),
        ]

    def ready(self, web: WebClient) -> bool:
        return web.ok("/health")

    def version(self, web: WebClient, timeout_s: float) -> str:
        return convert(web.get("/version", timeout_s), _Version, "version").version

    def models(self, web: WebClient, timeout_s: float) -> dict[str, int]:
        cards = convert(web.get("/v1/models", timeout_s), _Cards, "models").data
        context = max((card.max_model_len or 0 for card in cards), default=0)
        return {card.id: card.max_model_len or context for card in cards}

    def generate(self, web: WebClient, served: Served, prompt: Prompt, timeout_s: float) -> Generated:
        sampling = prompt.sampling
        body: dict[str, Any] = {
            "model": served.name,
            "max_tokens": prompt.max_tokens,
            "seed": prompt.seed,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **{
                name: getattr(sampling, name)
                for name in ("min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
            },
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "stop": list(sampling.stop_texts) or None,
            "stop_token_ids": sampling.stop_token_ids or None,
        }
        if prompt.messages is not None:
            body |= {"messages": prompt.messages, "logprobs": sampling.logprobs is not None}
            if sampling.logprobs is not None:
                body["top_logprobs"] = sampling.logprobs
            answer = web.post("/v1/chat/completions", body, timeout_s)
        else:
            asked = prompt.token_ids if prompt.token_ids is not None else prompt.text
            body |= {"prompt": asked, "logprobs": sampling.logprobs}
            answer = web.post("/v1/completions", body, timeout_s)
        return _generated(convert(answer, _Completion, "completion"), prompt)

    def abort(self, web: WebClient, request_id: str, timeout_s: float) -> None:
        """vLLM aborts a request when its connection closes."""

    def sleep(self, web: WebClient, timeout_s: float) -> None:
        web.order("/sleep?level=1", {}, timeout_s)

    def wake(self, web: WebClient, timeout_s: float) -> None:
        web.order("/wake_up", {}, timeout_s)

    def load_adapter(self, web: WebClient, name: str, path: str, timeout_s: float) -> None:
        web.order("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, timeout_s)

    def unload_adapter(self, web: WebClient, name: str, timeout_s: float) -> None:
        web.order("/v1/unload_lora_adapter", {"lora_name": name}, timeout_s)


def convert(body: object, kind: Any, what: str) -> Any:
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise BadAnswer(f"{what}: {error}") from error


def _generated(answer: _Completion, prompt: Prompt) -> Generated:
    if len(answer.choices) != 1:
        raise BadAnswer(f"the answer has {len(answer.choices)} choices, asked was one")
    (choice,) = answer.choices
    if choice.finish_reason not in ("stop", "length"):
        raise BadAnswer(f"the generation ended with {choice.finish_reason!r}")
    if choice.token_ids is None and prompt.token_ids is not None:
        raise BadAnswer("the answer has no token_ids")
    ids = choice.token_ids
    if ids is not None and len(ids) != answer.usage.completion_tokens:
        raise BadAnswer(f"the answer holds {len(ids)} tokens and counts {answer.usage.completion_tokens}")
    logprobs = None
    if prompt.sampling.logprobs is not None:
        logprobs = _chat_logprobs(choice) if prompt.messages is not None else _logprobs(choice)
    if ids and choice.finish_reason == "stop" and not isinstance(choice.stop_reason, str):
        ids = ids[:-1]  # the stop token: the model's own (no stop_reason) or one of stop_token_ids
        logprobs = logprobs[: len(ids)] if logprobs is not None else None
    text = choice.text if choice.message is None else choice.message.content
    return Generated(
        token_ids=ids,
        text=text or "",
        finish_reason=choice.finish_reason,
        prompt_tokens=answer.usage.prompt_tokens,
        completion_tokens=len(ids) if ids is not None else answer.usage.completion_tokens,
        logprobs=logprobs,
    )


def _id(token: str) -> int:
    """Of `token_id:42`, as asked for by return_tokens_as_token_ids."""
    prefix, _, number = token.partition(":")
    if prefix != "token_id" or not number.isdigit():
        raise BadAnswer(f"logprobs: {token!r} is not token_id:NUMBER")
    return int(number)


def _logprobs(choice: _Choice) -> list[TokenLogprob]:
    found = convert(choice.logprobs or {}, _Logprobs, "logprobs")
    tops = found.top_logprobs or [None] * len(found.tokens)
    if not len(found.tokens) == len(found.token_logprobs) == len(tops):
        raise BadAnswer("logprobs: its lists have different lengths")
    return [
        TokenLogprob(_id(token), logprob or 0.0, [(_id(one), value) for one, value in (top or {}).items()])
        for token, logprob, top in zip(found.tokens, found.token_logprobs, tops, strict=True)
    ]


def _chat_logprobs(choice: _Choice) -> list[TokenLogprob]:
    found = convert(choice.logprobs or {}, _ChatLogprobs, "logprobs")
    return [
        TokenLogprob(_id(one.token), one.logprob, [(_id(top.token), top.logprob) for top in one.top_logprobs])
        for one in found.content or []
    ]

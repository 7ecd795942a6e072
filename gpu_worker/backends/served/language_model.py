"""A language model on another server: requests side by side, since the server batches by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from gpu_worker.backends.base import INVALID_PARAMETERS, EngineInput, EngineOutput, failed
from gpu_worker.backends.served.dialect import Dialect, Generated, Prompt, Served, TokenLogprob
from gpu_worker.backends.served.failures import ServerFailure, ServerTimeout, Unreachable, verdict
from gpu_worker.backends.served.sampling import seed_of, served_sampling
from gpu_worker.backends.served.web import PROBE_TIMEOUT_S, WebClient
from sie_stream.ports import Clock


class Limits(msgspec.Struct, frozen=True):
    timeout_ms: int
    max_tokens_default: int
    concurrency: int
    """Requests at the server at once."""


class _Message(msgspec.Struct):
    role: str
    content: str


class _Inputs(msgspec.Struct):
    prompt: str | None = None
    text: str | None = None
    messages: list[_Message] | None = None


class Text(msgspec.Struct, frozen=True, omit_defaults=True):
    """Outputs of a model without a tokenizer here, and of requests with stop texts or logprobs."""

    text: str
    finish_reason: str
    logprobs: list[TokenLogprob] | None = None


class ServedLanguageModel:
    """Implements LoadedModel.

    With Stage 0's tokens the answer is token ids. Without (a model that declares no tokenizer) the server makes text
    of `inputs.messages`, `inputs.prompt` or `inputs.text`, and the answer is an outputs object.
    """

    def __init__(
        self,
        dialect: Dialect,
        web: WebClient,
        served: Served,
        limits: Limits,
        memory_bytes: int,
        weights_digest: str,
        clock: Clock,
        alive: Callable[[], bool],
        last_words: Callable[[], str],
    ) -> None:
        self.served = served
        self.memory_bytes = memory_bytes
        self.weights_digest = weights_digest
        self._dialect = dialect
        self._web = web
        self._limits = limits
        self._clock = clock
        self._alive = alive
        self._last_words = last_words
        self._pool = ThreadPoolExecutor(limits.concurrency, thread_name_prefix=f"{dialect.name}-{served.name}")

    @property
    def url(self) -> str:
        """Where its server is."""
        return self._web.url

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def metrics(self) -> dict[str, float]:
        """The server's own gauges and counters without labels' detail (sums over labels). Raises a ServerFailure."""
        return prometheus_sums(self._web.text("/metrics", self._limits.timeout_ms / 1000))

    def run(self, batch: Sequence[EngineInput]) -> list[EngineOutput]:
        """Raises ServerDied when the server is gone, Unreachable when it is there and refuses connections."""
        waiting: list[EngineOutput | Future[EngineOutput]] = []
        for item in batch:
            prompt = self._prompt(item)
            waiting.append(self._pool.submit(self._answer, item, prompt) if isinstance(prompt, Prompt) else prompt)
        return [one.result() if isinstance(one, Future) else one for one in waiting]

    def _prompt(self, item: EngineInput) -> Prompt | EngineOutput:
        try:
            sampling = served_sampling(item)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return failed(item, INVALID_PARAMETERS, f"parameters: {error}")
        length = len(item.token_ids or ())
        context = self.served.context_tokens
        if context and length >= context:
            message = f"the prompt has {length} tokens; prompt and answer share {context}."
            return failed(item, "context_length_exceeded", message)
        asked = sampling.max_tokens or self._limits.max_tokens_default
        most = min(asked, context - length) if context and length else asked
        if item.token_ids:
            return Prompt(item.request_id, sampling, seed_of(item), most, token_ids=item.token_ids)
        try:
            inputs = msgspec.json.decode(item.inputs, type=_Inputs)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return failed(item, "invalid_input", f"inputs: {error}")
        if inputs.messages:
            messages = [{"role": one.role, "content": one.content} for one in inputs.messages]
            return Prompt(item.request_id, sampling, seed_of(item), most, messages=messages)
        text = inputs.prompt or inputs.text
        if not text:
            return failed(item, "invalid_input", "inputs: needs prompt or messages.")
        return Prompt(item.request_id, sampling, seed_of(item), most, text=text)

    def _answer(self, item: EngineInput, prompt: Prompt) -> EngineOutput:
        """One exchange, in a thread of the pool."""
        patience_ms = self._limits.timeout_ms
        if item.deadline_at_ms is not None:
            patience_ms = min(patience_ms, item.deadline_at_ms - self._clock.now_ms())
            if patience_ms <= 0:
                return failed(item, "deadline_exceeded", "the deadline passed before the server was asked.")
        try:
            found = self._dialect.generate(self._web, self.served, prompt, patience_ms / 1000)
        except ServerFailure as failure:
            return self._failed(item, verdict(failure, self._alive, self._last_words))
        return _output(item, prompt, found)

    def _failed(self, item: EngineInput, failure: ServerFailure) -> EngineOutput:
        if isinstance(failure, Unreachable):
            raise failure
        code = failure.code
        if isinstance(failure, ServerTimeout):
            try:
                self._dialect.abort(self._web, item.request_id, PROBE_TIMEOUT_S)
            except ServerFailure as error:
                return failed(item, code, f"{failure}; the request could not be aborted: {error}")
            if item.deadline_at_ms is not None and item.deadline_at_ms <= self._clock.now_ms():
                code = "deadline_exceeded"
        return failed(item, code, str(failure))


def _output(item: EngineInput, prompt: Prompt, found: Generated) -> EngineOutput:
    # A stop text may end inside a token, so what comes before it is text and not tokens.
    as_text = prompt.token_ids is None or found.logprobs is not None or bool(prompt.sampling.stop)
    return EngineOutput(
        item.request_id,
        outputs=msgspec.json.encode(Text(found.text, found.finish_reason, found.logprobs)) if as_text else None,
        token_ids=found.token_ids,
        finish_reason=found.finish_reason,
        prompt_tokens=found.prompt_tokens,
        completion_tokens=found.completion_tokens,
    )


def prometheus_sums(text: str) -> dict[str, float]:
    """Prometheus's text format, each metric summed over its labels; lines that are no sample are skipped."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        name, _, rest = line.partition("{")
        value = rest.rpartition("}")[2] if rest else line.partition(" ")[2]
        name = name.partition(" ")[0]
        if not name or name.startswith("#"):
            continue
        try:
            sums[name] = sums.get(name, 0.0) + float(value.split()[0])
        except (ValueError, IndexError):
            continue
    return sums

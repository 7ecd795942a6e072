"""One request inside the decoder: what was asked, what has been chosen so far, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from gpu_worker.backends.base import EngineInput, EngineOutput, failed
from gpu_worker.backends.decoder.choice import Chosen, chosen, generator_of, next_token, penalised, without
from gpu_worker.decoding.parameters import TEMPERATURE_MIN, Sampling, sampling_of
from gpu_worker.decoding.sequence import Sequence as Tokens
from gpu_worker.decoding.stops import look_for_stops

Detokenise = Callable[[Sequence[int]], str]


class DecoderLimits(msgspec.Struct, frozen=True):
    """What the model allows. Counts are tokens."""

    context_tokens: int
    max_tokens_default: int
    stop_token_ids: frozenset[int]
    vocabulary: int


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Outputs object of a request that the engine must put into words itself."""

    text: str
    finish_reason: str
    logprobs: tuple[Chosen, ...] | None = None
    log_likelihood: float | None = None
    """Of the whole prompt after its first token, in nats."""
    prompt_logprobs: tuple[Chosen, ...] | None = None


_encode = msgspec.json.Encoder().encode


@dataclass(slots=True, eq=False)
class Flight:
    """`take` is told each chosen token; `scores` grows while a prompt is scored."""

    item: EngineInput
    tokens: Tokens
    sampling: Sampling
    generator: torch.Generator
    stop_token_ids: frozenset[int]
    detokenise: Detokenise | None
    started_ms: float
    first_token_ms: float | None = None
    reported: list[Chosen] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    shown: int = 0
    """Characters of the answer that are final; used with stop texts."""
    text: str | None = None
    """The answer up to a stop text, once there was one."""

    def choose(self, logits: Tensor, likeliest: int) -> str | None:
        """Takes the next token from (vocabulary,) logits, the largest at `likeliest`. The reason to finish, or None."""
        sampling = self.sampling
        told, length = logits, len(self.tokens.ids) - self.tokens.prompt_tokens
        if sampling.penalised:
            logits = penalised(logits, sampling, self.tokens.ids[: self.tokens.prompt_tokens], self.tokens.answer)
        if length < sampling.min_tokens and self.stop_token_ids:
            logits = without(logits, sorted(one for one in self.stop_token_ids if one < logits.shape[-1]))
        if sampling.temperature < TEMPERATURE_MIN and logits is told:
            token = likeliest
        else:
            token = next_token(logits, sampling, self.generator)
        if token in self.stop_token_ids:
            return "stop"
        self.tokens.ids.append(token)
        if sampling.logprobs is not None:
            self.reported.append(chosen(told, token, sampling.logprobs))
        if sampling.stop and self._stopped():
            return "stop"
        return "length" if len(self.tokens.ids) - self.tokens.prompt_tokens >= self.tokens.tokens_max else None

    def _stopped(self) -> bool:
        assert self.detokenise is not None, "admitted only with a tokenizer"
        text = self.detokenise(self.tokens.answer)
        look = look_for_stops(text, self.sampling.stop_texts, min(self.shown, len(text)))
        self.shown = look.shown
        if look.stopped:
            self.text = text[: look.shown]
        return look.stopped

    def ended(self, finish_reason: str) -> EngineOutput:
        answer = self.tokens.answer
        outputs: bytes | None = None
        if self.text is not None or self.sampling.logprobs is not None:
            assert self.detokenise is not None, "admitted only with a tokenizer"
            text = self.detokenise(answer) if self.text is None else self.text
            logprobs = None if self.sampling.logprobs is None else tuple(self.reported)
            outputs = _encode(Answer(text, finish_reason, logprobs))
        return EngineOutput(
            self.item.request_id,
            outputs=outputs,
            token_ids=answer,
            finish_reason=finish_reason,
            prompt_tokens=self.tokens.prompt_tokens,
            completion_tokens=len(answer),
            first_token_ms=self.first_token_ms,
        )

    def scored(self) -> EngineOutput:
        """The answer to a request for the likelihood of its prompt."""
        ids = self.tokens.ids
        told = tuple(Chosen(token, score) for token, score in zip(ids[1:], self.scores, strict=True))
        outputs = _encode(Answer("", "stop", None, sum(self.scores), told))
        return EngineOutput(
            self.item.request_id,
            outputs=outputs,
            token_ids=[],
            finish_reason="stop",
            prompt_tokens=len(ids),
            first_token_ms=self.first_token_ms,
        )


def admitted(
    ticket: int, item: EngineInput, limits: DecoderLimits, detokenise: Detokenise | None, now_ms: float
) -> Flight | EngineOutput:
    """The request on its way, or why it cannot be served."""
    prompt = item.token_ids
    if not prompt:
        return failed(item, "tokens_missing", "this model needs token ids: Stage 0 must tokenise the text for it.")
    if not all(0 <= token < limits.vocabulary for token in prompt):
        message = f"a token id lies outside the vocabulary of {limits.vocabulary}: another model's tokenizer was used."
        return failed(item, "invalid_input", message)
    try:
        sampling = sampling_of(item.parameters)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return failed(item, "invalid_parameters", f"parameters: {error}")
    if detokenise is None and (sampling.stop or sampling.logprobs is not None):
        asked = "stop" if sampling.stop else "logprobs"
        message = f"parameters.{asked}: the model's declaration names no tokenizer, which this needs."
        return failed(item, "invalid_parameters", message)
    if len(prompt) >= limits.context_tokens + (1 if sampling.score else 0):
        message = f"the prompt has {len(prompt)} tokens; prompt and answer share {limits.context_tokens}."
        return failed(item, "context_length_exceeded", message)
    room = limits.context_tokens - len(prompt)
    tokens_max = 0 if sampling.score else min(sampling.max_tokens or limits.max_tokens_default, room)
    tokens = Tokens(
        ticket=ticket,
        ids=list(prompt),
        tokens_max=tokens_max,
        priority=item.priority,
        deadline_at_ms=item.deadline_at_ms,
        reuses_prefix=not sampling.score,
    )
    stops = limits.stop_token_ids.union(sampling.stop_token_ids)
    return Flight(item, tokens, sampling, generator_of(item), stops, detokenise, now_ms)

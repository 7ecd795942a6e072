"""One request inside the decoder: what was asked, what has been chosen so far, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from gpu_worker.backends.base import INVALID_PARAMETERS, EngineDelta, EngineInput, EngineOutput, failed
from gpu_worker.backends.decoder.choice import Chosen, chosen, generator_of, next_token, penalised, without
from gpu_worker.backends.decoder.grammar import Grammar, GrammarRefused, Grammars
from gpu_worker.backends.decoder.readers import Embedder, PromptReader, ScoreReader, prompt_only
from gpu_worker.decoding.parameters import TEMPERATURE_MIN, Sampling, sampling_of
from gpu_worker.decoding.sequence import Sequence as Tokens
from gpu_worker.decoding.sequence import all_blocks
from gpu_worker.decoding.transcript import Detokenise, Transcript

TOLD_EVERY_MS = 50.0
"""How often the growth of one answer is told at most; its first token is told at once."""


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


_encode = msgspec.json.Encoder().encode


@dataclass(slots=True, eq=False)
class Flight:
    """`reader`: of a request that generates nothing."""

    item: EngineInput
    tokens: Tokens
    sampling: Sampling
    generator: torch.Generator
    stop_token_ids: frozenset[int]
    detokenise: Detokenise | None
    started_ms: float
    first_token_ms: float | None = None
    reported: list[Chosen] = field(default_factory=list)
    reader: PromptReader | None = None
    transcript: Transcript | None = None
    """The answer's text as far as it is final; kept for stop texts and for those who follow the answer."""
    grammar: Grammar | None = None
    told_at_ms: float = float("-inf")
    told_tokens: int = 0
    told_characters: int = 0
    stored: int = 0
    """Of its first blocks, how many were brought to the tier, or found there."""
    kept: Tensor | None = None
    """(pages, bytes) of its keys and values in host memory, while it waits without blocks."""

    @property
    def reads_all_rows(self) -> bool:
        return self.reader is not None and self.reader.all_rows

    def choose(self, logits: Tensor, likeliest: int) -> str | None:
        """Takes the next token from (vocabulary,) logits, the largest at `likeliest`. The reason to finish, or None.

        Raises GrammarRefused when the form of the answer cannot be followed any further.
        """
        sampling = self.sampling
        told, length = logits, len(self.tokens.ids) - self.tokens.prompt_tokens
        if sampling.penalised:
            logits = penalised(logits, sampling, self.tokens.ids[: self.tokens.prompt_tokens], self.tokens.answer)
        if self.grammar is not None:
            logits = self.grammar.allowed(logits)
        elif length < sampling.min_tokens and self.stop_token_ids:
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
        if sampling.stop and self.transcript is not None:
            self.transcript.read(self.tokens.answer)
            if self.transcript.stopped:
                return "stop"
        if self.grammar is not None and self.grammar.complete_after(token):
            return "stop"
        return "length" if len(self.tokens.ids) - self.tokens.prompt_tokens >= self.tokens.tokens_max else None

    def grown(self, now_ms: float) -> EngineDelta | None:
        """What to tell of an answer under way, if it is time and anything is final that was not told."""
        if now_ms - self.told_at_ms < TOLD_EVERY_MS:
            return None
        if self.transcript is not None and not self.sampling.stop:  # for stop texts every token was read already
            self.transcript.read(self.tokens.answer)
        return self._untold(now_ms)

    def last_grown(self, now_ms: float) -> EngineDelta | None:
        """The rest, now that the answer has ended."""
        if self.transcript is not None:
            self.transcript.finish(self.tokens.answer)
        return self._untold(now_ms)

    def _untold(self, now_ms: float) -> EngineDelta | None:
        fresh = self.tokens.answer[self.told_tokens :]
        text = "" if self.transcript is None else self.transcript.text[self.told_characters :]
        if not text and (self.transcript is not None or not fresh):
            return None  # tokens wait for the text that they complete
        self.told_at_ms = now_ms
        self.told_tokens += len(fresh)
        self.told_characters += len(text)
        return EngineDelta(fresh, text)

    def tell_again(self) -> None:
        """Whoever follows the answer begins anew: tell all of it, at once."""
        self.told_at_ms = float("-inf")
        self.told_tokens = self.told_characters = 0

    def ended(self, finish_reason: str) -> EngineOutput:
        answer = self.tokens.answer
        outputs: bytes | None = None
        stopped = self.transcript.text if self.transcript is not None and self.transcript.stopped else None
        if stopped is not None or self.sampling.logprobs is not None:
            assert self.detokenise is not None, "admitted only with a tokenizer"
            text = self.detokenise(answer) if stopped is None else stopped
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


def admitted(
    ticket: int,
    item: EngineInput,
    limits: DecoderLimits,
    detokenise: Detokenise | None,
    grammars: Grammars | None,
    now_ms: float,
) -> Flight | EngineOutput:
    """The request on its way, or why it cannot be served. `grammars` is there with `detokenise`."""
    refused = _token_problem(item, limits)
    if refused is not None:
        return refused
    try:
        sampling = sampling_of(item.parameters)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return failed(item, INVALID_PARAMETERS, f"parameters: {error}")
    asked = _needs_text(sampling)
    if detokenise is None and asked:
        message = f"parameters.{asked}: the model's declaration names no tokenizer, which this needs."
        return failed(item, INVALID_PARAMETERS, message)
    refused = _length_problem(item, limits, 0 if sampling.score else 1)
    if refused is not None:
        return refused
    if sampling.score:
        tokens = prompt_only(ticket, item)
        return Flight(item, tokens, sampling, generator_of(item), frozenset(), None, now_ms, reader=ScoreReader())
    tokens = prompt_only(ticket, item, all_blocks)
    tokens.tokens_max = min(
        sampling.max_tokens or limits.max_tokens_default, limits.context_tokens - tokens.prompt_tokens
    )
    grammar: Grammar | None = None
    if sampling.response_format is not None and grammars is not None:
        try:
            grammar = grammars.begin(sampling.response_format)
        except GrammarRefused as refusal:
            return failed(item, refusal.code, f"parameters.response_format: {refusal.message}")
    stops = limits.stop_token_ids.union(sampling.stop_token_ids)
    flight = Flight(item, tokens, sampling, generator_of(item), stops, detokenise, now_ms, grammar=grammar)
    if detokenise is not None and (sampling.stop or item.stream):
        flight.transcript = Transcript(detokenise, sampling.stop_texts)
    return flight


def admitted_to(
    embedder: Embedder, ticket: int, item: EngineInput, limits: DecoderLimits, now_ms: float
) -> Flight | EngineOutput:
    """As `admitted`, for a model with an embedding head."""
    refused = _token_problem(item, limits) or embedder.problem(item) or _length_problem(item, limits, 0)
    if refused is not None:
        return refused
    tokens, reader = embedder.begin(ticket, item)
    return Flight(item, tokens, Sampling(), generator_of(item), frozenset(), None, now_ms, reader=reader)


def _token_problem(item: EngineInput, limits: DecoderLimits) -> EngineOutput | None:
    prompt = item.token_ids
    if not prompt:
        return failed(item, "tokens_missing", "this model needs token ids: Stage 0 must tokenise the text for it.")
    if not all(0 <= token < limits.vocabulary for token in prompt):
        message = f"a token id lies outside the vocabulary of {limits.vocabulary}: another model's tokenizer was used."
        return failed(item, "invalid_input", message)
    return None


def _length_problem(item: EngineInput, limits: DecoderLimits, answer: int) -> EngineOutput | None:
    """answer: tokens for which there must be room after the prompt."""
    count = len(item.token_ids or ())
    if count + answer > limits.context_tokens:
        message = f"the prompt has {count} tokens; prompt and answer share {limits.context_tokens}."
        return failed(item, "context_length_exceeded", message)
    return None


def _needs_text(sampling: Sampling) -> str:
    """The first parameter for which the engine must know the text of tokens; empty when there is none."""
    asked = {
        "stop": bool(sampling.stop),
        "logprobs": sampling.logprobs is not None,
        "response_format": sampling.response_format is not None,
    }
    return next((name for name, wanted in asked.items() if wanted), "")

"""Batched generation with a transformers decoder: one prefill, then a token per step for every unfinished request.

A batch runs until its last request is done; finished rows leave it at once, so the steps get cheaper. Continuous
batching over a paged pool takes this loop's place later, behind the same `LoadedModel.run`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from transformers import DynamicCache, PreTrainedModel

from gpu_worker.backends.base import EngineInput, EngineOutput, failed
from gpu_worker.backends.sampling import Sampling, generator_of, next_token, sampling_of
from sie_stream.ports import Clock


class GenerationLimits(msgspec.Struct, frozen=True):
    """What the model allows. Counts are tokens."""

    context_tokens: int
    max_tokens_default: int
    stop_token_ids: frozenset[int]
    pad_token_id: int
    vocabulary: int


@dataclass(slots=True)
class Row:
    """One request on its way."""

    item: EngineInput
    place: int
    prompt: list[int]
    sampling: Sampling
    generator: torch.Generator
    tokens_max: int
    stop_token_ids: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    first_token_ms: float | None = None

    def take(self, token: int) -> str | None:
        """Adds a token. Returns the reason to finish, or None to go on; a stop token is not part of the answer."""
        if token in self.stop_token_ids:
            return "stop"
        self.tokens.append(token)
        return "length" if len(self.tokens) >= self.tokens_max else None

    def answer(self, finish_reason: str) -> EngineOutput:
        return EngineOutput(
            self.item.request_id,
            token_ids=self.tokens,
            finish_reason=finish_reason,
            prompt_tokens=len(self.prompt),
            completion_tokens=len(self.tokens),
            first_token_ms=self.first_token_ms,
        )


def admitted(item: EngineInput, place: int, limits: GenerationLimits) -> Row | EngineOutput:
    """The request as a row, or why it cannot be served."""
    prompt = item.token_ids
    if not prompt:
        return failed(item, "tokens_missing", "this model needs token ids: Stage 0 must tokenise the text for it.")
    if not all(0 <= token < limits.vocabulary for token in prompt):
        message = f"a token id lies outside the vocabulary of {limits.vocabulary}: another model's tokenizer was used."
        return failed(item, "invalid_input", message)
    if len(prompt) >= limits.context_tokens:
        message = f"the prompt has {len(prompt)} tokens; prompt and answer share {limits.context_tokens}."
        return failed(item, "context_length_exceeded", message)
    try:
        sampling = sampling_of(item)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return failed(item, "invalid_parameters", f"parameters: {error}")
    return Row(
        item=item,
        place=place,
        prompt=prompt,
        sampling=sampling,
        generator=generator_of(item),
        tokens_max=min(sampling.max_tokens or limits.max_tokens_default, limits.context_tokens - len(prompt)),
        stop_token_ids=limits.stop_token_ids.union(sampling.stop_token_ids),
    )


class GenerationModel:
    """A loaded decoder language model. Implements LoadedModel."""

    def __init__(
        self, model: PreTrainedModel, limits: GenerationLimits, clock: Clock, memory_bytes: int, weights_digest: str
    ) -> None:
        self._model = model
        self._limits = limits
        self._clock = clock
        self.memory_bytes = memory_bytes
        self.weights_digest = weights_digest

    def run(self, batch: Sequence[EngineInput]) -> list[EngineOutput]:
        answers: dict[int, EngineOutput] = {}
        rows: list[Row] = []
        for place, item in enumerate(batch):
            row = admitted(item, place, self._limits)
            if isinstance(row, Row):
                rows.append(row)
            else:
                answers[place] = row
        if rows:
            self._generate(rows, answers)
        return [answers[place] for place in range(len(batch))]

    @torch.inference_mode()
    def _generate(self, rows: list[Row], answers: dict[int, EngineOutput]) -> None:
        """Fills `answers` by place. Row i of every tensor belongs to rows[i]."""
        started_ms = self._clock.monotonic_ms()
        ids, mask = left_padded([row.prompt for row in rows], self._limits.pad_token_id)
        ids, mask = ids.to(self._model.device), mask.to(self._model.device)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        cache = DynamicCache()
        while rows:
            logits = self._step(ids, mask, positions, cache)
            tokens = self._choose(rows, logits)
            now_ms = self._clock.now_ms()
            going: list[int] = []
            for index, (row, token) in enumerate(zip(rows, tokens, strict=True)):
                if row.first_token_ms is None:
                    row.first_token_ms = self._clock.monotonic_ms() - started_ms
                reason = row.take(token)
                if reason is not None:
                    answers[row.place] = row.answer(reason)
                elif row.item.deadline_at_ms is not None and now_ms >= row.item.deadline_at_ms:
                    message = f"the deadline passed after {len(row.tokens)} of at most {row.tokens_max} tokens."
                    answers[row.place] = failed(row.item, "deadline_exceeded", message)
                else:
                    going.append(index)
            if len(going) < len(rows):
                rows = [rows[index] for index in going]
                tokens = [tokens[index] for index in going]
                if not rows:
                    return
                kept = torch.tensor(going, device=mask.device)
                mask, positions = mask[kept], positions[kept]
                cache.batch_select_indices(kept)
            ids = torch.tensor(tokens, device=mask.device).unsqueeze(1)
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            positions = positions[:, -1:] + 1

    def _step(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: DynamicCache
    ) -> torch.Tensor:
        """(rows, vocabulary) logits of the next token, in float32."""
        out = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1].float()

    def _choose(self, rows: Sequence[Row], logits: torch.Tensor) -> list[int]:
        likeliest = logits.argmax(dim=-1).tolist()
        return [
            likeliest[index]
            if row.sampling.temperature == 0.0
            else next_token(logits[index], row.sampling, row.generator)
            for index, row in enumerate(rows)
        ]


def left_padded(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of different lengths -> (ids, mask), so that every row's last token is in the last column."""
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), pad_id, dtype=torch.long)
    mask = torch.zeros((len(prompts), longest), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return ids, mask

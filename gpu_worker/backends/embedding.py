"""What both embedding engines (torch and onnx) share: token batches in, unit vectors out.

Sentence-transformers' recipe for MiniLM: mean of the last hidden states over real tokens, then L2 normalisation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpu_worker.backends.base import EngineInput, EngineOutput, failed, not_finite
from gpu_worker.backends.slots.weights import Weight

Tokens = NDArray[np.int64]
Hidden = NDArray[np.float32]
Forward = Callable[[Tokens, Tokens], Hidden]
"""(ids, mask), both (batch, tokens) -> last hidden state (batch, tokens, width)."""

GROUP = 8
"""Sequences per run of the network: neighbours are padded to the longest, so a small sorted group wastes less."""

DECIMALS = 7
"""Digits after the point in the answer: float32 holds no more of a unit vector, and the record is half as long."""


WRONG_TOKENIZER = "another model's tokenizer was used; declare the one that belongs to these weights."


class Embedding(msgspec.Struct, frozen=True, gc=False):
    """The `outputs` object."""

    embedding: list[float]


class TokensRefused(Exception):
    """Raised by a `forward` whose network says itself that an id, or a position, is none of its tables."""


class StepRefused(TokensRefused):
    """The same, of a network that stumbled over something: the number of tokens, if fewer can be read, or itself."""


class EmbeddingModel:
    """A loaded embedder: any `forward` between padding and pooling. Implements LoadedModel.

    vocabulary: ids are below it; None: only the network knows, and `forward` raises TokensRefused.
    weights: those that can be moved (see backends/slots).
    """

    def __init__(
        self,
        forward: Forward,
        tokens_max: int,
        pad_id: int,
        memory_bytes: int,
        weights_digest: str,
        vocabulary: int | None = None,
        weights: Sequence[Weight] = (),
    ) -> None:
        self._forward = forward
        self._vocabulary = vocabulary
        self._tokens_max = tokens_max
        self._pad_id = pad_id
        self._encode = msgspec.json.Encoder().encode
        self.memory_bytes = memory_bytes
        self.weights_digest = weights_digest
        self._weights = weights

    def weights(self) -> Sequence[Weight]:
        return self._weights

    def run(self, batch: Sequence[EngineInput]) -> list[EngineOutput]:
        problems = [self._problem(item) for item in batch]
        usable = [item for item, problem in zip(batch, problems, strict=True) if problem is None]
        order = sorted(range(len(usable)), key=lambda place: len(usable[place].token_ids or ()))
        served: dict[int, EngineOutput] = {}
        for start in range(0, len(order), GROUP):
            group = order[start : start + GROUP]
            served.update(zip(group, self._answered([usable[place] for place in group]), strict=True))
        answers = iter(served[place] for place in range(len(usable)))
        return [next(answers) if problem is None else problem for problem in problems]

    def _problem(self, item: EngineInput) -> EngineOutput | None:
        if not item.token_ids:
            return failed(item, "tokens_missing", "this model needs token ids: Stage 0 must tokenise the text for it.")
        if len(item.token_ids) > self._tokens_max:
            return self._too_long(item)
        # A negative id would count from the end of the table.
        least, most = min(item.token_ids), max(item.token_ids)
        if least < 0 or (self._vocabulary is not None and most >= self._vocabulary):
            size = "" if self._vocabulary is None else f" of {self._vocabulary}"
            message = f"token id {least if least < 0 else most} lies outside the vocabulary{size}: {WRONG_TOKENIZER}"
            return failed(item, "invalid_input", message)
        return None

    def _too_long(self, item: EngineInput) -> EngineOutput:
        """Nothing is cut off here: where a text is to be cut, its tokenizer.json says so, and Stage 0 does it."""
        message = (
            f"{len(item.token_ids or ())} tokens, but the model reads at most {self._tokens_max} (what the network has "
            "positions for, and backend.config.max_tokens). Shorten the text, or set `truncation` in tokenizer.json."
        )
        return failed(item, "context_length_exceeded", message)

    def _answered(self, items: Sequence[EngineInput]) -> list[EngineOutput]:
        """One that the network refuses fails alone."""
        try:
            return self._embed(items)
        except TokensRefused as refused:
            if len(items) > 1:
                return [answer for item in items for answer in self._answered([item])]
            return [self._refused_alone(items[0], refused)]

    def _refused_alone(self, item: EngineInput, refused: TokensRefused) -> EngineOutput:
        """Too many tokens, if the network reads fewer of them. Raises `refused` when it is not the input's fault."""
        count = len(item.token_ids or ())
        longest = self._longest(count)
        if 0 < longest < count:
            self._tokens_max = longest
            return self._too_long(item)
        if isinstance(refused, StepRefused):
            raise refused
        return failed(item, "invalid_input", f"a token id is too large for the network: {WRONG_TOKENIZER} {refused}")

    def _longest(self, count: int) -> int:
        """How many tokens the network reads, at most `count`: found by asking it, since some files do not say."""
        reads, refuses = 0, count + 1
        at = count
        while refuses - reads > 1:
            # Id 0 is in every vocabulary.
            ids = np.zeros((1, at), np.int64)
            try:
                self._forward(ids, np.ones_like(ids))
                reads = at
            except TokensRefused:
                refuses = at
            at = (reads + refuses) // 2
        return reads

    def _embed(self, items: Sequence[EngineInput]) -> list[EngineOutput]:
        ids, mask = padded([item.token_ids or [] for item in items], self._pad_id)
        vectors = np.round(mean_pooled(self._forward(ids, mask), mask).astype(np.float64), DECIMALS).tolist()
        lengths = mask.sum(axis=1).tolist()
        # The sum of a unit vector's numbers is one, too, unless one of them is not.
        return [
            EngineOutput(item.request_id, self._encode(Embedding(vector)), prompt_tokens=length)
            if math.isfinite(sum(vector))
            else not_finite(item, "its vector")
            for item, vector, length in zip(items, vectors, lengths, strict=True)
        ]


def padded(sequences: Sequence[Sequence[int]], pad_id: int) -> tuple[Tokens, Tokens]:
    """Sequences of different lengths -> (ids, mask), padded on the right to the longest."""
    longest = max(map(len, sequences))
    ids = np.full((len(sequences), longest), pad_id, np.int64)
    mask = np.zeros((len(sequences), longest), np.int64)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence
        mask[row, : len(sequence)] = 1
    return ids, mask


def mean_pooled(hidden: Hidden, mask: Tokens) -> Hidden:
    """(batch, tokens, width) -> (batch, width) of length 1."""
    weights = mask[:, :, None].astype(np.float32)
    mean = (hidden * weights).sum(axis=1) / weights.sum(axis=1)
    return mean / np.maximum(np.linalg.norm(mean, axis=1, keepdims=True), 1e-12)

"""Requests that generate nothing: what is read from the states of their prompt, chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from gpu_worker.backends.base import EngineInput, EngineOutput, failed, not_finite
from gpu_worker.backends.decoder.choice import Chosen, scored
from gpu_worker.backends.embedding import DECIMALS, Embedding
from gpu_worker.decoding.sequence import Chunk, Reusable, all_blocks, no_blocks
from gpu_worker.decoding.sequence import Sequence as Tokens

POOLINGS = ("mean", "last")


class Reading(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was read of a prompt so far: enough to go on elsewhere. vector: float64 numbers as bytes, if any."""

    scores: list[float] = []
    vector: bytes = b""


class PromptReader(Protocol):
    """Of one request. `read` is called for every chunk; one that starts over tells so by its start."""

    @property
    def reading(self) -> Reading: ...

    def resume(self, reading: Reading) -> None:
        """Go on where another reader of the same kind and prompt stood. Raises ValueError for what is none."""
        ...

    @property
    def all_rows(self) -> bool:
        """Whether every row is read, or only the last one of the prompt."""
        ...

    def read(self, chunk: Chunk, rows: Tensor) -> None:
        """rows: of the chunk, or its last one if not `all_rows` (0 rows as long as it does not end the prompt)."""
        ...

    def answer(self, item: EngineInput, first_token_ms: float | None) -> EngineOutput:
        """Once the whole prompt was read."""
        ...


class Scored(msgspec.Struct, frozen=True, omit_defaults=True):
    """Outputs object of a prompt that was scored."""

    text: str
    finish_reason: str
    log_likelihood: float
    """Of the whole prompt after its first token, in nats."""
    prompt_logprobs: tuple[Chosen, ...]


class ScoreReader:
    """How likely every token of the prompt was. Reads logits."""

    all_rows = True

    def __init__(self) -> None:
        self._scores: list[float] = []

    @property
    def reading(self) -> Reading:
        return Reading(scores=list(self._scores))

    def resume(self, reading: Reading) -> None:
        self._scores = list(reading.scores)

    def read(self, chunk: Chunk, rows: Tensor) -> None:
        if chunk.start == 0:
            self._scores.clear()  # begun again, after others went first
        following = chunk.sequence.ids[chunk.start + 1 : chunk.end + 1]
        self._scores += scored(rows[: len(following)], following)

    def answer(self, item: EngineInput, first_token_ms: float | None) -> EngineOutput:
        ids = item.token_ids or []
        if not math.isfinite(sum(self._scores)):
            return not_finite(item, "a log-probability of its prompt")
        told = tuple(Chosen(token, score) for token, score in zip(ids[1:], self._scores, strict=True))
        outputs = _encode(Scored("", "stop", sum(self._scores), told))
        return EngineOutput(
            item.request_id,
            outputs=outputs,
            token_ids=[],
            finish_reason="stop",
            prompt_tokens=len(ids),
            first_token_ms=first_token_ms,
        )


class PrefixSums:
    """Sums of the states of whole prefixes, by the digest of their last block.

    The mean over a prompt needs the states of all its tokens, which the pool does not keep: a block of it can only be
    used again if the sum up to its end was kept as well. Those that were kept first are dropped first.
    """

    def __init__(self, block_tokens: int, count_max: int) -> None:
        self.block_tokens = block_tokens
        self._count_max = count_max
        self._sums: dict[bytes, Tensor] = {}

    def usable(self, digests: Sequence[bytes]) -> int:
        """How many of the first blocks can be used again."""
        return next((count for count in range(len(digests), 0, -1) if digests[count - 1] in self._sums), 0)

    def sum_of(self, digest: bytes) -> Tensor:
        return self._sums[digest]

    def keep(self, digest: bytes, total: Tensor) -> None:
        self._sums.pop(digest, None)
        self._sums[digest] = total.clone()
        while len(self._sums) > self._count_max:
            del self._sums[next(iter(self._sums))]


class MeanReader:
    """The mean of the states, as a unit vector. Adds one token after the other, in float64: the same bits however the
    prompt is cut and whatever of it was known before."""

    all_rows = True

    def __init__(self, sums: PrefixSums) -> None:
        self._sums = sums
        self._total: Tensor | None = None
        self._adopted: Tensor | None = None

    @property
    def reading(self) -> Reading:
        return Reading(vector=_bytes_of(self._total))

    def resume(self, reading: Reading) -> None:
        self._total = _vector_of(reading.vector)

    def usable(self, digests: Sequence[bytes]) -> int:
        """Also holds the sum that goes with them, which may be dropped before the first chunk has run."""
        count = self._sums.usable(digests)
        self._adopted = self._sums.sum_of(digests[count - 1]) if count else None
        self._total = None
        return count

    def read(self, chunk: Chunk, rows: Tensor) -> None:
        rows = rows.cpu().double()
        if chunk.start == 0 or self._total is None:
            known = self._adopted if chunk.start else None
            self._total = torch.zeros(rows.shape[1], dtype=torch.float64) if known is None else known.clone()
        block = self._sums.block_tokens
        for end, row in enumerate(rows, chunk.start + 1):
            self._total += row
            if end % block == 0:
                self._sums.keep(chunk.sequence.digests[end // block - 1], self._total)

    def answer(self, item: EngineInput, first_token_ms: float | None) -> EngineOutput:
        assert self._total is not None, "a prompt has at least one token"
        return _embedded(item, self._total / len(item.token_ids or ()), first_token_ms)


class LastReader:
    """The state of the last token, as a unit vector."""

    all_rows = False

    def __init__(self) -> None:
        self._state: Tensor | None = None

    @property
    def reading(self) -> Reading:
        return Reading(vector=_bytes_of(self._state))

    def resume(self, reading: Reading) -> None:
        self._state = _vector_of(reading.vector)

    def read(self, chunk: Chunk, rows: Tensor) -> None:
        if chunk.chooses:
            self._state = rows[-1].cpu().double()

    def answer(self, item: EngineInput, first_token_ms: float | None) -> EngineOutput:
        assert self._state is not None, "read before it is asked"
        return _embedded(item, self._state, first_token_ms)


class _NoParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seed: int | None = None
    """Ingress takes it for every model."""


_no_parameters = msgspec.json.Decoder(_NoParameters)


class Embedder:
    """What a model with an embedding head makes of its requests."""

    def __init__(self, pooling: str, sums: PrefixSums) -> None:
        self._pooling = pooling
        self._sums = sums

    def problem(self, item: EngineInput) -> EngineOutput | None:
        try:
            _no_parameters.decode(item.parameters or b"{}")
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return failed(item, "invalid_parameters", f"parameters: {error}; an embedding head follows none.")
        return None

    def begin(self, ticket: int, item: EngineInput) -> tuple[Tokens, PromptReader]:
        reader: MeanReader | LastReader = MeanReader(self._sums) if self._pooling == "mean" else LastReader()
        reuse = reader.usable if isinstance(reader, MeanReader) else all_blocks
        return prompt_only(ticket, item, reuse), reader


def prompt_only(ticket: int, item: EngineInput, reusable: Reusable = no_blocks) -> Tokens:
    """A sequence that gets no answer."""
    return Tokens(
        ticket=ticket,
        ids=list(item.token_ids or ()),
        tokens_max=0,
        priority=item.priority,
        deadline_at_ms=item.deadline_at_ms,
        reusable=reusable,
    )


def _bytes_of(vector: Tensor | None) -> bytes:
    return b"" if vector is None else vector.numpy().tobytes()


def _vector_of(content: bytes) -> Tensor | None:
    return torch.from_numpy(np.frombuffer(content, dtype=np.float64).copy()) if content else None


def _embedded(item: EngineInput, state: Tensor, first_token_ms: float | None) -> EngineOutput:
    """As a unit vector. Like other embedders it tells no tokens and no reason to finish."""
    if not bool(torch.isfinite(state).all()):
        return not_finite(item, "its vector")
    vector = np.round((state / state.norm().clamp(min=1e-12)).numpy(), DECIMALS).tolist()
    outputs = _encode(Embedding(vector))
    tokens = len(item.token_ids or ())
    return EngineOutput(item.request_id, outputs, prompt_tokens=tokens, first_token_ms=first_token_ms)


_encode = msgspec.json.Encoder().encode

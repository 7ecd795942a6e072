"""Choosing the next token of one request.

Every request has its own generator, seeded by its own seed, and draws one number per token. What it draws therefore
does not depend on which requests share its batch.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec
import torch

from gpu_worker.backends.base import EngineInput


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `parameters` that the engine follows. Others (`stop` texts are to come) are refused, never ignored."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """None: the model's default."""
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=2.0)] = 0.0
    """0 always takes the likeliest token."""
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    """Only the likeliest tokens that together reach this probability are drawn from."""
    stop_token_ids: tuple[int, ...] = ()
    """More stop tokens than the model's own."""
    seed: int | None = None
    """Ingress has read it already; the item carries it."""


_parameters = msgspec.json.Decoder(Sampling)


def sampling_of(item: EngineInput) -> Sampling:
    """Raises msgspec.DecodeError (ValidationError) that names the parameter."""
    return _parameters.decode(item.parameters) if item.parameters else Sampling()


def generator_of(item: EngineInput) -> torch.Generator:
    """The request's own source of chance: from its seed, else from its id, so that a retry draws the same."""
    seed = item.seed
    if seed is None:
        seed = int.from_bytes(hashlib.blake2b(item.request_id.encode(), digest_size=8).digest(), "big")
    return torch.Generator().manual_seed(seed & 0x7FFF_FFFF_FFFF_FFFF)


def next_token(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token id from (vocabulary,) logits.

    Draws by inverse transform over the tokens in order of likelihood: a last-bit difference in the logits then moves
    the boundaries between tokens by as little, instead of drawing anew.
    """
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    shares, order = torch.softmax(logits.double().cpu() / sampling.temperature, dim=-1).sort(
        descending=True, stable=True
    )
    reached = shares.cumsum(dim=-1)
    kept = int((reached < sampling.top_p).sum()) + 1
    reached = reached[:kept]
    drawn = torch.rand(1, generator=generator, dtype=torch.float64) * reached[-1]
    return int(order[min(int((reached <= drawn).sum()), len(reached) - 1)])

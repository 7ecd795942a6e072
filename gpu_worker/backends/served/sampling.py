"""The `parameters` of a request to a language model on another server."""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec

from gpu_worker.backends.base import EngineInput

Penalty = Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)]


class ServedSampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is passed on. Other names are refused, never ignored. The defaults are those of the `torch` backend."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """None: the model's default."""
    min_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=2.0)] = 0.0
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0
    """0: all tokens."""
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)] = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0.0, le=2.0)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    stop: tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=200)], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    """Report the log-probability of every chosen token, and as many of the likeliest at each place."""
    seed: int | None = None
    """Ingress has read it already; the item carries it."""


_parameters = msgspec.json.Decoder(ServedSampling)


def served_sampling(item: EngineInput) -> ServedSampling:
    """Raises msgspec.DecodeError (ValidationError) that names the parameter, or UnicodeDecodeError."""
    return _parameters.decode(item.parameters) if item.parameters else ServedSampling()


def seed_of(item: EngineInput) -> int:
    """31 bits: the request's own seed, else one from its id, so that a retry draws the same."""
    seed = item.seed
    if seed is None:
        seed = int.from_bytes(hashlib.blake2b(item.request_id.encode(), digest_size=8).digest(), "big")
    return seed & 0x7FFF_FFFF

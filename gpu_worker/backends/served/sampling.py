"""The `parameters` of a request to a language model on another server: those of our own decoders, less what cannot be
passed on."""

from __future__ import annotations

import hashlib

import msgspec

from gpu_worker.backends.base import EngineInput
from gpu_worker.decoding.parameters import Sampling, sampling_of


def served_sampling(item: EngineInput) -> Sampling:
    """Raises msgspec.DecodeError (ValidationError) that names the parameter, or UnicodeDecodeError."""
    sampling = sampling_of(item.parameters)
    for name, asked in (("score", sampling.score), ("response_format", sampling.response_format is not None)):
        if asked:
            raise msgspec.ValidationError(f"only the torch backend follows it - at `$.{name}`")
    return sampling


def seed_of(item: EngineInput) -> int:
    """31 bits: the request's own seed, else one from its id, so that a retry draws the same."""
    seed = item.seed
    if seed is None:
        seed = int.from_bytes(hashlib.blake2b(item.request_id.encode(), digest_size=8).digest(), "big")
    return seed & 0x7FFF_FFFF

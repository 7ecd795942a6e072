"""Choosing the next token of one request, and saying how likely it was.

Every request has its own generator, seeded by its own seed, and draws one number per token. What it draws therefore
does not depend on which requests share its batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from msgspec import Struct
from torch import Tensor

from gpu_worker.backends.base import EngineInput
from gpu_worker.decoding.parameters import TEMPERATURE_MIN, Sampling

LIKELIEST_FIRST = 256
"""Sorting this many is enough for nearly every draw; the whole vocabulary is sorted only when the draw falls beyond."""


class Likely(Struct, frozen=True):
    """A token and its log-probability (natural logarithm)."""

    token_id: int
    logprob: float


class Chosen(Struct, frozen=True, omit_defaults=True):
    """What is reported of one token: its log-probability, and the likeliest tokens of its place."""

    token_id: int
    logprob: float
    top: tuple[Likely, ...] = ()


def generator_of(item: EngineInput) -> torch.Generator:
    """The request's own source of chance: from its seed, else from its id, so that a retry draws the same."""
    seed = item.seed
    if seed is None:
        seed = int.from_bytes(hashlib.blake2b(item.request_id.encode(), digest_size=8).digest(), "big")
    return torch.Generator().manual_seed(seed & 0x7FFF_FFFF_FFFF_FFFF)


def next_token(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token id from (vocabulary,) logits.

    Temperature first, then top-k and min-p, then top-p over what they left. Draws by inverse transform over the tokens
    in order of likelihood: a last-bit difference in the logits then moves the boundaries between tokens by as little,
    instead of drawing anew.
    """
    if sampling.temperature < TEMPERATURE_MIN:
        return int(logits.argmax())
    shares = torch.softmax(logits.double().cpu() / sampling.temperature, dim=-1)
    drawn = float(torch.rand(1, generator=generator, dtype=torch.float64))
    for size in (LIKELIEST_FIRST, shares.shape[0]):
        token = _drawn(shares, sampling, drawn, min(size, shares.shape[0]))
        if token is not None:
            return token
    raise AssertionError("a draw from the whole vocabulary always falls on a token")


def _drawn(shares: Tensor, sampling: Sampling, drawn: float, size: int) -> int | None:
    """The token at `drawn` (0..1) of what may be drawn from; None: the `size` likeliest tokens do not decide it."""
    best, order = shares.topk(size)
    allowed = size
    if sampling.min_p:
        allowed = max(1, int((best >= sampling.min_p * best[0]).sum()))  # none where the shares are no numbers
    if sampling.top_k:
        allowed = min(allowed, sampling.top_k)
    complete = allowed < size or size == shares.shape[0]
    if not complete and (sampling.top_k or sampling.min_p):
        return None
    reached = best[:allowed].cumsum(dim=-1)
    total = float(reached[-1]) if complete else 1.0
    if sampling.top_p < 1.0:
        kept = int((reached < sampling.top_p * total).sum()) + 1
        if kept > allowed and not complete:
            return None
        reached = reached[:kept]
        total = float(reached[-1])
        complete = True
    place = int((reached <= drawn * total).sum())
    if place >= len(reached) and not complete:
        return None
    return int(order[min(place, len(reached) - 1)])


def penalised(logits: Tensor, sampling: Sampling, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """(vocabulary,) logits after the penalties. A copy."""
    logits = logits.clone()
    device = logits.device
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor([*prompt, *answer], device=device).unique()
        scores = logits[seen]
        penalty = sampling.repetition_penalty
        logits[seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
    if answer and (sampling.presence_penalty or sampling.frequency_penalty):
        used, times = torch.tensor(answer, device=device).unique(return_counts=True)
        logits[used] -= sampling.presence_penalty + sampling.frequency_penalty * times
    return logits


def without(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    """(vocabulary,) logits in which `tokens` cannot be chosen. A copy."""
    return logits.index_fill(0, torch.tensor(tokens, dtype=torch.long, device=logits.device), float("-inf"))


def chosen(logits: Tensor, token: int, top: int) -> Chosen:
    """What to report of `token`, from the (vocabulary,) logits as the network gave them."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    likeliest: tuple[Likely, ...] = ()
    if top:
        values, ids = logprobs.topk(top)
        likeliest = tuple(Likely(one, value) for one, value in zip(ids.tolist(), values.tolist(), strict=True))
    return Chosen(token, float(logprobs[token]), likeliest)


def scored(logits: Tensor, tokens: Sequence[int]) -> list[float]:
    """Log-probability of tokens[i] by (rows, vocabulary) logits[i]."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    wanted = torch.tensor(tokens, device=logits.device)
    return logprobs.gather(1, wanted[:, None])[:, 0].tolist()

"""How busy a model keeps its devices: what placement needs to know so that busy replicas do not share one.

Arrivals, as workers report them, times the device time of one request: as declared, in the largest batch of the
baselines, which is what the device cannot do it for less; or else as observed. What is observed depends on the batches
and the neighbours of the moment, what is declared does not, so that a placement does not change what it was based on.
"""

from __future__ import annotations

from msgspec import Struct

RISE_MS, FALL_MS = 10_000, 60_000
"""Time constants: a load is believed sooner when it comes than when it goes."""
STEP = 5
"""Percent that shares are rounded up to, so that noise makes no difference. Small ones, too: what is declared holds for
the largest batch, and a model that is asked now and then runs small ones, at several times that cost."""
MOST = 100
MOST_OF_BATCH = 50
"""Percent that a batch job counts at most: nobody waits for its answers, so small models may take turns with it, but
not two of them with each other."""
LEAST = {"sglang": 35, "vllm": 35}
"""Percent of a device by backend, however little a model has to do: two language models share one, not more. An engine
that decodes takes its turn whenever it has any request, so a neighbour gets no more than every second turn."""

DECODING = frozenset(LEAST)
"""Backends whose engines decode."""

FREE = 70
"""Percent up to which placement lets replicas share a device at no cost (solver/model.py)."""


class Busy(Struct, frozen=True):
    """What was seen of one model."""

    per_s: float = 0.0
    """Requests."""
    request_us: float = 0.0
    """Device time of one."""
    known: bool = False
    """It had requests already."""


def noticed(busy: Busy, window_ms: int, arrivals: int, completions: int, busy_ms: int) -> Busy:
    """After one more window."""
    if not busy.known and not arrivals:
        return busy
    rate = arrivals * 1000 / max(1, window_ms)
    constant_ms = RISE_MS if rate > busy.per_s else FALL_MS
    per_s = busy.per_s + (rate - busy.per_s) * window_ms / (constant_ms + window_ms) if busy.known else rate
    request_us = busy.request_us
    if completions:
        seen = busy_ms * 1000 / completions
        request_us = seen if not request_us else request_us + (seen - request_us) * window_ms / (FALL_MS + window_ms)
    return Busy(per_s, request_us, True)


def load_percent(busy: Busy, declared_us: int, backend: str, replicas: int) -> int:
    """Share of its device's time that each of `replicas` needs."""
    least = LEAST.get(backend, 0)
    if not busy.known:
        return least
    whole = busy.per_s * (declared_us or busy.request_us) / (10_000 * max(1, replicas))
    return min(MOST, max(least, -int(-whole // STEP) * STEP))


def engines_on_one(backend: str) -> int:
    """Engines of that kind that share a device when there is reason to."""
    return FREE // LEAST[backend] if backend in LEAST else 1

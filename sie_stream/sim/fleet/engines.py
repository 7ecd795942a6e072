"""The engine model: latency of the requests of one step, and what is left over. Pure arithmetic on arrays.

A call with b requests takes L(b) = base + each*b, divided by the speed the engine has on its GPU (shared engines are
slower). Two kinds:

- batching: requests that come while a batch runs form the next one, up to `batch`. With a rate r the cycle settles at
  T = base / (1 - r*each), at least L(1) and at most L(batch): a request waits for the rest of the cycle in which it
  comes, uniform in (0, T), if the engine is busy, and then takes its own cycle T. (The leading terms of the closed
  form in Inoue, 2021.) Near saturation cycles queue up: an exponential wait as in M/D/1.
- continuous: k requests run at once, each slowed down to L(k); k moves towards r*L(k) (Little's law) with the time
  constant L(k). Above `batch` requests wait. The work of a request is lognormal, so is its latency. The share that
  waits for a slot below saturation is Sakasegawa's approximation of the Erlang C formula (1977).

Above saturation the caller keeps a queue of arrival times (`board.py`), and the wait there is exact to one step. The
slow twin in the tests simulates every request.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

SATURATED = 0.97
"""Share of the capacity above which requests are queued one by one, so to say."""
_GRID = np.linspace(-8.0, 8.0, 3201)
_NORMAL = np.array([0.5 * (1.0 + math.erf(z / math.sqrt(2.0))) for z in _GRID])
Z99 = 2.3263
BUSY99 = 0.01


class Laws(NamedTuple):
    """One entry per engine; times in ms, at full speed."""

    base: np.ndarray
    each: np.ndarray
    batch: np.ndarray
    sigma: np.ndarray
    continuous: np.ndarray
    sla: np.ndarray
    """Less what the pipeline around the engine takes."""


class Served(NamedTuple):
    """One entry per engine."""

    inside: np.ndarray
    """Share of the requests that end in this step within their SLA."""
    mean_ms: np.ndarray
    p99_ms: np.ndarray
    running: np.ndarray
    """In the engine at the end of the step, or waiting for the next batch."""
    busy: np.ndarray
    """Share of the time that the engine computes."""
    occupied: np.ndarray
    """Share of its capacity that is used: of the time (batching), of the slots (continuous)."""


def capacity_per_ms(laws: Laws, speed: np.ndarray) -> np.ndarray:
    """Most requests that an engine completes."""
    return speed * laws.batch / (laws.base + laws.each * laws.batch)


def serve(laws: Laws, speed: np.ndarray, rate: np.ndarray, running: np.ndarray, step_ms: float) -> Served:
    """One step below saturation. `rate`: arrivals per ms; `running`: in the engine at its beginning."""
    return _choose(laws.continuous, _continuous(laws, speed, rate, running, step_ms), _batching(laws, speed, rate))


def room(laws: Laws, speed: np.ndarray, running: np.ndarray, most: np.ndarray, step_ms: float) -> np.ndarray:
    """Most requests that an engine with a queue starts in one step. `most`: that it completes when it is full.

    A continuous engine fills its free slots at once, and those that become free.
    """
    pace = (laws.base + laws.each * np.clip(running, 1.0, laws.batch)) / speed
    free = laws.batch - running * np.exp(-step_ms / pace)
    return np.where(laws.continuous, np.maximum(most, free), most)


def filled(
    laws: Laws, speed: np.ndarray, started: np.ndarray, running: np.ndarray, step_ms: float
) -> tuple[np.ndarray, np.ndarray]:
    """(in the engine at the end, ms that what it starts takes) of one step of an engine with a queue.

    Batching: it is full. Continuous: as full as what it starts makes it; what ends follows Little's law, as in `serve`.
    """
    full_ms = (laws.base + laws.each * laws.batch) / speed
    held = np.minimum(running + started, laws.batch)
    pace = (laws.base + laws.each * np.clip(0.5 * (running + held), 1.0, laws.batch)) / speed
    settles = started / step_ms * pace
    after = settles + (running - settles) * np.exp(-step_ms / pace)
    after = np.clip(after, 0.0, np.minimum(running + started, laws.batch))
    took_ms = (laws.base + laws.each * np.clip(after, 1.0, laws.batch)) / speed
    return np.where(laws.continuous, after, held), np.where(laws.continuous, took_ms, full_ms)


def normal_cdf(z: np.ndarray) -> np.ndarray:
    return np.interp(z, _GRID, _NORMAL)


def within(laws: Laws, mean_ms: np.ndarray, waited_ms: np.ndarray) -> np.ndarray:
    """Share of requests that end in time after they waited so long for an engine that is full."""
    left = laws.sla - waited_ms
    sized = normal_cdf(_z(left, mean_ms, laws.sigma))
    return np.where(laws.sigma > 0, sized, (mean_ms <= left).astype(float))


def _batching(laws: Laws, speed: np.ndarray, rate: np.ndarray) -> Served:
    base, each = laws.base / speed, laws.each / speed
    most = base + each * laws.batch
    cycle = np.clip(base / np.maximum(1.0 - rate * each, 1e-6), base + each, most)
    size = np.clip(rate * cycle, 1.0, laws.batch)
    busy = np.minimum(1.0, rate * (base + each * size) / size)
    load = rate * most / laws.batch
    queued = np.where(rate * cycle >= laws.batch * 0.9, load, 0.0) ** 2
    wait = most / laws.batch / np.maximum(1.0 - load, 0.02) * 0.5
    left = laws.sla - cycle
    in_time = _waited(busy, cycle, left)
    inside = (1.0 - queued) * in_time + queued * _waited(busy, cycle, left - wait)
    mean = cycle * (1.0 + 0.5 * busy) + queued * wait
    p99 = cycle * (1.0 + np.clip(1.0 - BUSY99 / np.maximum(busy, BUSY99), 0.0, 1.0)) + queued * 3.0 * wait
    return Served(inside, mean, p99, rate * mean, busy, busy)


def _waited(busy: np.ndarray, cycle: np.ndarray, left: np.ndarray) -> np.ndarray:
    """P(busy x uniform(0, cycle) <= left)."""
    return np.where(left < 0, 0.0, 1.0 - busy + busy * np.clip(left / cycle, 0.0, 1.0))


def _continuous(laws: Laws, speed: np.ndarray, rate: np.ndarray, running: np.ndarray, step_ms: float) -> Served:
    base, each = laws.base / speed, laws.each / speed
    settles = rate * base / np.maximum(1.0 - rate * each, 1e-6)
    settles = np.minimum(settles, laws.batch * 4)
    pace = base + each * np.clip(running, 1.0, laws.batch)
    after = settles + (running - settles) * np.exp(-step_ms / pace)
    inner = np.clip(0.5 * (running + after), 1.0, laws.batch)
    mean = base + each * inner
    load = np.minimum(after / laws.batch, 0.99)
    waiting = load ** (np.sqrt(2.0 * (laws.batch + 1.0)) - 1.0)
    wait = mean / laws.batch / (1.0 - load)
    inside = (1.0 - waiting) * within(laws, mean, np.zeros_like(mean)) + waiting * within(laws, mean, wait)
    p99 = mean * np.exp(Z99 * laws.sigma - 0.5 * laws.sigma**2) + waiting * wait
    busy = 1.0 - np.exp(-after)
    return Served(inside, mean + waiting * wait, p99, after, busy, np.minimum(1.0, after / laws.batch))


def _z(left: np.ndarray, mean_ms: np.ndarray, sigma: np.ndarray) -> np.ndarray:
    """Standard deviations between the median latency and what is left, for lognormal work with mean 1."""
    return (np.log(np.maximum(left, 1e-3) / mean_ms) + 0.5 * sigma**2) / np.maximum(sigma, 1e-9)


def _choose(mask: np.ndarray, yes: Served, no: Served) -> Served:
    return Served(*(np.where(mask, a, b) for a, b in zip(yes, no, strict=True)))

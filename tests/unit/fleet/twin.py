"""Slow twins of the engine model: every request and every batch, one by one."""

from __future__ import annotations

import heapq
import random


def batching(base_ms: float, each_ms: float, batch: int, per_s: float, seconds: float, seed: int) -> list[float]:
    """Latencies. Poisson arrivals; the next batch is what has come when the last one ends, or the next to come."""
    chance = random.Random(seed)
    arrivals, at = list[float](), 0.0
    while at < seconds * 1000:
        at += chance.expovariate(per_s / 1000)
        arrivals.append(at)
    latencies, free, place = list[float](), 0.0, 0
    while place < len(arrivals):
        starts = max(free, arrivals[place])
        size = 1
        while size < batch and place + size < len(arrivals) and arrivals[place + size] <= starts:
            size += 1
        free = starts + base_ms + each_ms * size
        latencies += [free - came for came in arrivals[place : place + size]]
        place += size
    return latencies


def continuous(
    base_ms: float, each_ms: float, batch: int, sigma: float, per_s: float, seconds: float, seed: int
) -> list[float]:
    """Latencies. Up to `batch` requests run; the work of one is lognormal with mean 1, done at rate 1 / L(running)."""
    chance = random.Random(seed)
    running: list[tuple[float, float]] = []  # (virtual finish, came)
    waiting, latencies = list[float](), list[float]()
    now, served, next_at = 0.0, 0.0, chance.expovariate(per_s / 1000)
    while now < seconds * 1000:
        pace = 1.0 / (base_ms + each_ms * len(running)) if running else 0.0
        ends_at = now + (running[0][0] - served) / pace if running else float("inf")
        before, now = now, min(next_at, ends_at)
        served += (now - before) * pace
        if next_at <= ends_at:
            waiting.append(now)
            next_at += chance.expovariate(per_s / 1000)
        else:
            _, came = heapq.heappop(running)
            latencies.append(now - came)
        while waiting and len(running) < batch:
            work = chance.lognormvariate(-0.5 * sigma * sigma, sigma) if sigma else 1.0
            heapq.heappush(running, (served + work, waiting.pop(0)))
    return latencies

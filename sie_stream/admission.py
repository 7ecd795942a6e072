"""Who may come in: quota per (model, tenant), and the deadline. Pure; time is an argument."""

from __future__ import annotations

TENANTS_MAX = 10_000
"""Buckets kept; the one not used for longest is forgotten first, which can only be generous (it comes back full)."""


class TokenBucket:
    """`rate_per_s` requests a second in the long run, `burst` at once."""

    __slots__ = ("at_ms", "tokens")

    def __init__(self, burst: float, now_ms: int) -> None:
        self.tokens = burst
        self.at_ms = now_ms

    def take(self, rate_per_s: float, burst: float, now_ms: int) -> bool:
        """Take one token if there is one. Time that steps back adds nothing and takes nothing."""
        if now_ms > self.at_ms:
            self.tokens = min(burst, self.tokens + (now_ms - self.at_ms) * rate_per_s / 1000.0)
            self.at_ms = now_ms
        if self.tokens >= 1.0:
            self.tokens -= 1.0
            return True
        return False


class Quotas:
    """One bucket per (model, tenant)."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, str], TokenBucket] = {}

    def admit(self, model: str, tenant: str, rate_per_s: float, burst: float, now_ms: int) -> bool:
        """True if the request is within the quota. `rate_per_s` 0: unlimited. `burst` 0: one second's worth."""
        if rate_per_s <= 0.0:
            return True
        burst = max(1.0, burst or rate_per_s)
        bucket = self._buckets.pop((model, tenant), None)
        if bucket is None:
            bucket = TokenBucket(burst, now_ms)
            if len(self._buckets) >= TENANTS_MAX:
                del self._buckets[next(iter(self._buckets))]
        self._buckets[model, tenant] = bucket  # now the newest of the dictionary
        return bucket.take(rate_per_s, burst, now_ms)


def deadline_at_ms(requested_at_ms: int, request_ms: int | None, route_ms: int) -> int:
    """Wall-clock deadline of a request: its own, else the model's; 0: none."""
    if request_ms is not None:
        return requested_at_ms + request_ms
    return requested_at_ms + route_ms if route_ms else 0


def expired(deadline_ms: int, now_ms: int) -> bool:
    """True if the deadline (0: none) has passed."""
    return deadline_ms != 0 and now_ms >= deadline_ms

"""How many replicas a load needs: what was observed, what is estimated from that, and the law that makes it replicas.

- Demand of one request (Denning and Buzen, "The Operational Analysis of Queueing Network Models", 1978): replica time
  per request = busy share x replicas x time / requests completed. Counting is enough; no distribution is assumed.
- Little's law (1961): arrivals/s x demand = replicas busy on average, the offered load in erlangs.
- Target utilisation: offered load / replicas stays at or below a target, so that a fluctuation finds room.
- Queueing correction: Erlang's C formula (1917; Kleinrock, "Queueing Systems" I, 1975, section 3.5) gives the share of
  requests that would wait longer than the SLA leaves room for. It takes a replica for one server with exponential
  times; an engine that batches has more and shorter servers and waits less, so the answer errs towards one too many.
- Forecast: the level of one exponential average lags behind a ramp by slope x time constant; two with different
  constants give the slope (Brown's double smoothing, 1956). It is used for the time a new replica takes to load, and
  only as far as it stands out of noise: that of Poisson arrivals, or what was observed where they are burstier.

Everything is + - * / and square roots, which IEEE 754 fixes to the last bit: the same on every machine.
"""

from __future__ import annotations

from math import ceil, sqrt

from msgspec import Struct

FAST_MS = 10_000
"""Time constant of the arrival rate that decisions use."""
SLOW_MS = 40_000
"""Time constant of the one that is compared with it for the trend."""
TREND_SIGMAS = 2.5
"""A difference between the two that is smaller than this many standard deviations of noise is no trend."""
SPREAD_MS = 120_000
"""Time constant of the noise. A sudden jump of d requests/s adds about d/11 to its standard deviation in one second, so
that a second observation as high still stands out by more than four of them."""
JUMP_SIGMAS = 4.0
JUMP_REQUESTS = 2
"""Two observations in a row above the level by 4 standard deviations and 2 requests are a new level."""
FORECAST_FACTOR_MAX = 2.0
"""A forecast is at most so many times the present rate."""
PRIOR_REQUESTS = 20
"""What is declared counts as much as so many requests, completed before the first observation."""
EACH_MIN_MS = 0.01
"""Demand of a request is never taken to be less."""
MEMORY_REQUESTS = 200
"""Of earlier requests about this many are remembered (between half of them and all)."""
ROUNDING = 1e-9
"""What a sum of roundings may add without becoming one more replica."""


class Load(Struct, frozen=True):
    """What was seen of one model up to `at_ms`, in log time. Counters are of the `window_ms` before it."""

    at_ms: int
    window_ms: int
    arrivals: int
    completions: int
    waiting: int
    """Requests in the queue now, not yet with an engine."""
    running: int
    """Requests with an engine now."""
    ready: int
    loading: int
    """Placed and not ready: supply that is on its way."""
    utilisation_bp: int
    """Share of the ready replicas' capacity that was used, in basis points: busy time for engines that do one batch
    after another, occupied slots (running / slots) for those that batch continuously and are never quite idle. It is
    the model's own share: not that of a device which other models use too."""
    p99_ms: int | None
    """Of the requests completed in a window long enough for one; None when none was completed."""
    cold_start_ms: int
    """From decision to ready, as expected now: less while the weights are in a warm pool."""
    demand_ms: int
    """Replica time per request, from the fingerprint or the declared baselines; what is assumed before any is seen."""

    def __post_init__(self) -> None:
        counts = (self.arrivals, self.completions, self.waiting, self.running, self.ready, self.loading)
        if min(*counts, self.cold_start_ms) < 0 or min(self.window_ms, self.demand_ms) < 1:
            self._say_wrong()
        if not 0 <= self.utilisation_bp <= 10_000:
            raise ValueError(f"Load.utilisation_bp: {self.utilisation_bp}, 0 to 10000 is expected.")

    def _say_wrong(self) -> None:
        for name in ("arrivals", "completions", "waiting", "running", "ready", "loading", "cold_start_ms"):
            if getattr(self, name) < 0:
                raise ValueError(f"Load.{name}: {getattr(self, name)}, at least 0 is expected.")
        for name in ("window_ms", "demand_ms"):
            if getattr(self, name) < 1:
                raise ValueError(f"Load.{name}: {getattr(self, name)}, at least 1 is expected.")

    @property
    def idle(self) -> bool:
        return self.arrivals == 0 and self.waiting == 0 and self.running == 0


class Demand(Struct, frozen=True):
    """What is remembered of all observations. Rates are requests per second."""

    fast_per_s: float = 0.0
    slow_per_s: float = 0.0
    spread: float = 0.0
    """Average of (rate - level)^2 x seconds: the variance of arrivals in a second. Of Poisson arrivals: the rate."""
    jump_per_s: float = 0.0
    """Rate of the last observation if it was far above the level; else 0."""
    busy_ms: float = 0.0
    """Replica time of the requests remembered."""
    completed: float = 0.0

    @property
    def noise(self) -> float:
        """Variance of the arrivals in a second."""
        return max(self.fast_per_s, self.spread)

    @property
    def each_ms(self) -> float:
        """Replica time of one request; meaningless before the first observation."""
        return max(self.busy_ms / self.completed, EACH_MIN_MS) if self.completed else EACH_MIN_MS


class Need(Struct, frozen=True):
    """Replicas that a load needs, by each reason; `replicas` is the largest."""

    offered: float
    """Replicas busy on average."""
    by_target: int
    by_wait: int
    """0 when nothing is promised about waiting."""
    by_backlog: int
    """0 without a backlog."""

    @property
    def replicas(self) -> int:
        return max(self.by_target, self.by_wait, self.by_backlog)


def observed(demand: Demand, load: Load) -> Demand:
    """The estimate after one more observation."""
    rate = load.arrivals * 1000 / load.window_ms
    expected = demand.fast_per_s * load.window_ms / 1000
    deviation = JUMP_SIGMAS * sqrt(demand.noise * load.window_ms / 1000)
    outlier = load.arrivals > expected + deviation + JUMP_REQUESTS
    spread = _towards(demand.spread, (rate - demand.fast_per_s) ** 2 * load.window_ms / 1000, load.window_ms, SPREAD_MS)
    if outlier and demand.jump_per_s > 0:
        fast = slow = min(rate, demand.jump_per_s)
    else:
        fast = _towards(demand.fast_per_s, rate, load.window_ms, FAST_MS)
        slow = _towards(demand.slow_per_s, rate, load.window_ms, SLOW_MS)
    if demand.completed == 0:
        demand = Demand(busy_ms=float(PRIOR_REQUESTS * load.demand_ms), completed=float(PRIOR_REQUESTS))
    busy_ms = demand.busy_ms + load.utilisation_bp * load.ready * load.window_ms / 10_000
    completed = demand.completed + load.completions
    if completed > MEMORY_REQUESTS:
        busy_ms, completed = busy_ms / 2, completed / 2
    return Demand(fast, slow, spread, rate if outlier else 0.0, busy_ms, completed)


def _towards(level: float, value: float, window_ms: int, constant_ms: int) -> float:
    """Exponential average over windows of any length (implicit Euler step: no exponential function needed)."""
    return level + (value - level) * window_ms / (constant_ms + window_ms)


def forecast_per_s(demand: Demand, ahead_ms: int) -> float:
    """Arrivals per second expected in `ahead_ms`. Never below the present level: shrinking waits for facts."""
    noise = TREND_SIGMAS * sqrt(demand.noise * 1000 / (2 * FAST_MS))
    rise = demand.fast_per_s - demand.slow_per_s - noise
    if rise <= 0:
        return demand.fast_per_s
    slope_per_ms = rise / (SLOW_MS - FAST_MS)
    ahead = demand.fast_per_s + slope_per_ms * (FAST_MS + ahead_ms)
    return min(ahead, demand.fast_per_s * FORECAST_FACTOR_MAX)


def late_share(replicas: int, offered: float, budget: float) -> float:
    """Share of requests that wait longer than `budget` (in units of one request's demand): Erlang C x exp(-x).

    1.0 when the load exceeds the replicas.
    """
    if offered >= replicas:
        return 1.0
    blocked = 1.0
    for servers in range(1, replicas + 1):
        blocked = offered * blocked / (servers + offered * blocked)
    waits = blocked / (1 - offered / replicas * (1 - blocked))
    return waits * _decay((replicas - offered) * budget)


def _decay(x: float) -> float:
    """exp(-x) for x >= 0 from its limit (1 + x/n)^-n with n = 2^20: by at most x^2 / 2^21 of itself too large."""
    power = 1 + x / (1 << 20)
    for _ in range(20):
        power *= power
    return 1 / power


def need_of(offered: float, target_bp: int, promise: tuple[float, int] | None, backlog: float, most: int) -> Need:
    """Replicas for `offered` erlangs.

    target_bp: highest average utilisation, basis points. promise: (longest wait in units of a request's demand,
    requests in a million that may wait longer), None: nothing is promised. backlog: replicas that would be busy with
    draining it in the time it may take. most: where the search for a short enough wait ends; the other parts may exceed
    it.
    """
    by_target = _whole(offered * 10_000 / target_bp)
    by_backlog = _whole(offered + backlog) if backlog > 0 else 0
    by_wait = 0
    if promise is not None and offered > 0:
        budget, late_ppm = promise
        by_wait = min(int(offered) + 1, most)
        while by_wait < most and late_share(by_wait, offered, budget) * 1_000_000 > late_ppm:
            by_wait += 1
    return Need(offered, by_target, by_wait, by_backlog)


def _whole(replicas: float) -> int:
    return ceil(replicas - ROUNDING)

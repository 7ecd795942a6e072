"""What the slowest requests of a model share that the others do not. Pure; memory does not grow with the requests.

Every request is counted under what it could share with others (worker, device, batch size, ...); only the slowest are
kept. A trait is told when it is much more frequent among the slow ones than among all: `lift` is the ratio of the two
shares (as in association rules), and a trait that everybody has, has lift 1 and explains nothing.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from sie_stream.decisions import Decision
from sie_stream.records import Result
from sie_stream.touches import Touch
from sie_stream.tracing.batches import batch_key
from sie_stream.tracing.touch_steps import touch_traits

KEEP_MAX = 20_000
"""Slowest requests kept; one in a hundred of two million."""
SHARE_MIN = 0.3
LIFT_MIN = 1.5
Z_MIN = 3.0
"""So many standard deviations above what as many requests drawn at random would show (binomial)."""
TRAITS_MAX = 8
DOMINANT = 0.5
"""A part of the time is said to dominate when it is at least this share of the total."""


class Slow(Struct, frozen=True, order=True):
    """One slow request; ordered by its time."""

    total_ms: float
    request_id: str
    traits: tuple[str, ...] = ()
    batch: str = ""
    begun_ms: int = 0
    finished_ms: int = 0


class Trait(Struct, frozen=True):
    """Something shared. `share` is among the slow, `share_of_all` among all (None: not counted); `lift` their ratio."""

    trait: str
    slow: int
    share: float
    share_of_all: float | None = None
    lift: float | None = None


class SlowReport(Struct, frozen=True):
    model: str
    requests: int
    p50_ms: float | None
    p99_ms: float | None
    slow: tuple[Slow, ...]
    """Those at or above p99, slowest first."""
    shared: tuple[Trait, ...]
    notes: tuple[str, ...]


class SlowStudy:
    """Fold results in, then ask for the report."""

    def __init__(self, model: str, keep_max: int = KEEP_MAX) -> None:
        self._model = model
        self._keep_max = keep_max
        self._slowest: list[Slow] = []
        self._counts: Counter[str] = Counter()
        self._totals: Counter[int] = Counter()
        """Requests by total, on a grid of about 2 %."""
        self.requests = 0

    def add(self, result: Result, touches: Sequence[Touch] = ()) -> None:
        """Results of other models, and of requests that never became work, are left out. `touches`: told beside it."""
        if result.model != self._model or not result.provenance.work_topic:
            return
        self.requests += 1
        traits = traits_of(result)
        if touches:
            traits = (*traits, *touch_traits(touches))
        self._counts.update(traits)
        total = result.timings_ms.total
        self._totals[_bin(total)] += 1
        if len(self._slowest) < self._keep_max or total > self._slowest[0].total_ms:
            key = batch_key(result)
            entry = Slow(
                total,
                result.request_id,
                traits,
                "" if key is None else f"batch of {key[5]} on {key[0]} that took {key[6]:.3f} ms",
                round(result.finished_at - total),
                result.finished_at,
            )
            put = heapq.heappush if len(self._slowest) < self._keep_max else heapq.heappushpop
            put(self._slowest, entry)

    def report(self, decisions: Sequence[Decision] = ()) -> SlowReport:
        """`decisions`: those about the model in the time that was read, to say at which moves the slow ones waited."""
        count = min(len(self._slowest), max(1, math.ceil(self.requests / 100))) if self.requests else 0
        slow = tuple(sorted(self._slowest, reverse=True)[:count])
        notes = []
        if self.requests and self.requests < 100:
            notes.append(f"{self.requests} requests: p99 of so few is the slowest one.")
        if self.requests > 100 * self._keep_max:
            notes.append(f"Only the {self._keep_max} slowest are kept, less than one in a hundred.")
        return SlowReport(
            self._model,
            self.requests,
            min(self._quantile(0.5), slow[-1].total_ms) if slow else None,
            slow[-1].total_ms if slow else None,
            slow,
            (*self._shared(slow), *_in_batches(slow), *_at_decisions(slow, decisions)),
            tuple(notes),
        )

    def _shared(self, slow: Sequence[Slow]) -> tuple[Trait, ...]:
        found = Counter(trait for entry in slow for trait in entry.traits)
        ranked: list[tuple[float, str, Trait]] = []
        for trait, count in found.items():
            share, of_all = count / len(slow), self._counts[trait] / self.requests
            lift = share / of_all
            chance = math.sqrt(of_all * (1 - of_all) / len(slow))
            if share >= SHARE_MIN and lift >= LIFT_MIN and share - of_all >= Z_MIN * chance:
                ranked.append((-share * math.log(lift), trait, Trait(trait, count, share, of_all, lift)))
        return tuple(trait for *_, trait in sorted(ranked, key=lambda entry: entry[:2])[:TRAITS_MAX])

    def _quantile(self, q: float) -> float:
        """To about 2 %."""
        left = q * self.requests
        number = 0
        for number in sorted(self._totals):
            left -= self._totals[number]
            if left <= 0:
                break
        return math.exp(number / 50)


def _bin(total_ms: float) -> int:
    return round(math.log(max(total_ms, 0.01)) * 50)


def traits_of(result: Result) -> tuple[str, ...]:
    """What a request may share with other slow ones."""
    origin, timings = result.provenance, result.timings_ms
    traits = [
        f"worker {origin.worker}",
        f"device {origin.worker}/{origin.device}",
        f"partition {origin.work_partition} of {origin.work_topic}",
        f"incarnation {origin.incarnation} of {origin.worker}",
        f"placed by record {origin.placement_epoch} of sie.cluster",
        f"route epoch {origin.route_epoch}",
        f"version {result.version}, variant {result.variant}",
        f"batches of {_rounded_up(origin.batch_size)} or fewer" if origin.batch_size else "never in an engine",
        f"ended {result.status}",
    ]
    parts = {
        "time in the queue dominates": timings.queue,
        "time in the engine dominates": timings.inference,
        "time in Stage 2 dominates": timings.postprocess,
        "time before ingress dominates": timings.total - timings.queue - timings.inference - timings.postprocess,
    }
    traits += [name for name, took in parts.items() if timings.total > 0 and took / timings.total >= DOMINANT]
    return tuple(traits)


def _rounded_up(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def _in_batches(slow: Sequence[Slow]) -> tuple[Trait, ...]:
    """Slow requests that came out of one engine batch."""
    together = Counter(entry.batch for entry in slow if entry.batch)
    found = [
        Trait(f"the same {batch}", count, count / len(slow))
        for batch, count in together.most_common(3)
        if count > 1 and count / len(slow) >= SHARE_MIN
    ]
    return tuple(found)


def _at_decisions(slow: Sequence[Slow], decisions: Sequence[Decision]) -> tuple[Trait, ...]:
    """Slow requests that were under way when the scheduler decided something about their model."""
    found = []
    for decision in decisions:
        count = sum(entry.begun_ms <= decision.at_ms <= entry.finished_ms for entry in slow)
        if count and count / len(slow) >= SHARE_MIN:
            name = f"under way at {decision.decision} {decision.kind} {decision.subject}"
            found.append(Trait(name, count, count / len(slow)))
    return tuple(sorted(found, key=lambda one: -one.slow)[:TRAITS_MAX])

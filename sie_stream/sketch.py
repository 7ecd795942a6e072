"""Histograms of any number in buckets of equal relative width: small, exact to add up, the same in every process.

A value x > 0 is in bucket ceil(log(x / FLOOR) / log(GAMMA)), a negative one in the mirrored bucket, everything closer
to zero than FLOOR in bucket 0. The middle of a bucket is within 2.5 % of every value in it (the idea of DDSketch:
Masson, Rim, Lee, VLDB 2019). Counts are whole numbers, so sketches of windows add up to the sketch of their union.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

GAMMA = 1.05
FLOOR = 1e-9
_LOG_GAMMA = math.log(GAMMA)
BUCKET_MAX = 2_000
"""Beyond it everything is one bucket: 1e-9 * 1.05 ** 2000 is above 1e33."""
LARGEST = 1e200
"""Far beyond the last bucket; divided by FLOOR it is still a number."""


def bucket_of(value: float) -> int:
    """The bucket of a finite number."""
    size = min(abs(value), LARGEST)
    if size <= FLOOR:
        return 0
    bucket = min(BUCKET_MAX, max(1, math.ceil(math.log(size / FLOOR) / _LOG_GAMMA)))
    return bucket if value > 0 else -bucket


def value_of(bucket: int) -> float:
    """The middle of a bucket."""
    if bucket == 0:
        return 0.0
    middle = FLOOR * GAMMA ** (abs(bucket) - 0.5)
    return middle if bucket > 0 else -middle


def upper_of(bucket: int) -> float:
    """No value of the bucket is above this."""
    if bucket == 0:
        return FLOOR
    return FLOOR * GAMMA**bucket if bucket > 0 else -FLOOR * GAMMA ** (-bucket - 1)


def added(one: Mapping[int, int], other: Mapping[int, int]) -> dict[int, int]:
    """The sketch of both; buckets ascending, so that equal sketches have equal bytes."""
    total = dict(one)
    for bucket, count in other.items():
        total[bucket] = total.get(bucket, 0) + count
    return dict(sorted(total.items()))


def count_of(sketch: Mapping[int, int]) -> int:
    return sum(sketch.values())


def rank_bucket(sketch: Mapping[int, int], rank: int) -> int | None:
    """Bucket of the `rank`-th smallest value, counted from 1; None when there are fewer."""
    seen = 0
    for bucket in sorted(sketch):
        seen += sketch[bucket]
        if seen >= rank:
            return bucket
    return None


def quantile(sketch: Mapping[int, int], share: float) -> float | None:
    """The value below which `share` of all values are, to 2.5 %; None for an empty sketch."""
    total = count_of(sketch)
    bucket = rank_bucket(sketch, max(1, math.ceil(share * total))) if total else None
    return None if bucket is None else value_of(bucket)


def above(sketch: Mapping[int, int], limit: float) -> int:
    """How many values are surely above `limit`: those of buckets that lie above it as a whole."""
    return sum(count for bucket, count in sketch.items() if bucket > bucket_of(limit))


def sketch_of(values: Iterable[float]) -> dict[int, int]:
    sketch: dict[int, int] = {}
    for value in values:
        bucket = bucket_of(value)
        sketch[bucket] = sketch.get(bucket, 0) + 1
    return dict(sorted(sketch.items()))

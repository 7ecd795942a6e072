"""Where a request goes: which variant answers it and which partition carries it. Pure functions of record and route.

A key always gives the same bucket, so a session stays with one replica and its KV prefix stays warm. The variant of
a key changes at most once while the share of a variant grows: variants own ranges of the 10,000 buckets that only
grow while their share does (`resized`), and everything else stays where it was.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from sie_stream.control import VariantRow
from sie_stream.errors import InvalidRequest, did_you_mean
from sie_stream.ids import keyed_hash

SHARES = 10_000
"""Weights of a route add up to this; `bucket = keyed_hash(key, salt) mod 10,000`."""

LUCK = 1 << 32
Range = tuple[int, int]
"""Buckets [first, end)."""

PRIORITY_LANES: dict[str, int] = {"P0": 0, "P1": 1, "P2": 2}


def sticky_key(session: str | None, key: bytes, request_id: str) -> bytes:
    """What a request sticks to: its session, else its record key, else itself."""
    if session:
        return session.encode("utf-8", "surrogatepass")
    return key or request_id.encode("utf-8", "surrogatepass")


def variant_bucket(sticky: bytes, salt: bytes) -> int:
    """One of the 10,000 buckets. `salt` is the instance id: routes split independently."""
    return keyed_hash(sticky, salt) % SHARES


def choose_variant(variants: Sequence[VariantRow], sticky: bytes, salt: bytes) -> VariantRow:
    """The variant whose range holds the key's bucket.

    Without ranges the variants own adjacent ones by their weights, in order, and the last variant takes what these
    leave over. Raises InvalidRequest (`no_variant`) if the route has no variant with a weight.
    """
    bucket = variant_bucket(sticky, salt)
    above = 0
    last = None
    for variant in variants:
        if variant.weight > 0:
            last = variant
            if variant.ranges:
                if owns(variant.ranges, bucket):
                    return variant
                continue
            above += variant.weight
            if bucket < above:
                return variant
    if last is None:
        raise InvalidRequest("no_variant", "the model has no version that takes traffic.", "model")
    return last


def owns(ranges: Sequence[Range], bucket: int) -> bool:
    return any(first <= bucket < end for first, end in ranges)


def resized(own: Sequence[Range], weight: int, taken: Sequence[Range]) -> tuple[Range, ...]:
    """Ranges of `weight` buckets: those of `own` and more from the top of what nobody has taken, or fewer of `own`.

    Growing never gives a bucket up and shrinking never takes one, so a key changes its variant at most once while a
    share grows, for any number of variants. What was taken last is given back first. Raises ValueError when there are
    not so many buckets left.
    """
    kept: list[Range] = []
    left = weight
    for first, end in own:
        if left <= 0:
            break
        kept.append((max(first, end - left), end))
        left -= min(left, end - first)
    for first, end in reversed(_free([*taken, *own])):
        if left <= 0:
            break
        start = max(first, end - left)
        left -= end - start
        if kept and kept[-1][0] == end:
            kept[-1] = (start, kept[-1][1])
        else:
            kept.append((start, end))
    if left > 0:
        raise ValueError(f"{weight} of {SHARES} buckets wanted, {left} too many: the others have the rest")
    return tuple(kept)


def _free(taken: Sequence[Range]) -> list[Range]:
    """What is left of the buckets, ascending."""
    free: list[Range] = []
    at = 0
    for first, end in sorted(taken):
        if first > at:
            free.append((at, first))
        at = max(at, end)
    if at < SHARES:
        free.append((at, SHARES))
    return free


def rest_of(taken: Sequence[Range]) -> tuple[Range, ...]:
    """The buckets that nobody has taken: those of the stable variant."""
    return tuple(_free(taken))


def pinned_variant(variants: Sequence[VariantRow], model: str, version: str) -> VariantRow:
    """The variant that runs `version` (name@version), whatever its weight.

    Raises InvalidRequest (`unknown_version`), naming the versions there are.
    """
    for variant in variants:
        if variant.version == version:
            return variant
    known = [variant.version for variant in variants]
    raise InvalidRequest(
        "unknown_version",
        f"model {model!r} has no version {version!r}. Versions: {', '.join(known) or 'none'}."
        f"{did_you_mean(version, known)} Leave the version out to follow the route.",
        "model",
    )


class Spill(NamedTuple):
    """How keys leave buckets that are to have less than an even share."""

    keep: tuple[int, ...]
    """By bucket: of the keys at home there, the part out of 10,000 that stays."""
    upto: tuple[int, ...]
    """The others go to `takers`, each up to a bound; rising."""
    takers: tuple[int, ...]


def spill_of(shares: Sequence[int], width: int) -> Spill | None:
    """Compiles the shares of a route; None when every bucket keeps its keys (all shares the same, or none that fit).

    A bucket above an even share takes what others give, in proportion to what it has above. So a key is either at home
    or with a taker, and while one share falls only the keys move that it gives away.
    """
    fit = len(shares) == width and sum(shares) == SHARES and min(shares) >= 0
    if not fit or max(shares) - min(shares) <= 1:
        return None
    above = [(share * width - SHARES, bucket) for bucket, share in enumerate(shares) if share * width > SHARES]
    return Spill(
        keep=tuple(min(share * width, SHARES) for share in shares),
        upto=tuple(accumulate(more for more, _ in above)),
        takers=tuple(bucket for _, bucket in above),
    )


def bucket_of(sticky: bytes, width: int, spill: Spill | None = None) -> int:
    """Bucket of a key within a lane of `width` partitions. The same for every lane, so priorities share a replica."""
    home = 0 if width == 1 else keyed_hash(sticky, b"bucket") % width
    if spill is None or spill.keep[home] == SHARES:
        return home
    luck = keyed_hash(sticky, b"spill")
    if luck % SHARES < spill.keep[home]:
        return home
    # Bits that the first look did not use; scaled, not divided, so that takers keep theirs when all take more.
    place = (luck // SHARES % LUCK) * spill.upto[-1] // LUCK
    return spill.takers[bisect_right(spill.upto, place)]


def partition_of(lane: int, bucket: int, width: int) -> int:
    """Partition of a work topic."""
    return lane * width + bucket

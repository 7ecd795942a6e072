"""Where a key goes: the partition that Kafka's own partitioner, and so our writers, give it."""

from __future__ import annotations

from functools import lru_cache

MURMUR_M = 0x5BD1E995
MASK = 0xFFFFFFFF


@lru_cache(maxsize=65_536)
def murmur2(key: bytes) -> int:
    """MurmurHash2, 32 bits, with the seed that Kafka's Java producer uses (Austin Appleby, public domain algorithm)."""
    value = (0x9747B28C ^ len(key)) & MASK
    whole = len(key) & ~3
    for at in range(0, whole, 4):
        word = int.from_bytes(key[at : at + 4], "little") * MURMUR_M & MASK
        word = (word ^ (word >> 24)) * MURMUR_M & MASK
        value = (value * MURMUR_M & MASK) ^ word
    if whole < len(key):
        value = (value ^ int.from_bytes(key[whole:], "little")) * MURMUR_M & MASK
    value = (value ^ (value >> 13)) * MURMUR_M & MASK
    return value ^ (value >> 15)


def keyed_partition(key: bytes, partitions: int) -> int:
    """The partition Kafka's murmur2 partitioner gives a key."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions

"""The weights digest of an adapter over a base: `sha256:ADAPTER over sha256:BASE`. Pure.

An answer depends on both, and who asks which weights gave it wants to see each: the adapter's digest is that of its
declaration, the base's that of the model it lies over. Results written before bases were named have the first alone.
"""

from __future__ import annotations

OVER = " over "


def over(adapter: str, base: str) -> str:
    return f"{adapter}{OVER}{base}"


def own_and_base(digest: str) -> tuple[str, str]:
    """Digest of what `source` of the declaration names, and of the base; the latter is empty where none is named."""
    own, _, base = digest.partition(OVER)
    return own, base


def same_weights(one: str, other: str) -> bool:
    """Whether nothing says that they differ: a base that only one of them names is not compared."""
    (mine, beneath), (yours, below) = own_and_base(one), own_and_base(other)
    return mine == yours and (beneath == below or not (beneath and below))

"""The trunk of a decoder: all that decides the keys and values of a token, and nothing else.

Two models of one trunk compute the same keys and values for the same tokens, whatever their heads make of the last
states (next tokens, scores, a vector). So they may use each other's, and hold the weights of the trunk once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, structs

DIGEST_CHARS = 32


class Trunk(Struct, frozen=True):
    """Equal digests: the same keys and values. Unequal ones: compare the parts to see why."""

    digest: str
    """`sha256:...` over the parts below."""
    weights: str
    """Of the tensors of the token embedding and the layers, by name."""
    network: str
    """Of the constants: heads, widths, windows, norms, biases."""
    rope: str
    """Of the parameters of the position embedding."""
    precision: str
    """Of weights and states, and how sums are ordered: `float32, dense, fast`."""
    layout: str
    """Of a KV block: `16 tokens x 30 layers x 3 heads x 64`."""
    adapter: str = ""
    """Digest of a LoRA adapter that acts on the layers, and from which tokens on if not on all; empty: none."""
    before: str = ""
    """Digest of the trunk under an activated adapter, which tokens before the invocation have; empty: it acts on all
    tokens, or there is no adapter."""

    @property
    def opening(self) -> str:
        """Digest of what decides the keys and values of the first tokens, on which no activated adapter acts."""
        return self.before or self.digest


PARTS = ("weights", "network", "rope", "precision", "layout", "adapter")


def trunk_of(weights: str, network: bytes, rope: bytes, precision: str, layout: str) -> Trunk:
    """`network` and `rope` are the constants themselves, in a form that is the same for equal ones."""
    parts = (weights, digest_of(network), digest_of(rope), precision, layout)
    return Trunk(f"sha256:{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()}", *parts)


def adapted(trunk: Trunk, adapter: str, invocation: Sequence[int] = ()) -> Trunk:
    """The trunk with a LoRA adapter on it.

    adapter: digest of its weights and settings. invocation: tokens from which on it acts (activated LoRA,
    arXiv:2504.12397); empty: on all. The digest covers both, so another adapter of the same name is another trunk.
    """
    named = f"{adapter} from {list(invocation)} on" if invocation else adapter
    digest = f"sha256:{hashlib.sha256(f'{trunk.digest}{chr(10)}{named}'.encode()).hexdigest()}"
    return structs.replace(trunk, digest=digest, adapter=named, before=trunk.digest if invocation else "")


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()[:DIGEST_CHARS]}"


def own_bytes(memory_bytes: int, parts: Mapping[str, int], held: Iterable[str]) -> int:
    """What a model adds to the memory of an engine that holds the parts named `held` already.

    parts: {digest: bytes} of what models of one engine can have in common, counted in `memory_bytes`.
    """
    counted = set(held)
    return memory_bytes - sum(size for part, size in parts.items() if part in counted)

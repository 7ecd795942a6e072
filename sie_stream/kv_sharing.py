"""Whether two models can use each other's keys and values, and if not, what differs. Pure.

Keys and values of a token are the same exactly when the trunks are (see trunks.py), and a prefix is the same only if
both models cut text into the same tokens. They are in one pool only if one engine process on one device has both.
An activated adapter has the trunk of its base up to its invocation; another adapter has no token in common with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from msgspec import Struct

from sie_stream.trunks import PARTS, Trunk

SHARING_BACKEND = "torch"
SHARING_KIND = "text_generation"
OPTIONS: dict[str, str] = {"dtype": "float32", "precision": "dense", "repeatable": "False"}
"""Options of the backend that decide precision and order of sums, and what holds when none is given."""

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Precisions that are the weights as they are, in the dtype they name."""


class Place(NamedTuple):
    """An engine process: of a backend, there is one for each device of a worker."""

    worker: str
    device: str


class KvSide(Struct, frozen=True):
    """One of the two models, as declared and as workers tell."""

    model: str
    backend: str
    options: dict[str, str]
    """backend.config, as texts."""
    weights: str
    """Digest of its files, or where they are when none is declared."""
    tokenizer: str
    """Likewise; empty: none."""
    adapter: str = ""
    """What its LoRA adapter is and on which base; empty: none."""
    trunks: tuple[tuple[Place, Trunk], ...] = ()
    """As loaded."""

    @property
    def decoder(self) -> bool:
        return self.backend == SHARING_BACKEND and self.options.get("kind") == SHARING_KIND

    @property
    def arithmetic(self) -> str:
        found = OPTIONS | self.options
        dtype, precision = found["dtype"], found["precision"]
        if precision in DTYPES:
            dtype, precision = DTYPES[precision], "dense"
        return f"{dtype}, {precision}, {'repeatable' if found['repeatable'] == 'True' else 'fast'}"


class KvDifference(Struct, frozen=True):
    """what: engine, kind, tokenizer, adapter, weights, network, rope, precision, layout or device."""

    what: str
    first: str
    second: str
    sentence: str


class KvVerdict(Struct, frozen=True):
    """verdict: shared (both are loaded and do), refused (`differences` say why), or unknown until both are loaded."""

    first: str
    second: str
    verdict: Literal["shared", "refused", "unknown"]
    sentence: str
    differences: tuple[KvDifference, ...] = ()
    places: tuple[str, ...] = ()
    """worker/device where they share now."""
    trunk: str = ""


SENTENCES = {
    "engine": "each backend keeps keys and values of its own; only decoders of backend torch share them.",
    "kind": "only decoders (backend torch, kind text_generation) keep keys and values.",
    "tokenizer": "the same text is cut into other tokens, so no prefix is ever the same.",
    "adapter": "an adapter changes the keys and values of all tokens it acts on; only an activated one "
    "(alora_invocation_tokens in its adapter_config.json) leaves those before its invocation to the base.",
    "weights": "token embedding or layers are other tensors; only what comes after the layers may differ.",
    "network": "constants of the network differ (heads, widths, windows, norms or biases).",
    "rope": "positions are embedded by other parameters, so the keys differ.",
    "precision": "other rounding or another order of sums gives other bits.",
    "layout": "KV blocks hold another number of tokens or are cut otherwise.",
    "device": "no engine process has both: their pools and memories are apart.",
}


def kv_sharing(first: KvSide, second: KvSide) -> KvVerdict:
    """Compares what is declared, and the trunks where both are loaded, beside each other if they are anywhere."""
    declared = list(_declared(first, second))
    together, pair = _pair(first, second)
    reported: list[KvDifference] = []
    if pair is not None:
        reported = list(_parts(*pair))
    elif not declared:
        reported = list(_expected(first, second))
    if first.trunks and second.trunks and not together:
        reported.append(_difference("device", _places(first), _places(second)))
    differences = (*declared, *reported)
    if differences:
        names = ", ".join(one.what for one in differences)
        sentence = f"{first.model} and {second.model} share no keys and values, because of: {names}."
        return KvVerdict(first.model, second.model, "refused", sentence, differences)
    if pair is None:
        return _unknown(first, second)
    where = tuple(f"{place.worker}/{place.device}" for place in together)
    sentence = f"{first.model} and {second.model} share {_shared(first, second, pair)} on {', '.join(where)}."
    return KvVerdict(first.model, second.model, "shared", sentence, (), where, pair[0].opening)


def _shared(first: KvSide, second: KvSide, pair: tuple[Trunk, Trunk]) -> str:
    if pair[0].digest == pair[1].digest:
        return "keys, values and weights of their trunk"
    invoked = " or ".join(side.model for side, trunk in zip((first, second), pair, strict=True) if trunk.before)
    return f"keys and values of the tokens before an invocation of {invoked}, and the weights of their trunk,"


def _declared(first: KvSide, second: KvSide) -> Iterator[KvDifference]:
    if first.backend != second.backend:
        yield _difference("engine", first.backend, second.backend)
    elif not (first.decoder and second.decoder):
        yield _difference("kind", *(f"{one.backend} {one.options.get('kind', '')}".strip() for one in (first, second)))
    if first.tokenizer != second.tokenizer:
        yield _difference("tokenizer", first.tokenizer or "none", second.tokenizer or "none")
    if first.adapter != second.adapter and not (first.decoder and second.decoder):
        # What a decoder of ours makes of an adapter, its trunk says.
        yield _difference("adapter", first.adapter or "none", second.adapter or "none")


def _pair(first: KvSide, second: KvSide) -> tuple[list[Place], tuple[Trunk, Trunk] | None]:
    """Places where both are and, of those or else of any, two trunks to compare: the nearest to equal there are."""
    theirs = dict(second.trunks)
    beside = {place: (trunk, theirs[place]) for place, trunk in first.trunks if place in theirs}
    anywhere = [(mine, yours) for _, mine in first.trunks for _, yours in second.trunks]
    pairs = sorted(beside.values(), key=_apart) or sorted(anywhere, key=_apart)
    together = [place for place, pair in beside.items() if _apart(pair) == _apart(pairs[0])]
    return together, pairs[0] if pairs else None


def _apart(pair: tuple[Trunk, Trunk]) -> int:
    """0: they have all keys and values in common; 1: those of the first tokens; 2: none."""
    if pair[0].digest == pair[1].digest:
        return 0
    return 1 if pair[0].opening == pair[1].opening else 2


def _parts(first: Trunk, second: Trunk) -> Iterator[KvDifference]:
    if first.opening == second.opening:
        return
    for part in PARTS:
        mine, yours = getattr(first, part), getattr(second, part)
        if mine != yours:
            yield _difference(part, mine or "none", yours or "none")


def _expected(first: KvSide, second: KvSide) -> Iterator[KvDifference]:
    """What is certain before both are loaded."""
    if first.arithmetic != second.arithmetic:
        yield _difference("precision", first.arithmetic, second.arithmetic)


def _unknown(first: KvSide, second: KvSide) -> KvVerdict:
    absent = " and ".join(one.model for one in (first, second) if not one.trunks)
    verb = "are" if not first.trunks and not second.trunks else "is"
    if first.adapter != second.adapter:
        then = (
            "An adapter shares only if it is an activated one, and only tokens before its invocation. Which it is, is "
            "read when it is loaded."
        )
    elif first.weights == second.weights:
        then = "The declarations name the same weights: they will share where one engine process has both."
    else:
        then = "The weights are other files, which may have the same trunk under another head."
    sentence = f"{absent} {verb} not loaded, or no worker has told of it in the last half minute. {then}"
    return KvVerdict(first.model, second.model, "unknown", sentence)


def _difference(what: str, first: str, second: str) -> KvDifference:
    return KvDifference(what, first, second, SENTENCES[what])


def _places(side: KvSide) -> str:
    return listed(place for place, _ in side.trunks)


def listed(places: Iterable[Place]) -> str:
    return ", ".join(f"{place.worker}/{place.device}" for place in places)

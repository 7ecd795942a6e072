"""One answer of the log against one answer of the replay: equal, within tolerance, or different and why."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, TypeGuard

import msgspec
from msgspec import Struct

from sie_stream.adapter_digests import same_weights
from sie_stream.records import Status

Cause = Literal["version", "schema", "seed", "numeric", "missing", "retention", "status", "shredded", "no_key"]
CAUSES: dict[Cause, str] = {
    "version": "another version, other weights or other libraries answered, or the version is not to be had any more",
    "schema": "refused by the input_schema or output_schema, or an answer of another form",
    "seed": "the answer was drawn by chance (temperature above 0) and no seed was kept that draws it again, or it was "
    "made with another seed",
    "numeric": "the same version, weights, libraries and seed, and yet another answer",
    "missing": "the request has no terminal record in the range that was read",
    "retention": "the input is gone: its work item is not on the log any more, or what the request names is not to be "
    "had",
    "status": "ended well once and badly the other time",
    "shredded": "the data of its subject was shredded, so there is nothing to compare with; no difference",
    "no_key": "its answer is protected, and the keys to read it are not here (pii_keys)",
}
FIELDS_MAX = 8
"""Differing fields named for one record."""


class Original(Struct, frozen=True, gc=False):
    """What the log says of one request."""

    request_id: str
    status: Status
    model: str
    version: str
    weights_digest: str
    engine: str
    outputs: bytes | None
    error_code: str
    seed: int | None
    batch_size: int
    inference_ms: float
    total_ms: float
    finished_at: int


class Again(Struct, frozen=True, gc=False):
    """What the replay made of it. `schema_refused`: not the engine but a schema said no."""

    status: Status
    version: str
    weights_digest: str
    engine: str
    outputs: bytes | None
    error_code: str = ""
    error_message: str = ""
    seed: int | None = None
    schema_refused: bool = False
    inference_ms: float = 0.0
    by_chance: bool = False
    """It was asked to be drawn by chance, and nothing says with which seed."""


class Verdict(Struct, frozen=True, gc=False):
    """`distance`: largest numeric distance of a field, relative where numbers are above 1; inf for texts and shapes."""

    outcome: Literal["equal", "within", "different"]
    cause: Cause | None = None
    distance: float = 0.0
    fields: tuple[str, ...] = ()


EQUAL = Verdict("equal")


def verdict(original: Original, again: Again, tolerance: float = 0.0) -> Verdict:
    """Bytes first: the common case costs one comparison. `tolerance`: largest distance (see Verdict) still accepted."""
    if original.status != again.status:
        return Verdict("different", "schema" if again.schema_refused else "status", math.inf, ("status",))
    if original.status != "ok":
        if original.error_code == again.error_code:
            return EQUAL
        return Verdict("different", "schema" if again.schema_refused else "status", math.inf, ("error.code",))
    if original.outputs == again.outputs:
        return EQUAL
    found = list(differences(decoded(original.outputs), decoded(again.outputs)))
    if not found:
        return EQUAL  # written differently, e.g. keys in another order
    distance = max(one[1] for one in found)
    fields = tuple(one[0] for one in found[:FIELDS_MAX])
    if distance <= tolerance:
        return Verdict("within", None, distance, fields)
    return Verdict("different", _cause(original, again, found), distance, fields)


def _cause(original: Original, again: Again, found: list[tuple[str, float, bool]]) -> Cause:
    same = (original.version, original.engine) == (again.version, again.engine)
    same = same and same_weights(original.weights_digest, again.weights_digest)
    if same and (original.seed != again.seed or again.by_chance):
        return "seed"  # also where the form differs: what is drawn anew may be longer
    if any(shape for _, _, shape in found):
        return "schema"
    return "numeric" if same else "version"


def decoded(outputs: bytes | None) -> Any:
    """The outputs object; text that is no JSON stands for itself."""
    if outputs is None:
        return None
    try:
        return msgspec.json.decode(outputs)
    except msgspec.DecodeError:
        return outputs


def differences(one: Any, other: Any, path: str = "") -> Iterator[tuple[str, float, bool]]:
    """(path, distance, whether it is a difference of form) of every leaf that differs, in a fixed order."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            here = f"{path}.{key}" if path else key
            if key not in one or key not in other:
                yield here, math.inf, True
            else:
                yield from differences(one[key], other[key], here)
    elif isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            yield path, math.inf, True
            return
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from differences(left, right, f"{path}[{number}]")
    elif _number(one) and _number(other):
        if one != other:
            yield path, distance_of(float(one), float(other)), False
    elif one != other or type(one) is not type(other):
        yield path, math.inf, type(one) is not type(other)


def _number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def distance_of(one: float, other: float) -> float:
    """Absolute up to 1, relative to the larger above; inf when only one of them is finite."""
    if not (math.isfinite(one) and math.isfinite(other)):
        return 0.0 if one == other else math.inf
    scale = max(1.0, abs(one), abs(other))
    return abs(one / scale - other / scale)

"""Golden requests: whether what a model answers is what its declaration says it must answer. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from sie_stream.problems import shown

DIFFERENCES_MAX = 5
"""A report names so many, and how many more there are."""


def golden_differences(expected: bytes, answered: bytes, tolerance: float) -> tuple[str, ...]:
    """Where an answer differs from what is expected (JSON objects); fields that are not expected are free.

    Numbers may differ by `tolerance`; everything else must be equal. Empty: it is as it must be.
    """
    wanted = msgspec.json.decode(expected)
    try:
        got = msgspec.json.decode(answered)
    except msgspec.DecodeError as error:
        return (f"the answer is no JSON: {error}",)
    found = list(_differences(wanted, got, "", tolerance))
    if len(found) > DIFFERENCES_MAX:
        found[DIFFERENCES_MAX:] = [f"and {len(found) - DIFFERENCES_MAX} more"]
    return tuple(found)


def _differences(wanted: object, got: object, path: str, tolerance: float) -> Iterator[str]:
    here = path or "the outputs"
    if isinstance(wanted, dict):
        if not isinstance(got, dict):
            yield f"{here}: {shown(got)} is no object"
            return
        for name, value in wanted.items():
            inner = f"{path}.{name}" if path else str(name)
            if name not in got:
                yield f"{inner}: missing"
            else:
                yield from _differences(value, got[name], inner, tolerance)
        return
    if isinstance(wanted, list):
        if not isinstance(got, list) or len(got) != len(wanted):
            yield f"{here}: {shown(got)} instead of a list of {len(wanted)}"
            return
        for number, (one, other) in enumerate(zip(wanted, got, strict=True)):
            yield from _differences(one, other, f"{path}[{number}]", tolerance)
        return
    if _is_number(wanted) and _is_number(got):
        assert isinstance(wanted, int | float)
        assert isinstance(got, int | float)
        if not math.isclose(wanted, got, rel_tol=0.0, abs_tol=tolerance):
            yield f"{here}: {got} instead of {wanted}, off by {abs(got - wanted):.6g} (allowed {tolerance:g})"
        return
    if wanted != got or isinstance(wanted, bool) != isinstance(got, bool):
        yield f"{here}: {shown(got)} instead of {shown(wanted)}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

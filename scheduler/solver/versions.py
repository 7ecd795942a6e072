"""Version ranges of a declaration (`>=12.1,<13`) against what a worker reports (`12.4`, `2.13.0+cpu`).

Only the leading numbers of a reported version count: a pre-release or local build counts as its release. Missing
numbers are zeros. `~=2.2` means at least 2.2 and the same leading numbers but the last; of one number, at least that.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

Version = tuple[int, ...]

NUMBERS = r"([0-9]{1,9}(?:\.[0-9]{1,9})*)"
"""Bounded, as in a declaration: Python refuses to read a number of thousands of digits."""
CLAUSE = re.compile(rf"\s*(>=|<=|==|!=|~=|<|>)\s*{NUMBERS}\s*")
LEADING = re.compile(rf"v?{NUMBERS}(?![0-9])")
COMPARE: dict[str, Callable[[Version, Version], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}


def read_version(text: str) -> Version | None:
    """Leading numbers without trailing zeros; None when there are none."""
    match = LEADING.match(text.strip())
    return None if match is None else _numbers(match.group(1))


def satisfies(version: str, wanted: str) -> bool:
    """Whether `version` lies in the range `wanted`; an unreadable version lies in none.

    Raises ValueError when `wanted` is not a range.
    """
    clauses = read_range(wanted)
    found = read_version(version)
    return found is not None and all(_holds(found, symbol, bound) for symbol, bound in clauses)


def read_range(wanted: str) -> list[tuple[str, str]]:
    """(comparison, version) of each clause. Raises ValueError with the clause that cannot be read."""
    clauses: list[tuple[str, str]] = []
    for part in wanted.split(","):
        match = CLAUSE.fullmatch(part)
        if match is None:
            raise ValueError(
                f"version range {wanted!r}: {part!r} is not a comparison; allowed: >=, <=, ==, !=, ~=, <, > and a "
                "version of numbers, as in '>=12.1,<13'."
            )
        clauses.append((match.group(1), match.group(2)))
    return clauses


def _holds(found: Version, symbol: str, bound: str) -> bool:
    numbers = _numbers(bound)
    if symbol != "~=":
        return COMPARE[symbol](found, numbers)
    kept = bound.count(".")
    leading = tuple(int(number) for number in bound.split(".")[:kept])
    return found >= numbers and _padded(found, kept) == leading


def _padded(version: Version, size: int) -> Version:
    return (version + (0,) * size)[:size]


def _numbers(text: str) -> Version:
    numbers = [int(number) for number in text.split(".")]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)

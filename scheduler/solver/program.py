"""An integer linear program as plain data: what `part` and `bound` build and `cpsat` solves."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

Term = tuple[int, int]
"""(variable, coefficient)"""


class Row(Struct, frozen=True):
    """low <= sum of terms <= high; None: no limit on that side."""

    terms: tuple[Term, ...]
    low: int | None
    high: int | None


class Program:
    """Minimise the sum of cost x value over integer variables within bounds and rows. `hint` is one solution."""

    def __init__(self) -> None:
        self.lower: list[int] = []
        self.upper: list[int] = []
        self.costs: list[int] = []
        self.hint: list[int] = []
        self.rows: list[Row] = []

    def variable(self, upper: int, cost: int = 0, hint: int = 0, lower: int = 0) -> int:
        self.lower.append(lower)
        self.upper.append(upper)
        self.costs.append(cost)
        self.hint.append(hint)
        return len(self.lower) - 1

    def at_most(self, terms: Sequence[Term], high: int) -> None:
        self.rows.append(Row(tuple(terms), None, high))

    def at_least(self, terms: Sequence[Term], low: int) -> None:
        self.rows.append(Row(tuple(terms), low, None))

    def equal(self, terms: Sequence[Term], value: int) -> None:
        self.rows.append(Row(tuple(terms), value, value))

    def value(self, values: Sequence[int]) -> int:
        """The objective."""
        return sum(cost * value for cost, value in zip(self.costs, values, strict=True))

    def broken_by(self, values: Sequence[int]) -> list[Row]:
        """Rows that do not hold; for tests."""
        sums = [(row, sum(values[variable] * coefficient for variable, coefficient in row.terms)) for row in self.rows]
        return [
            row
            for row, found in sums
            if (row.low is not None and found < row.low) or (row.high is not None and found > row.high)
        ]


class Answer(Struct, frozen=True):
    """`values` None: nothing was found within the limit. `bound`: no solution costs less."""

    values: tuple[int, ...] | None
    bound: int
    proven: bool
    """The values are optimal."""
    work: int
    """Millionths of the solver's deterministic time."""

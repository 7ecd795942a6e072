"""Version ranges against reported versions."""

from __future__ import annotations

import pytest

from scheduler.solver.versions import read_range, read_version, satisfies


@pytest.mark.parametrize(
    ("version", "wanted", "holds"),
    [
        ("12.4", ">=12.1,<13", True),
        ("13.0", ">=12.1,<13", False),
        ("12.10", ">=12.9", True),
        ("2.13.0+cpu", ">=2.6", True),
        ("v0.5.1rc2", "==0.5.1", True),
        ("2.6", "==2.6.0", True),
        ("2.6.1", "!=2.6", True),
        ("2.6.0", "!=2.6", False),
        ("2", "<=2.0", True),
        ("2.0.1", "<=2", False),
        ("2.1", ">2.0", True),
        ("2.0", ">2", False),
        ("2.9", "~=2.2", True),
        ("3.0", "~=2.2", False),
        ("2.1", "~=2.2", False),
        ("2.2.9", "~=2.2.1", True),
        ("2.3", "~=2.2.1", False),
        ("3.1", "~=2", True),
        ("unknown", ">=0", False),
        ("", ">=0", False),
        ("12.4", " >= 12 , < 13 ", True),
    ],
)
def test_a_version_lies_in_a_range(version: str, wanted: str, holds: bool) -> None:
    assert satisfies(version, wanted) is holds


@pytest.mark.parametrize("wanted", ["", "12", "=>12", ">=12.x", ">=12,,<13", ">=12,"])
def test_what_is_no_range_says_how_one_looks(wanted: str) -> None:
    with pytest.raises(ValueError, match="allowed: >=, <=, ==, !=, ~=, <, >"):
        read_range(wanted)


def test_trailing_zeros_do_not_count() -> None:
    assert read_version("12.0.0") == read_version("12") == (12,)
    assert read_version("0.0") == (0,)

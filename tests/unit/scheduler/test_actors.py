"""Who asked for something, in the words of decisions."""

from __future__ import annotations

from scheduler.actors import named, named_first


def test_a_name_stays_as_it_is_written_and_nobody_has_one_name_everywhere() -> None:
    assert (named("ada"), named_first("ada")) == ("ada", "ada")
    assert (named(""), named_first("")) == ("somebody unnamed", "Somebody unnamed")

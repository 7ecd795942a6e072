"""`sie-stream keys`: what `keys open` takes from standard input, and what `keys shred` says."""

from __future__ import annotations

import json

import pytest

from sie_stream.cli.keys import named_person, read_results, shredded_in_words
from sie_stream.errors import ConfigError
from sie_stream.privacy.datakeys import Shredded

FOUND = [{"request_id": "a", "outputs": {"x": [1]}}, {"request_id": "b", "outputs": None}]


def test_results_are_read_one_a_line_and_as_the_list_that_results_writes() -> None:
    lines = [json.dumps(one) + "\n" for one in FOUND]
    listed = (json.dumps(FOUND, indent=2) + "\n").splitlines(keepends=True)
    assert list(read_results([lines[0], "\n", lines[1]])) == [("line 1", FOUND[0]), ("line 3", FOUND[1])]
    assert list(read_results(listed)) == [("result 1", FOUND[0]), ("result 2", FOUND[1])]
    assert list(read_results([json.dumps(FOUND)])) == [("result 1", FOUND[0]), ("result 2", FOUND[1])]
    assert list(read_results(["[]\n"])) == []


def test_lines_are_read_as_they_come() -> None:
    def endless() -> object:
        yield json.dumps(FOUND[0])
        raise AssertionError("asked for more before the first was used")

    assert next(read_results(endless())) == ("line 1", FOUND[0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lines", "said"),
    [(["7\n"], "line 1 is no result"), (["\n", "[7]\n"], "line 2 and what follows is no list of results")],
)
def test_anything_else_is_refused_with_its_place(lines: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        list(read_results(lines))


def test_a_shredding_is_told_with_the_person_and_a_time_that_people_read() -> None:
    fact = Shredded("6f1c", ("k1", "k2"), 1_760_000_000_000, "ada")
    now, before = ("\n".join(shredded_in_words("customer-17", fact, removed)) for removed in (1, 0))
    assert "shredded customer-17: 1 of 2 data keys now, at 2025-10-" in now
    assert "customer-17 was shredded before, at 2025-10-" in before
    assert "6f1c" in now


def test_a_person_is_named_by_text_or_by_the_bytes_of_a_record_key() -> None:
    assert named_person("customer-é", "") == ("customer-é".encode(), "customer-é")
    assert named_person("", "00ff") == (b"\x00\xff", "key 00ff")


@pytest.mark.parametrize(
    ("subject", "key_hex", "said"),
    [
        ("a\udcff", "", r"no UTF-8 text: b'a\\xff', at character 1.*--key-hex 61ff"),
        ("", "", "name one person"),
        ("a", "61", "name one person"),
        ("", "6g", "pairs of hexadecimal digits"),
    ],
)
def test_what_names_nobody_is_refused_and_says_what_would(subject: str, key_hex: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        named_person(subject, key_hex)

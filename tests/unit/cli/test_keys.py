"""`sie-stream keys`: what `keys open` takes from standard input, and what `keys shred` says."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from sie_stream.cli import keys
from sie_stream.cli.keys import named_person, read_results, shredded_in_words
from sie_stream.cli.plain_topics import plain_in_words, plain_topics
from sie_stream.cli.since import shown_time
from sie_stream.edge.keyring import create_keyring
from sie_stream.errors import ConfigError
from sie_stream.ports import TopicSpec
from sie_stream.privacy.datakeys import Shredded
from sie_stream.settings import Settings
from topics.catalog import system_topics, work_topic
from topics.plan import HELD_CONFIG

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


DAY_MS = 86_400_000
AT_MS = 1_760_000_000_000


def test_after_a_shredding_the_topics_that_hold_plain_values_are_named_with_their_end() -> None:
    settings = Settings()
    described = [*system_topics(settings), *(work_topic(settings, f"m{number}", 1) for number in range(7))]
    found = plain_topics(settings.topics, described, AT_MS)
    assert [one.topic for one in found] == ["sie.requests", *(f"sie.work.m{number}" for number in range(7))]
    assert {one.until_ms for one in found} == {AT_MS + 8 * DAY_MS}, "seven days, and one until the segment is closed"
    told = list(plain_in_words(found))
    assert "not encrypted" in told[0]
    assert "sie.requests, sie.work.m0, sie.work.m1, sie.work.m2, sie.work.m3 and 3 more: until about" in told[1]
    assert shown_time(AT_MS + 8 * DAY_MS) in told[1]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"cleanup.policy": "delete", "retention.ms": "-1"}, "for ever, its retention.ms is -1"),
        (dict(HELD_CONFIG), "for ever, it is under a legal hold"),
        ({"cleanup.policy": "compact", "retention.ms": "1000"}, "for ever, its cleanup.policy is compact"),
        ({}, "as long as the broker's log.retention.ms says"),
    ],
)
def test_plain_values_without_an_end_are_told_as_such(config: dict[str, str], said: str) -> None:
    names = Settings().topics
    found = plain_topics(names, [TopicSpec(names.requests, 1, config), TopicSpec(names.results, 1, config)], AT_MS)
    assert [(one.topic, one.until_ms) for one in found] == [(names.requests, None)]
    assert any(said in line for line in plain_in_words(found))


def test_keys_shred_tells_what_it_does_not_reach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = Settings()
    described = [*system_topics(settings), work_topic(settings, "churn", 1)]
    admin = SimpleNamespace(describe_all=lambda _prefix: described)
    fact = Shredded("6f1c", ("k1",), AT_MS, "ada")
    monkeypatch.setattr(keys, "_changing", lambda _servers: nullcontext((settings, None, None)))
    monkeypatch.setattr(keys.KafkaAdmin, "of", lambda _settings: admin)
    monkeypatch.setattr(keys, "shred", lambda *_parts: (fact, 1))
    ring = tmp_path / "ring"
    create_keyring(ring)
    told = CliRunner().invoke(keys.app, ["shred", "customer-17", "--ring", str(ring)])
    assert told.exit_code == 0, told.exception
    assert "sie.requests, sie.work.churn: until about" in told.output
    written = json.loads(
        CliRunner().invoke(keys.app, ["shred", "customer-17", "--ring", str(ring), "-o", "json"]).output
    )
    assert [one["topic"] for one in written["plain"]] == ["sie.requests", "sie.work.churn"]

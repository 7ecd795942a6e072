"""Reading stretches, and the index of request ids, over the log in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sie_stream.cli.trace_lookup import own_place
from sie_stream.edge.request_index import RequestIndex, signed_digest
from sie_stream.edge.spans import Span, partitions_of, read_spans, window
from sie_stream.errors import ConfigError
from sie_stream.ids import TopicPartition
from sie_stream.partitioner import keyed_partition
from sie_stream.ports import LogReader, TopicSpec
from sie_stream.records import LogRecord, LogWrite
from sie_stream.sim.log import SimLog

TOPIC = "sie.results"
PLACES = [TopicPartition(TOPIC, number) for number in range(2)]


@pytest.fixture
def log() -> SimLog:
    made = SimLog(session_timeout_ms=10_000)
    made.admin().ensure([TopicSpec(TOPIC, 2, {})])
    return made


@pytest.fixture
def index(tmp_path: Path) -> Iterator[RequestIndex]:
    with RequestIndex(tmp_path / "trace" / "index.sqlite") as made:
        yield made


def write(log: SimLog, names: list[str]) -> None:
    writer = log.plain_writer(1_000_000)
    writer.write([LogWrite(TOPIC, name.encode(), b"k", number % 2) for number, name in enumerate(names)])
    writer.flush(1_000)


def ids_of(record: LogRecord) -> str:
    return (record.value or b"").decode()


def catch_up(index: RequestIndex, reader: LogReader) -> int:
    """Records that were read."""
    counted: list[int] = []
    index.catch_up(reader, index.behind(reader, PLACES), ids_of, counted.append)
    return sum(counted)


def test_a_stretch_is_read_and_nothing_around_it(log: SimLog) -> None:
    write(log, [f"r{number}" for number in range(10)])
    reader = log.reader("g")
    found = [ids_of(record) for record in read_spans(reader, {PLACES[0]: Span(1, 3), PLACES[1]: Span(4, 5)})]
    assert sorted(found) == ["r2", "r4", "r9"]
    assert list(read_spans(reader, {PLACES[0]: Span(5, 5)})) == []
    again = [ids_of(record) for record in read_spans(reader, {PLACES[0]: Span(0, 1)})]
    assert again == ["r0"], "the partitions were given back"
    assert partitions_of(reader, "none") == []


def test_records_of_a_transaction_that_was_aborted_are_passed_over(log: SimLog) -> None:
    writer = log.transactional_writer("t", 10_000, 1_000_000)
    writer.init()
    writer.begin()
    writer.write([LogWrite(TOPIC, b"gone", b"k", 0)])
    writer.abort()
    write(log, ["kept"])
    reader = log.reader("g")
    ends = reader.end_offsets(PLACES)
    assert ends[PLACES[0]] == 3
    assert [ids_of(record) for record in read_spans(reader, {PLACES[0]: Span(0, 3)})] == ["kept"]


def test_a_window_of_time_is_a_stretch(log: SimLog) -> None:
    write(log, ["a", "b"])
    log.clock.advance(1_000)
    begun = log.clock.now_ms()
    write(log, ["c", "d"])
    log.clock.advance(1_000)
    write(log, ["e", "f"])
    spans = window(log.reader("g"), PLACES, begun, begun + 500)
    assert spans == {place: Span(1, 2) for place in PLACES}


def test_the_index_is_continued_and_finds_every_record_of_an_id(log: SimLog, index: RequestIndex) -> None:
    reader = log.reader("g")
    write(log, ["a", "b", "a", "c"])
    assert catch_up(index, reader) == 4
    assert index.find("a") == [(PLACES[0], 0), (PLACES[0], 1)]
    assert index.find("none") == []
    assert catch_up(index, reader) == 0
    write(log, ["a"])
    assert catch_up(index, reader) == 1
    assert index.find("a") == [(PLACES[0], 0), (PLACES[0], 1), (PLACES[0], 2)]


def test_a_topic_made_anew_is_read_again(log: SimLog, index: RequestIndex) -> None:
    write(log, ["a", "b", "c", "d"])
    catch_up(index, log.reader("g"))
    other = SimLog(session_timeout_ms=10_000)
    other.admin().ensure([TopicSpec(TOPIC, 2, {})])
    write(other, ["x", "b"])
    catch_up(index, other.reader("g"))
    assert index.find("a") == []
    assert index.find("x") == [(PLACES[0], 0)]


def test_retention_before_the_first_reading_is_no_gap(log: SimLog, index: RequestIndex) -> None:
    write(log, ["a", "b", "c", "d"])
    log.delete_before(PLACES[0], 1)
    assert catch_up(index, log.reader("g")) == 3
    assert index.find("a") == []
    assert index.next_offsets() == dict.fromkeys(PLACES, 2)


def test_a_file_that_is_no_index_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    path.write_bytes(b"not a database, but long enough to look like a file of one" * 20)
    with pytest.raises(ConfigError, match="Delete it"):
        RequestIndex(path)


def test_digests_fit_into_sqlite_and_keys_go_where_java_puts_them() -> None:
    assert all(-(2**63) <= signed_digest(f"r{number}") < 2**63 for number in range(100))
    # From Apache Kafka's own test of murmur2, made positive.
    assert keyed_partition(b"21", 1 << 31) == -973932308 & 0x7FFFFFFF
    assert keyed_partition(b"foobar", 1 << 31) == -790332482 & 0x7FFFFFFF
    assert keyed_partition(b"a-little-bit-long-string", 1 << 31) == -985981536 & 0x7FFFFFFF


def test_ids_that_name_a_place() -> None:
    assert own_place("src:sie.requests:3:17") == (TopicPartition("sie.requests", 3), 17)
    assert own_place("src:orders:0:9:mi-0a1b") == (TopicPartition("orders", 0), 9)
    assert own_place("6f1c0a") is None

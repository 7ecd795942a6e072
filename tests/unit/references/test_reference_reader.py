"""Reading beside a loop: never waited for longer than said, bounded in time, number and bytes."""

from __future__ import annotations

import threading

import pytest

from sie_stream.edge.reference_reader import HUNG_MAX, ROOM_BYTES, ReferenceReader
from sie_stream.errors import InvalidRequest
from sie_stream.records import InputsRef
from sie_stream.sim.clock import SimClock
from tests.waiting import wait_until


class Store:
    """Answers when it is let; by name of the object."""

    def __init__(self, size: int = 0) -> None:
        self._size = size
        self.started: list[str] = []
        self._gates: dict[str, threading.Event] = {}

    def gate(self, url: str) -> threading.Event:
        return self._gates.setdefault(url, threading.Event())

    def read(self, ref: InputsRef) -> bytes:
        self.started.append(ref.url)
        assert self.gate(ref.url).wait(60)
        if ref.url == "missing":
            raise InvalidRequest("reference_missing", "gone", "inputs_ref")
        return ref.url.encode().ljust(self._size)


def refs(*urls: str) -> list[InputsRef]:
    return [InputsRef(url, "") for url in urls]


def reader(store: Store, clock: SimClock, at_once: int = 2, bytes_max: int = 1_000) -> ReferenceReader:
    return ReferenceReader(store.read, clock, 1_000, at_once, bytes_max)


def code(outcome: object) -> str:
    assert isinstance(outcome, InvalidRequest)
    return outcome.code


def test_what_is_not_there_yet_is_asked_for_again() -> None:
    store, clock = Store(), SimClock()
    contents = reader(store, clock)
    one, missing = refs("one", "missing")
    assert contents.ask(one) is None
    assert contents.ask(missing) is None
    store.gate("one").set()
    store.gate("missing").set()
    assert wait_until(lambda: contents.ask(one), "the object") == b"one"
    assert code(wait_until(lambda: contents.ask(missing), "the refusal")) == "reference_missing"
    assert contents.ask(one) == b"one", "until it is settled, an aborted batch may ask again"
    contents.settled()
    assert contents.ask(one) is None
    wait_until(lambda: store.started.count("one") == 2, "the second reading")


def test_only_some_are_read_at_once_in_their_order() -> None:
    store, clock = Store(), SimClock()
    contents = reader(store, clock)
    for ref in refs("a", "b", "c", "d"):
        contents.prepare(ref)
    wait_until(lambda: len(store.started) == 2, "two readings")
    store.gate("a").set()
    wait_until(lambda: len(store.started) == 3, "the third")
    assert sorted(store.started) == ["a", "b", "c"]
    for gate in "bcd":
        store.gate(gate).set()
    wait_until(lambda: contents.ask(refs("d")[0]), "the last")


def test_one_that_hangs_is_given_up_and_its_place_taken() -> None:
    store, clock = Store(), SimClock()
    contents = reader(store, clock, at_once=1)
    hanging, other = refs("hanging", "other")
    assert contents.ask(hanging) is None
    clock.advance(999)
    assert contents.ask(hanging) is None
    assert contents.ask(other) is None
    clock.advance(1)
    assert code(contents.ask(hanging)) == "reference_timeout"
    store.gate("other").set()
    assert wait_until(lambda: contents.ask(other), "the other") == b"other"
    store.gate("hanging").set()
    contents.settled()
    clock.advance(2_000)
    assert contents.ask(hanging) is None, "what came too late is not an answer to the next who asks"
    assert wait_until(lambda: contents.ask(hanging), "the object") == b"hanging"


def test_waiting_for_others_is_no_hanging() -> None:
    store, clock = Store(), SimClock()
    contents = reader(store, clock, at_once=1)
    asked = refs("s3://a/first", "s3://a/second", "s3://a/third")
    for ref in asked:
        assert contents.ask(ref) is None
    for number, ref in enumerate(asked[:2], start=1):
        clock.advance(900)
        store.gate(ref.url).set()
        wait_until(lambda number=number: len(store.started) > number, "the next")
    store.gate(asked[2].url).set()
    assert wait_until(lambda: contents.ask(asked[2]), "the third") == asked[2].url.encode()


def test_a_store_that_hangs_is_left_alone_for_a_while() -> None:
    store, clock = Store(), SimClock()
    contents = reader(store, clock, at_once=2)
    asked = refs(*(f"s3://a/{number}" for number in range(10)))
    (other,) = refs("s3://b/1")
    for ref in asked:
        contents.prepare(ref)
    wait_until(lambda: len(store.started) == 2, "both readings")
    clock.advance(1_000)
    assert [code(contents.ask(ref)) for ref in asked[:2]] == ["reference_timeout"] * 2
    assert {code(contents.ask(ref)) for ref in asked[2:]} == {"reference_unavailable"}
    store.gate(other.url).set()
    assert wait_until(lambda: contents.ask(other), "what another store has") == other.url.encode()
    contents.settled()
    clock.advance(2_000)
    store.gate(asked[5].url).set()
    assert wait_until(lambda: contents.ask(asked[5]), "the store, which is back") == asked[5].url.encode()
    for ref in asked:
        store.gate(ref.url).set()


def test_a_neighbour_that_is_there_ends_no_wait() -> None:
    store, clock = Store(), SimClock()
    contents = reader(store, clock)
    asked, ready = refs("asked", "ready")
    store.gate("ready").set()
    contents.prepare(ready)
    contents.wait(60_000)
    assert contents.ask(asked) is None
    waiting = threading.Thread(target=contents.wait, args=(60_000,))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive(), "a loop that holds a partition would spin"
    store.gate("asked").set()
    waiting.join(60)
    assert not waiting.is_alive()


def test_only_so_many_threads_are_left_behind() -> None:
    store, clock = Store(), SimClock()
    others = threading.active_count()
    contents = reader(store, clock, at_once=2)
    codes = []
    for number in range(200):
        (ref,) = refs(f"r{number}://a/b")
        contents.prepare(ref)
        clock.advance(1_000)
        codes.append(code(contents.ask(ref)))
    assert set(codes[: HUNG_MAX + 2]) == {"reference_timeout"}
    assert set(codes[HUNG_MAX + 2 :]) == {"reference_unavailable"}
    assert threading.active_count() - others < 100
    for number in range(200):
        store.gate(f"r{number}://a/b").set()
    store.gate("again").set()

    def back() -> bool:
        contents.settled()
        return wait_until(lambda: contents.ask(refs("again")[0]), "an answer") == b"again"

    wait_until(back, "threads to come back")


def test_bytes_that_nobody_took_hold_others_back() -> None:
    store, clock = Store(), SimClock()
    contents = reader(store, clock, at_once=8, bytes_max=ROOM_BYTES // 2)
    asked = refs("a", "b", "c")
    for ref in asked:
        contents.prepare(ref)
    wait_until(lambda: len(store.started) == 2, "two of them")
    for gate in "abc":
        store.gate(gate).set()
    for ref in asked:
        wait_until(lambda ref=ref: contents.ask(ref), "its object")


def test_what_is_asked_for_goes_before_what_is_prepared() -> None:
    store, clock = Store(), SimClock()
    contents = reader(store, clock, at_once=1)
    prepared, (asked,) = refs("a", "b", "c"), refs("asked")
    for ref in prepared:
        contents.prepare(ref)
    assert contents.ask(asked) is None
    store.gate("a").set()
    wait_until(lambda: len(store.started) == 2, "the second reading")
    assert store.started == ["a", "asked"]
    for gate in ("asked", "b", "c"):
        store.gate(gate).set()


def test_what_is_prepared_gives_its_room_to_what_is_asked_for() -> None:
    """It may stand behind it in a partition that goes back, and be wanted at every turn: nobody would take it."""
    store, clock = Store(size=ROOM_BYTES // 2), SimClock()
    contents = reader(store, clock, at_once=8, bytes_max=ROOM_BYTES // 2)
    behind, (asked,) = refs("a", "b"), refs("asked")
    for gate in ("a", "b", "asked"):
        store.gate(gate).set()
    for ref in behind:
        contents.prepare(ref)

    def there() -> object:
        found = contents.ask(asked)
        for ref in behind:
            contents.prepare(ref)
        return found

    wait_until(lambda: len(store.started) == 2, "what is behind")
    assert wait_until(there, "what is asked for")


def test_what_hangs_and_nobody_asks_for_gives_its_place_back() -> None:
    """Its partition went to another process, or its request ends without being read."""
    store, clock = Store(), SimClock()
    contents = reader(store, clock, at_once=2)
    hanging, (asked,) = refs("s3://a/1", "s3://a/2"), refs("s3://b/1")
    for ref in hanging:
        contents.prepare(ref)
    wait_until(lambda: len(store.started) == 2, "both readings")
    clock.advance(1_000)
    store.gate(asked.url).set()
    assert wait_until(lambda: contents.ask(asked), "what another store has") == asked.url.encode()
    for ref in hanging:
        store.gate(ref.url).set()


def test_what_nobody_wants_any_more_is_forgotten() -> None:
    store, clock = Store(), SimClock()
    contents = reader(store, clock)
    (ref,) = refs("a")
    store.gate("a").set()
    contents.prepare(ref)
    contents.wait(60_000)
    clock.advance(3_000)
    contents.settled()
    store.gate("a").clear()
    assert contents.ask(ref) is None
    store.gate("a").set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_ends_its_request_and_the_next_are_read() -> None:
    def read(ref: InputsRef) -> bytes:
        if ref.url.startswith("bad"):
            raise RuntimeError("a fault")
        return ref.url.encode()

    contents = ReferenceReader(read, SimClock(), 1_000, 1, 1_000)
    for number in range(HUNG_MAX + 2):
        (bad,) = refs(f"bad{number}")
        assert code(wait_until(lambda bad=bad: contents.ask(bad), "the refusal")) == "reference_unavailable"
    assert wait_until(lambda: contents.ask(refs("good")[0]), "the object") == b"good"

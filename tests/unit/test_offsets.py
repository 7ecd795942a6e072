"""The ledger against a slow, obvious twin, and its metadata against everything that could reach it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sie_stream.offset_metadata import METADATA_CHARS_MAX, PAYLOAD_BYTES_MAX, decode, encode, payload_bound
from sie_stream.offsets import PAYLOAD_BYTES_STOP, OffsetLedger
from sie_stream.records import CommittedOffset


class Twin:
    """Progress the slow way: every visible offset, and who finished it."""

    def __init__(self, committed: int, done: set[int]) -> None:
        self.next_offset = committed
        self.started: set[int] = set()
        self.done = done

    def committable(self) -> int:
        unfinished = self.started - self.done
        return min(unfinished) if unfinished else self.next_offset


def numbers(ranges: list[tuple[int, int]], among: list[int]) -> set[int]:
    return {offset for offset in among for first, end in ranges if first <= offset < end}


class LedgerMachine(RuleBasedStateMachine):
    """A partition is read by one owner after the other. Offsets have gaps; every visible one must be done exactly once."""

    def __init__(self) -> None:
        super().__init__()
        self.visible: list[int] = []
        self.at = 0
        """Index of the next record this owner reads."""
        self.epoch = 0
        self.committed = CommittedOffset(0)
        self.done_committed: set[int] = set()
        """What was finished at the last commit: this must never be processed again."""
        self.ledger = OffsetLedger(0, 0, open_max=3_000)
        self.twin = Twin(0, set())
        self.processed: dict[int, int] = {}

    @rule(
        count=st.integers(1, 400),
        gap=st.sampled_from([0, 0, 0, 1, 1, 2, 7, 300, 70_000, 5_000_000]),
        every=st.integers(1, 9),
    )
    def write(self, count: int, gap: int, every: int) -> None:
        offset = self.visible[-1] + 1 if self.visible else 3
        for index in range(count):
            if index % every == 0:
                offset += gap
            self.visible.append(offset)
            offset += 1

    @rule(records=st.integers(1, 600))
    def read(self, records: int) -> None:
        """What a host does with one poll: skip, start what may be started, pause before the rest."""
        batch = self.visible[self.at : self.at + records]
        for offset in batch:
            if self.ledger.is_done(offset):
                self.ledger.skip(offset)
                self.twin.next_offset = offset + 1
                assert offset in self.done_committed
            elif self.ledger.may_start(offset):
                self.ledger.start(offset)
                self.twin.started.add(offset)
                self.twin.next_offset = offset + 1
            else:
                assert self.ledger.open > 0, "nothing open, so nothing would ever resume this partition"
                return
            self.at += 1

    @rule(records=st.integers(1, 600))
    def read_many(self, records: int) -> None:
        batch = self.visible[self.at : self.at + records]
        if any(self.ledger.is_done(offset) for offset in batch):
            return
        count = self.ledger.startable(batch)
        assert count > 0 or not batch or self.ledger.open > 0
        self.ledger.start_many(batch[:count])
        self.twin.started.update(batch[:count])
        if count:
            self.twin.next_offset = batch[count - 1] + 1
        self.at += count

    @precondition(lambda self: self.ledger.open > 0)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """Some pattern that makes metadata long: alternating, from the back, random, or all but the first."""
        unfinished = sorted(self.twin.started - self.twin.done)
        pattern = data.draw(st.sampled_from(["alternate", "back", "random", "all_but_first", "first", "all"]))
        chooser = random.Random(data.draw(st.integers(0, 1_000_000)))
        chosen = {
            "alternate": unfinished[1::2],
            "back": unfinished[len(unfinished) // 2 :],
            "random": [offset for offset in unfinished if chooser.random() < 0.5],
            "all_but_first": unfinished[1:],
            "first": unfinished[:1],
            "all": unfinished,
        }[pattern]
        if chooser.random() < 0.5:
            chooser.shuffle(chosen)
            self.ledger.finish_many(chosen)
        else:
            for offset in chosen:
                self.ledger.finish(offset)
        self.twin.done.update(chosen)
        for offset in chosen:
            self.processed[offset] = self.processed.get(offset, 0) + 1

    @rule()
    def commit(self) -> None:
        """Results and offset in one transaction."""
        self.committed = self.ledger.committed()
        self.done_committed = set(self.twin.done)

    @rule()
    def crash(self) -> None:
        """The next owner resumes; whatever was not committed is undone."""
        self.epoch += 1
        self.ledger = OffsetLedger.resume(self.epoch, self.committed, open_max=3_000)
        assert self.ledger.metadata_understood
        assert self.ledger.assignment_epoch == self.epoch
        self.twin = Twin(self.committed.offset, set(self.done_committed))
        self.processed = dict.fromkeys(self.done_committed, 1)
        self.at = next(
            (index for index, offset in enumerate(self.visible) if offset >= self.committed.offset), len(self.visible)
        )

    @invariant()
    def agrees_with_twin(self) -> None:
        assert self.ledger.committable == self.twin.committable()
        assert self.ledger.open == len(self.twin.started - self.twin.done)

    @invariant()
    def metadata_fits_and_says_everything(self) -> None:
        text = self.ledger.encode_metadata()
        assert len(text) <= METADATA_CHARS_MAX
        base = self.ledger.committable
        ranges = decode(base, text)
        assert ranges is not None
        above = [offset for offset in self.visible if offset >= base]
        assert numbers(ranges, above) == {offset for offset in self.twin.done if offset >= base}

    @invariant()
    def nothing_twice(self) -> None:
        assert all(times == 1 for times in self.processed.values())


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedgerAgainstTwin = LedgerMachine.TestCase


ranges_strategy = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 40)), max_size=200)


def ranges_above(base: int, gaps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    ranges = []
    for gap, length in gaps:
        ranges.append((base + gap, base + gap + length))
        base += gap + length
    return ranges


@given(base=st.integers(0, 1 << 50), gaps=ranges_strategy)
def test_metadata_round_trip(base: int, gaps: list[tuple[int, int]]) -> None:
    ranges = ranges_above(base, gaps)
    assert decode(base, encode(base, ranges)) == ranges


@given(base=st.integers(0, 1 << 40), gaps=ranges_strategy)
def test_payload_bound_is_never_exceeded(base: int, gaps: list[tuple[int, int]]) -> None:
    ranges = ranges_above(base, gaps)
    if ranges:
        chars = len(encode(base, ranges))
        assert chars <= (payload_bound(ranges[-1][1] - base, len(ranges)) + 5) * 4 / 3 + 1


@given(text=st.text(max_size=200) | st.binary(max_size=200).map(lambda raw: raw.decode("latin-1")))
def test_garbage_metadata_means_start_over(text: str) -> None:
    ledger = OffsetLedger.resume(1, CommittedOffset(100, text))
    assert ledger.metadata_understood == (text == "")
    assert ledger.committable == 100
    assert not any(ledger.is_done(offset) for offset in range(90, 400))


@given(
    gaps=ranges_strategy.filter(bool),
    at=st.integers(0, 10_000),
    replacement=st.sampled_from("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"),
)
def test_a_mangled_character_is_noticed(gaps: list[tuple[int, int]], at: int, replacement: str) -> None:
    text = encode(7, ranges_above(7, gaps))
    place = at % (len(text) - 1)  # the last character may carry unused bits
    mangled = text[:place] + replacement + text[place + 1 :]
    assert decode(7, mangled) == (decode(7, text) if mangled == text else None)


def test_metadata_moved_to_another_offset_is_not_believed() -> None:
    text = encode(500, [(510, 520)])
    assert OffsetLedger.resume(1, CommittedOffset(500, text)).is_done(515)
    moved = OffsetLedger.resume(1, CommittedOffset(0, text))
    assert not moved.metadata_understood
    assert not moved.is_done(15)


def test_dense_partition_stops_starting_at_three_quarters() -> None:
    ledger = OffsetLedger(0, 0, open_max=1_000_000)
    offset = 0
    while ledger.may_start(offset):
        ledger.start(offset)
        offset += 1
    assert offset == PAYLOAD_BYTES_STOP * 8
    ledger.finish_many(range(1, offset, 2))
    assert len(ledger.encode_metadata()) <= METADATA_CHARS_MAX * 3 // 4 + 8
    ledger.finish(0)
    assert ledger.may_start(offset)


def test_a_full_ledger_says_so_and_recovers() -> None:
    ledger = OffsetLedger(0, 10, open_max=3)
    assert ledger.startable([10, 12, 13, 14]) == 3
    ledger.start_many([10, 12, 13])
    assert ledger.full
    assert not ledger.may_start(14)
    ledger.finish(12)
    assert (ledger.committable, ledger.full, ledger.open) == (10, False, 2)
    ledger.finish(10)
    assert ledger.committable == 13


def test_gap_of_an_aborted_batch_neither_blocks_nor_bloats() -> None:
    ledger = OffsetLedger(0, 0)
    ledger.start_many([0, 1, 100_000, 100_001])
    ledger.finish_many([1, 100_000])
    assert ledger.committable == 0
    assert len(ledger.encode_metadata()) < 20
    ledger.finish(0)
    assert ledger.committable == 100_001


def test_wrong_finishes_are_refused_and_change_nothing() -> None:
    ledger = OffsetLedger(0, 0)
    ledger.start_many([0, 1, 2])
    ledger.finish(1)
    for wrong in ([1], [5], [0, 0], [0, 5]):
        with pytest.raises(KeyError):
            ledger.finish_many(wrong)
    assert (ledger.committable, ledger.open) == (0, 2)
    with pytest.raises(AssertionError):
        ledger.start(2)


def test_next_owner_skips_exactly_what_was_finished() -> None:
    first = OffsetLedger(1, 0)
    first.start_many([0, 2, 4, 6])
    first.finish_many([2, 6])
    second = OffsetLedger.resume(2, first.committed())
    assert [offset for offset in (0, 2, 4, 6, 8) if second.is_done(offset)] == [2, 6]
    second.start(0)
    second.skip(2)
    second.finish(0)
    assert second.committable == 3
    assert OffsetLedger.resume(3, second.committed()).is_done(6)


def test_payload_always_leaves_room() -> None:
    assert PAYLOAD_BYTES_STOP < PAYLOAD_BYTES_MAX
    assert (PAYLOAD_BYTES_MAX + 5) * 4 / 3 <= METADATA_CHARS_MAX

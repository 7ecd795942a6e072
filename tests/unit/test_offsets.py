"""The ledger against a slow, obvious twin, and its metadata against everything that could reach it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sie_stream.offset_metadata import METADATA_CHARS_MAX, PAYLOAD_BYTES_MAX, decode, encode, varint_bytes
from sie_stream.offsets import PAYLOAD_BYTES_STOP, OffsetLedger
from sie_stream.records import CommittedOffset
from tests.examples import examples


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
    """One owner after the other reads a partition with gaps; every visible offset must be done exactly once."""

    def __init__(self) -> None:
        super().__init__()
        self.visible: list[int] = []
        self.at = 0
        """Index of the next record this owner reads."""
        self.epoch = 0
        self.committed = CommittedOffset(0)
        self.done_committed: set[int] = set()
        """What was finished at the last commit: this must never be processed again."""
        self.ledger = OffsetLedger(0, open_max=3_000)
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
        """A careful host: asks before each record, pauses before the rest."""
        for offset in self.visible[self.at : self.at + records]:
            if not self.ledger.may_start:
                assert self.ledger.open > 0, "nothing open, so nothing would ever resume this partition"
                return
            if self.ledger.refused:
                assert self.ledger.reread() == self.ledger.next_offset
            self._start(offset)

    @rule(records=st.integers(1, 2_500))
    def read_a_whole_poll(self, records: int) -> None:
        """A fast host: takes up all that a poll brought, and reads again from where the ledger refused."""
        if not self.ledger.may_start:
            return
        self.ledger.reread()
        for offset in self.visible[self.at : self.at + records]:
            self._start(offset)

    def _start(self, offset: int) -> None:
        twin = self.twin
        done = offset in self.done_committed
        assert self.ledger.is_done(offset) == done or self.ledger.refused
        started = self.ledger.start(offset)
        if self.ledger.refused:
            assert not started
            assert self.ledger.open > 0, "nothing open, so nothing would ever resume this partition"
            return
        assert started is not done
        self.at += 1
        twin.next_offset = offset + 1
        if started:
            twin.started.add(offset)

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
        self.committed = self.ledger.to_commit()
        self.done_committed = set(self.twin.done)

    @rule()
    def crash(self) -> None:
        """The next owner resumes; whatever was not committed is undone."""
        self.epoch += 1
        self.ledger = OffsetLedger.resume(self.committed, 3_000, self.epoch)
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


LedgerMachine.TestCase.settings = settings(examples(60), stateful_step_count=40)
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


@given(left=st.integers(0, 1 << 40), right=st.integers(0, 1 << 40))
def test_joining_steps_never_costs_more(left: int, right: int) -> None:
    assert varint_bytes(left + right) <= varint_bytes(left) + varint_bytes(right)


@given(text=st.text(max_size=200) | st.binary(max_size=200).map(lambda raw: raw.decode("latin-1")))
def test_garbage_metadata_means_start_over(text: str) -> None:
    ledger = OffsetLedger.resume(CommittedOffset(100, text))
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
    assert OffsetLedger.resume(CommittedOffset(500, text)).is_done(515)
    moved = OffsetLedger.resume(CommittedOffset(0, text))
    assert not moved.metadata_understood
    assert not moved.is_done(15)


def test_dense_partition_pauses_at_three_quarters_and_refuses_at_the_end() -> None:
    ledger = OffsetLedger(0, open_max=1_000_000)
    offset = 0
    while ledger.may_start:
        assert ledger.start(offset)
        offset += 1
    assert offset == PAYLOAD_BYTES_STOP * 8
    while ledger.start(offset):
        offset += 1
    assert offset == PAYLOAD_BYTES_MAX * 8
    assert ledger.refused
    ledger.finish_many(range(1, offset, 2))
    assert len(ledger.encode_metadata()) == METADATA_CHARS_MAX
    assert not ledger.start(offset + 1)
    assert ledger.next_offset == offset
    ledger.finish_many(range(0, offset - 1_000, 2))
    assert ledger.may_start
    assert ledger.reread() == offset
    assert ledger.start(offset)


def test_wide_gaps_are_refused_before_they_overflow() -> None:
    """Every record behind a gap of 1,000: three bytes for each, and the bitset is out of the question."""
    ledger = OffsetLedger(0, open_max=1_000_000)
    offset = 0
    while ledger.start(offset):
        offset += 1_000
    assert 1_000 < ledger.open < 2_000
    ledger.finish_many(range(1_000, offset, 2_000))
    assert METADATA_CHARS_MAX // 2 < len(ledger.encode_metadata()) <= METADATA_CHARS_MAX


def test_a_full_ledger_says_so_and_recovers() -> None:
    ledger = OffsetLedger(10, open_max=3)
    assert ledger.start_many([10, 12, 13]) == [10, 12, 13]
    assert ledger.full
    assert not ledger.may_start
    ledger.finish(12)
    assert (ledger.committable, ledger.full, ledger.open) == (10, False, 2)
    ledger.finish(10)
    assert ledger.committable == 13


def test_gap_of_an_aborted_batch_neither_blocks_nor_bloats() -> None:
    ledger = OffsetLedger(0)
    ledger.start_many([0, 1, 100_000, 100_001])
    ledger.finish_many([1, 100_000])
    assert ledger.committable == 0
    assert len(ledger.encode_metadata()) < 20
    ledger.finish(0)
    assert ledger.committable == 100_001


def test_wrong_finishes_are_refused_and_change_nothing() -> None:
    ledger = OffsetLedger(0)
    ledger.start_many([0, 1, 2])
    ledger.finish(1)
    for wrong in ([1], [5], [0, 0], [0, 5]):
        with pytest.raises(KeyError):
            ledger.finish_many(wrong)
    assert (ledger.committable, ledger.open) == (0, 2)
    with pytest.raises(ValueError, match="started or skipped already"):
        ledger.start(2)


def test_next_owner_skips_exactly_what_was_finished() -> None:
    first = OffsetLedger(0)
    first.start_many([0, 2, 4, 6])
    first.finish_many([2, 6])
    second = OffsetLedger.resume(first.to_commit())
    assert [offset for offset in (0, 2, 4, 6, 8) if second.is_done(offset)] == [2, 6]
    assert second.start_many([0, 2]) == [0]
    second.finish(0)
    assert second.committable == 3
    assert OffsetLedger.resume(second.to_commit()).is_done(6)


def test_payload_always_leaves_room() -> None:
    assert PAYLOAD_BYTES_STOP < PAYLOAD_BYTES_MAX
    assert (PAYLOAD_BYTES_MAX + 5) * 4 / 3 <= METADATA_CHARS_MAX

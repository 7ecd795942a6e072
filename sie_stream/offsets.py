"""The ledger: what may be committed of one partition during one assignment.

Batches finish out of order. Committable is the lowest unfinished offset; finished offsets above it travel in the
commit's metadata, so the next owner skips them. Losing one of those would mean processing it twice, so the metadata
must always fit: starting stops while the worst that could happen to what is open still fits (see may_start).
Offsets that no reader ever sees (transaction markers, aborted records, compaction) are never started and never block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import islice
from operator import lt

from sie_stream.offset_metadata import METADATA_CHARS_MAX, PAYLOAD_BYTES_MAX, Range, decode, encode, payload_bound
from sie_stream.records import CommittedOffset

OPEN_MAX = 2_048
PAYLOAD_BYTES_STOP = PAYLOAD_BYTES_MAX * 3 // 4
"""Starting stops when the worst case would need more: 75 % of what fits."""


class OffsetLedger:
    """Progress through one partition during one assignment. Constant work per record.

    Offsets are started in rising order and finished in any order. `assignment_epoch` lets the owner tell completions
    of an earlier assignment from its own.
    """

    __slots__ = (
        "_done_ends",
        "_done_firsts",
        "_encoded",
        "_started",
        "_unfinished",
        "assignment_epoch",
        "metadata_understood",
        "next_offset",
        "open_max",
    )

    def __init__(self, assignment_epoch: int, next_offset: int, open_max: int = OPEN_MAX) -> None:
        assert next_offset >= 0, next_offset
        assert open_max >= 1, open_max
        self.assignment_epoch = assignment_epoch
        self.next_offset = next_offset
        """Lowest offset not yet started or skipped."""
        self.open_max = open_max
        self.metadata_understood = True
        self._started: deque[int] = deque()
        """Started offsets from the lowest unfinished one on; the first is always unfinished."""
        self._unfinished: set[int] = set()
        self._done_firsts: list[int] = []
        self._done_ends: list[int] = []
        """Ranges finished by earlier owners, above the committable offset."""
        self._encoded: str | None = None

    @classmethod
    def resume(cls, assignment_epoch: int, committed: CommittedOffset, open_max: int = OPEN_MAX) -> OffsetLedger:
        """Continue where the last owner committed. Metadata that cannot be trusted: redo from there, skip nothing.

        `metadata_understood` is False then, so that the owner can say so.
        """
        ledger = cls(assignment_epoch, committed.offset, open_max)
        ranges = decode(committed.offset, committed.metadata)
        ledger.metadata_understood = ranges is not None
        for first, end in ranges or ():
            ledger._done_firsts.append(first)
            ledger._done_ends.append(end)
        return ledger

    # ------------------------------------------------------------ questions

    @property
    def committable(self) -> int:
        """The lowest offset that is not finished: what may be committed."""
        return self._started[0] if self._started else self.next_offset

    @property
    def open(self) -> int:
        """Started and unfinished."""
        return len(self._unfinished)

    @property
    def full(self) -> bool:
        return len(self._unfinished) >= self.open_max

    def is_done(self, offset: int) -> bool:
        """An earlier owner finished this offset and committed its result."""
        if not self._done_firsts:
            return False
        at = bisect_right(self._done_firsts, offset) - 1
        return at >= 0 and offset < self._done_ends[at]

    def may_start(self, offset: int) -> bool:
        """Whether `offset` may be started now. False: pause the partition until something finishes."""
        return self.startable((offset,)) == 1

    def startable(self, offsets: Sequence[int]) -> int:
        """How many of the leading `offsets` (rising, none of them done) may be started now.

        When nothing is open the first one always may: finishing it can only shorten the metadata.
        """
        count = min(len(offsets), self.open_max - len(self._unfinished))
        if count <= 0 or self._fits(offsets, count):
            return max(0, count)
        low, high = (1 if not self._unfinished else 0), count
        while low + 1 < high:
            middle = (low + high) // 2
            if self._fits(offsets, middle):
                low = middle
            else:
                high = middle
        return low

    def _fits(self, offsets: Sequence[int], count: int) -> bool:
        """Would the metadata fit whatever finishes, after starting `count` of `offsets`?

        Between two finished runs there is an open offset, so n started offsets make at most n/2 runs, besides those of
        earlier owners. Later the committable offset only rises, which shortens everything: the bound holds until the
        next start.
        """
        base = self._started[0] if self._started else offsets[0]
        last = offsets[count - 1] + 1
        if self._done_ends:
            last = max(last, self._done_ends[-1])
        runs = (len(self._started) + count) // 2 + len(self._done_firsts)
        return payload_bound(last - base, runs) <= PAYLOAD_BYTES_STOP

    # ------------------------------------------------------------ progress

    def start(self, offset: int) -> None:
        """Take up one record; may_start(offset) must hold."""
        self.start_many((offset,))

    def start_many(self, offsets: Sequence[int]) -> None:
        """Take up records in rising order; startable(offsets) must be all of them."""
        if not offsets:
            return
        assert offsets[0] >= self.next_offset, (offsets[0], self.next_offset)
        assert all(map(lt, offsets, islice(offsets, 1, None))), "offsets must rise"
        assert self.startable(offsets) == len(offsets), "pause the partition before it overflows"
        if self._done_firsts:
            assert not any(map(self.is_done, offsets)), "skip what is done"
        self._started.extend(offsets)
        self._unfinished.update(offsets)
        self.next_offset = offsets[-1] + 1
        # With nothing open before, the committable offset has just moved over a gap, and so has the text's base.
        self._encoded = None
        if self._done_firsts:
            self._forget_done()

    def skip(self, offset: int) -> None:
        """Pass over a record that an earlier owner finished."""
        assert offset >= self.next_offset, (offset, self.next_offset)
        assert self.is_done(offset), offset
        self.next_offset = offset + 1
        self._encoded = None
        self._forget_done()

    def finish(self, offset: int) -> None:
        """The record's terminal outcome is ready to be committed. Raises KeyError when the offset is not open."""
        self._unfinished.remove(offset)
        self._advance()

    def finish_many(self, offsets: Sequence[int]) -> None:
        """As finish, for many, in any order. Raises KeyError, with nothing changed, unless all are open and differ."""
        unfinished = self._unfinished
        if len(set(offsets)) != len(offsets) or not unfinished.issuperset(offsets):
            raise KeyError(f"not open, or twice: {sorted(offsets)[:8]} ...")
        unfinished.difference_update(offsets)
        self._advance()

    def _advance(self) -> None:
        started = self._started
        unfinished = self._unfinished
        while started and started[0] not in unfinished:
            started.popleft()
        self._encoded = None
        if self._done_firsts:
            self._forget_done()

    def _forget_done(self) -> None:
        """Ranges of earlier owners that the committable offset has passed."""
        base = self.committable
        passed = bisect_right(self._done_ends, base)
        if passed:
            del self._done_firsts[:passed]
            del self._done_ends[:passed]
        if self._done_firsts and self._done_firsts[0] < base:
            self._done_firsts[0] = base

    # ------------------------------------------------------------ what to commit

    def encode_metadata(self) -> str:
        """Finished offsets above `committable`; at most METADATA_CHARS_MAX characters, by construction."""
        if self._encoded is None:
            self._encoded = encode(self.committable, self._finished())
            assert len(self._encoded) <= METADATA_CHARS_MAX, (len(self._encoded), self.committable)
        return self._encoded

    def committed(self) -> CommittedOffset:
        """What to send with the next transaction."""
        return CommittedOffset(self.committable, self.encode_metadata())

    def _finished(self) -> list[Range]:
        """Finished ranges above the committable offset, rising. Neighbours in reading order join over gaps: no reader
        will ever see what lies between them."""
        ranges: list[Range] = []
        if len(self._started) > len(self._unfinished):
            first = last = -1
            for offset in self._started:
                if offset not in self._unfinished:
                    first = offset if first < 0 else first
                    last = offset
                elif first >= 0:
                    ranges.append((first, last + 1))
                    first = -1
            if first >= 0:
                ranges.append((first, last + 1))
        if not self._done_firsts:
            return ranges
        return _union(ranges + list(zip(self._done_firsts, self._done_ends, strict=True)))


def _union(ranges: list[Range]) -> list[Range]:
    """Sorted ranges without overlaps or neighbours that touch."""
    joined: list[Range] = []
    for first, end in sorted(ranges):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((first, end))
    return joined

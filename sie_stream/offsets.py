"""The ledger: what may be committed of one partition during one assignment.

Batches finish out of order. Committable is the lowest unfinished offset; finished offsets above it travel in the
commit's metadata, so the next owner skips them. Losing one of those would mean processing it twice, so the metadata
must always fit, and the ledger refuses to start what could make it overflow.

Why it always fits. Whatever finishes, the run lengths lie between points out of the started offsets, and a varint of a
sum is no longer than the varints of its parts; so the runs never take more than one varint for each step from one
started offset to the next (plus those of earlier owners), and the bitset never more than a bit for each offset. Both
bounds only fall while nothing is started. A start that would lift both above what fits is refused, unless nothing is
open: then finishing that offset can only shorten the text.

Offsets that no reader ever sees (transaction markers, aborted records, compaction) are never started and never block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

from sie_stream.offset_metadata import METADATA_CHARS_MAX, PAYLOAD_BYTES_MAX, Range, decode, encode, varint_bytes
from sie_stream.records import CommittedOffset

OPEN_MAX = 2_048
PAYLOAD_BYTES_STOP = PAYLOAD_BYTES_MAX * 3 // 4
"""may_start turns False here, so that records already fetched still find room."""


class OffsetLedger:
    """Progress through one partition during one assignment. Constant work per record.

    Offsets are started in rising order and finished in any order. `assignment_epoch` lets the owner tell completions
    of an earlier assignment from its own.
    """

    __slots__ = (
        "_done_bytes",
        "_done_ends",
        "_done_firsts",
        "_done_from",
        "_encoded",
        "_run_bytes",
        "_started",
        "_unfinished",
        "assignment_epoch",
        "metadata_understood",
        "next_offset",
        "open_max",
        "refused",
    )

    def __init__(self, next_offset: int, open_max: int = OPEN_MAX, assignment_epoch: int = 0) -> None:
        assert next_offset >= 0, next_offset
        assert open_max >= 1, open_max
        self.assignment_epoch = assignment_epoch
        self.next_offset = next_offset
        """Lowest offset not yet started or skipped."""
        self.open_max = open_max
        self.metadata_understood = True
        self.refused = False
        """start() refused an offset, and refuses all until reread(): the owner must read again from next_offset."""
        self._started: deque[int] = deque()
        """Started offsets from the lowest unfinished one on; the first is always unfinished."""
        self._unfinished: set[int] = set()
        self._run_bytes = 0
        """Varint bytes of the steps between started offsets, and of the one behind the last."""
        self._done_firsts: list[int] = []
        self._done_ends: list[int] = []
        """Ranges finished by earlier owners, above the committable offset."""
        self._done_bytes = 0
        self._done_from = next_offset
        """Varint bytes of those ranges, the first gap counted from `_done_from`."""
        self._encoded: str | None = None

    @classmethod
    def resume(cls, committed: CommittedOffset, open_max: int = OPEN_MAX, assignment_epoch: int = 0) -> OffsetLedger:
        """Continue where the last owner committed. Metadata that cannot be trusted: redo from there, skip nothing.

        `metadata_understood` is False then, so that the owner can say so.
        """
        ledger = cls(committed.offset, open_max, assignment_epoch)
        ranges = decode(committed.offset, committed.metadata)
        ledger.metadata_understood = ranges is not None
        at = committed.offset
        for first, end in ranges or ():
            ledger._done_firsts.append(first)
            ledger._done_ends.append(end)
            ledger._done_bytes += varint_bytes(first - at) + varint_bytes(end - first)
            at = end
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

    @property
    def may_start(self) -> bool:
        """False: pause the partition until something finishes. Always True when nothing is open.

        After a refusal the owner may reread() once this is True again.
        """
        if not self._unfinished:
            return True
        if len(self._unfinished) >= self.open_max:
            return False
        return self._payload_bound(self.next_offset) <= PAYLOAD_BYTES_STOP

    def is_done(self, offset: int) -> bool:
        """An earlier owner finished this offset and committed its result."""
        if not self._done_firsts:
            return False
        at = bisect_right(self._done_firsts, offset) - 1
        return at >= 0 and offset < self._done_ends[at]

    def _payload_bound(self, offset: int) -> int:
        """Most payload bytes that any outcome can need once `offset` is started too."""
        last = self._started[-1]
        run_bytes = self._run_bytes + varint_bytes(offset - last) + self._done_bytes
        end = max(offset + 1, self._done_ends[-1]) if self._done_ends else offset + 1
        return min(run_bytes, (end - self._started[0] + 7) // 8)

    # ------------------------------------------------------------ progress

    def start(self, offset: int) -> bool:
        """Take up one record. False: do not process it, for an earlier owner has, or because it was refused.

        After a refusal (see `refused`) the ledger is still right: committable does not pass what was refused.
        """
        if offset < self.next_offset:
            raise ValueError(f"offset {offset} was started or skipped already; next is {self.next_offset}")
        if self.refused:
            return False
        if self._done_firsts and self.is_done(offset):
            self._move_to(offset + 1)
            return False
        started = self._started
        if started:
            step = offset - started[-1]
            self._run_bytes += 1 if step < 128 else varint_bytes(step)
            if self._run_bytes + self._done_bytes > PAYLOAD_BYTES_MAX and self._overflows(offset):
                self._run_bytes -= varint_bytes(step)
                self.refused = True
                return False
        else:
            # The committable offset moves over the gap before this record.
            self._run_bytes = 1
            self._encoded = None
        started.append(offset)
        self._unfinished.add(offset)
        self.next_offset = offset + 1
        if self._done_firsts:
            self._forget_done()
        return True

    def start_many(self, offsets: Sequence[int]) -> list[int]:
        """As start, for many in rising order; returns those to be processed."""
        start = self.start
        return [offset for offset in offsets if start(offset)]

    def _overflows(self, offset: int) -> bool:
        """The runs may not fit any more: would the bitset?"""
        end = max(offset + 1, self._done_ends[-1]) if self._done_ends else offset + 1
        return (end - self._started[0] + 7) // 8 > PAYLOAD_BYTES_MAX

    def reread(self) -> int:
        """The owner reads again from the returned offset, after a refusal and once may_start allows."""
        self.refused = False
        return self.next_offset

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
        self._encoded = None
        if not started or started[0] in unfinished:
            return
        while started:
            first = started[0]
            if first in unfinished:
                break
            started.popleft()
            if started:
                step = started[0] - first
                self._run_bytes -= 1 if step < 128 else varint_bytes(step)
            else:
                self._run_bytes = 0
        if self._done_firsts:
            self._forget_done()

    def _move_to(self, offset: int) -> None:
        self.next_offset = offset
        self._encoded = None
        self._forget_done()

    def _forget_done(self) -> None:
        """Ranges of earlier owners that the committable offset has passed."""
        base = self.committable
        firsts, ends = self._done_firsts, self._done_ends
        passed = bisect_right(ends, base)
        if not passed:
            return
        for index in range(passed):
            self._done_bytes -= varint_bytes(firsts[index] - self._done_from)
            self._done_bytes -= varint_bytes(ends[index] - firsts[index])
            self._done_from = ends[index]
        del firsts[:passed], ends[:passed]

    # ------------------------------------------------------------ what to commit

    def encode_metadata(self) -> str:
        """Finished offsets above `committable`; at most METADATA_CHARS_MAX characters, by construction."""
        if self._encoded is None:
            self._encoded = encode(self.committable, self._finished())
            assert len(self._encoded) <= METADATA_CHARS_MAX, (len(self._encoded), self.committable)
        return self._encoded

    def to_commit(self) -> CommittedOffset:
        """What to send with the next transaction."""
        return CommittedOffset(self.committable, self.encode_metadata())

    def _finished(self) -> list[Range]:
        """Finished ranges above the committable offset, rising.

        Each reaches up to the next unfinished offset: no reader will ever see what lies between.
        """
        ranges: list[Range] = []
        unfinished = self._unfinished
        if len(self._started) > len(unfinished):
            first = -1
            for offset in self._started:
                if offset not in unfinished:
                    if first < 0:
                        first = offset
                elif first >= 0:
                    ranges.append((first, offset))
                    first = -1
            if first >= 0:
                ranges.append((first, self._started[-1] + 1))
        if not self._done_firsts:
            return ranges
        base = self.committable
        earlier = [(max(base, first), end) for first, end in zip(self._done_firsts, self._done_ends, strict=True)]
        return _union(ranges + earlier)


def _union(ranges: list[Range]) -> list[Range]:
    """Sorted ranges without overlaps or neighbours that touch."""
    joined: list[Range] = []
    for first, end in sorted(ranges):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((first, end))
    return joined

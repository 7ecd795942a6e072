"""Which sequences run in the next step of a decoder, and how many tokens of each. Pure: torch only executes the plan.

First come, first served within a priority. Sequences that decode go first, one token each; prompts share what is left
of the step's token budget, so a long prompt never holds up running answers (chunked prefill, arXiv:2308.16369). Prompts
with little left to compute, as after a hit, pass longer ones, which keep half of what prompts have of a step. When the
pool has no block left, the lowest in rank gives its blocks back. What they hold is copied to host memory, if that costs
less than computing it again later (swapping.py); what is still cached of it then is neither copied nor computed.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from collections.abc import Sequence as Run

from msgspec import Struct

from gpu_worker.decoding.blocks import BlockPool, chained_digests
from gpu_worker.decoding.sequence import Chunk, Fetch, Keep, Move, Restore, Sequence, no_blocks
from gpu_worker.decoding.swapping import NO_SWAP, SwapSpace

SHORT_PART = 4
"""What is left of a prompt is short if it is at most this part of a step's tokens."""
LOOKED_AT = 8
"""How many of those that wait are looked at for short ones in every step."""


class StepLimits(Struct, frozen=True):
    """sequences_max: how many run at once; step_tokens: budget of one step; both bound memory and delay."""

    sequences_max: int
    step_tokens: int


class StepScheduler:
    """Of one model. Several may share a BlockPool.

    salt: see chained_digests. block_tokens: tokens whose keys and values one block holds. swap: for those that are
    preempted.
    """

    def __init__(
        self, pool: BlockPool, block_tokens: int, salt: bytes, limits: StepLimits, swap: SwapSpace | None = None
    ) -> None:
        if limits.step_tokens < limits.sequences_max:
            raise ValueError(
                f"step_tokens ({limits.step_tokens}) must be at least sequences_max ({limits.sequences_max}): "
                "every running sequence needs a token in every step"
            )
        self._pool = pool
        self._block_tokens = block_tokens
        self._salt = salt
        self._limits = limits
        self.swap = swap or SwapSpace(NO_SWAP)
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        """Both in order of rank."""
        self._arrivals = 0
        self.preemptions = 0
        self.tier_run: Callable[[Run[bytes]], int] = no_blocks
        """(digests) -> how many of the first of these blocks a tier outside the engine can give now."""
        self.moves: list[Move] = []
        """To be done in this order between plan() and the step."""

    @property
    def running(self) -> Run[Sequence]:
        return self._running

    @property
    def waiting(self) -> Run[Sequence]:
        return self._waiting

    @property
    def blocks(self) -> tuple[int, int]:
        """(all of the pool, those that sequences of any model hold)"""
        return self._pool.count, self._pool.count - self._pool.free

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def fits(self, tokens: int) -> bool:
        """Whether a sequence may get that long, alone in the pool."""
        return self.blocks_for(tokens) <= self._pool.count

    def add(self, sequence: Sequence) -> None:
        sequence.order = self._arrivals
        self._arrivals += 1
        insort(self._waiting, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """It is finished, cancelled or late; its blocks are free."""
        held = self._running if sequence in self._running else self._waiting
        held.remove(sequence)
        self._give_back(sequence)
        self.forget_kept(sequence)

    def expired(self, now_ms: int) -> list[Sequence]:
        """Those whose deadline has passed, in order of rank; they stay until removed."""
        return [
            one
            for one in (*self._running, *self._waiting)
            if one.deadline_at_ms is not None and now_ms >= one.deadline_at_ms
        ]

    def plan(self) -> list[Chunk]:
        """The next step. Every chunk's blocks are held when this returns. Empty: nothing can run now.

        `moves` are to be done first, also if nothing runs.
        """
        self.moves = []
        chunks: dict[int, Chunk] = {}
        """By order of arrival, so that a preempted sequence can be taken out again."""
        preempted = self.preemptions
        for sequence in [one for one in self._running if one.pending == 1]:
            self._run(sequence, 1, chunks)
        if self.preemptions == preempted:
            self._pass_longer(chunks)
        for sequence in [one for one in self._running if one.pending > 1 and one.order not in chunks]:
            self._run(sequence, self._budget(chunks), chunks)
        if self.preemptions == preempted:  # else who was just stopped would start again at once
            self._admit(chunks)
        return list(chunks.values())

    def ran(self, chunks: Run[Chunk]) -> None:
        """The step was executed: full blocks can be shared from now on."""
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.computed = chunk.end
            full = chunk.end // self._block_tokens
            if full > sequence.published:
                self._digest(sequence, full)
                for number in range(sequence.published, full):
                    self._pool.publish(sequence.blocks[number], sequence.digests[number])
                sequence.published = full

    # ------------------------------------------------------------ one step

    def _budget(self, chunks: dict[int, Chunk]) -> int:
        return self._limits.step_tokens - sum(chunk.count for chunk in chunks.values())

    def _run(self, sequence: Sequence, budget: int, chunks: dict[int, Chunk]) -> None:
        """A running sequence gets up to `budget` tokens, if need be at the cost of those lower in rank."""
        count = min(sequence.pending, budget)
        if count <= 0 or sequence not in self._running:
            return
        while not self._grow(sequence, count):
            victim = self._running[-1]
            self._preempt(victim, chunks)
            if victim is sequence:
                return
        chunks[sequence.order] = Chunk(sequence, sequence.computed, count)

    def _admit(self, chunks: dict[int, Chunk]) -> None:
        """Waiting sequences start in order of rank; the first that does not fit makes all others wait."""
        while self._waiting:
            sequence = self._waiting[0]
            full = len(self._running) >= self._limits.sequences_max
            if full and not self._preempt_for(sequence, chunks):
                return
            if self._budget(chunks) <= 0:
                return
            self._adopt_prefix(sequence)
            count = min(sequence.pending, self._budget(chunks))
            while not self._grow(sequence, count):
                if not self._preempt_for(sequence, chunks):
                    self._give_back(sequence)
                    return
            self._start(sequence, count, chunks)

    def _pass_longer(self, chunks: dict[int, Chunk]) -> None:
        """Waiting sequences with a short rest start before longer ones of their priority, within half of the budget.

        They never take the last place or the last blocks, so whom they pass needs at most twice as many steps.
        """
        left = self._budget(chunks) // 2
        passed = min((one.priority for one in self._running if one.pending > 1), default=None)
        for sequence in self._waiting[:LOOKED_AT]:
            if left <= 0 or len(self._running) + 1 >= self._limits.sequences_max:
                return
            if passed is not None and sequence.priority > passed:
                return
            if self._fits_beside(sequence, left):
                left -= sequence.pending
                self._start(sequence, sequence.pending, chunks)
            elif passed is None:
                passed = sequence.priority

    def _fits_beside(self, sequence: Sequence, left: int) -> bool:
        """Whether it is short enough; it holds its blocks then."""
        if sequence.kept or not self._may_be_short(sequence):
            return False
        self._adopt_prefix(sequence)
        missing = self.blocks_for(len(sequence.ids)) - len(sequence.blocks)
        # Room for whatever else this step may need, so that nobody is stopped for it.
        spare = self.blocks_for(self._limits.step_tokens) + len(self._running)
        if sequence.pending <= min(left, self._short) and missing + spare <= self._pool.free:
            return self._grow(sequence, sequence.pending)
        self._give_back(sequence)
        return False

    @property
    def _short(self) -> int:
        return self._limits.step_tokens // SHORT_PART

    def _may_be_short(self, sequence: Sequence) -> bool:
        """By the block up to which it would have to be found: one look, however long the prompt is."""
        wanted = self.blocks_for(max(0, len(sequence.ids) - self._short))
        if not wanted:
            return True
        if sequence.reusable is no_blocks or wanted * self._block_tokens >= len(sequence.ids):
            return False
        self._digest(sequence, wanted)
        return self._pool.has(sequence.digests[wanted - 1])

    def _start(self, sequence: Sequence, count: int, chunks: dict[int, Chunk]) -> None:
        """It holds its blocks. One that was preempted for it waits behind it: its rank is lower."""
        self._waiting.remove(sequence)
        insort(self._running, sequence, key=_rank)
        if sequence.kept:
            self._restore(sequence)
        else:
            self._fetch(sequence)
            sequence.reused = max(sequence.reused, min(sequence.computed, sequence.prompt_tokens))
        chunks[sequence.order] = Chunk(sequence, sequence.computed, count)

    def _adopt_prefix(self, sequence: Sequence) -> None:
        """Hold what the pool has of its tokens. The last one is always computed: its logits choose the next."""
        if sequence.kept:
            full = sequence.kept // self._block_tokens
            self._digest(sequence, full)
            sequence.blocks = self._pool.match(sequence.digests[:full])
            sequence.published = len(sequence.blocks)
            sequence.computed = sequence.kept
            return
        if sequence.reusable is no_blocks:
            return
        full = (len(sequence.ids) - 1) // self._block_tokens
        self._digest(sequence, full)
        found = self._pool.match(sequence.digests[:full])
        more = self.tier_run(sequence.digests[len(found) : full])
        count = sequence.reusable(sequence.digests[: len(found) + more])
        self._pool.release(found[count:])
        sequence.blocks = found[:count]
        sequence.published = len(sequence.blocks)
        sequence.fetched = count - len(sequence.blocks)
        sequence.computed = count * self._block_tokens

    def _fetch(self, sequence: Sequence) -> None:
        first, end = sequence.published, sequence.published + sequence.fetched
        if sequence.fetched:
            self.moves.append(Fetch(sequence, tuple(sequence.blocks[first:end]), tuple(sequence.digests[first:end])))
            sequence.fetched = 0

    def _restore(self, sequence: Sequence) -> None:
        """Its blocks are held: those that the pool did not have get what was kept."""
        first = sequence.published
        self.moves.append(Restore(sequence, first, tuple(sequence.blocks[first : self.blocks_for(sequence.kept)])))
        self.forget_kept(sequence)

    def forget_kept(self, sequence: Sequence) -> None:
        """What was to be kept of it is not: it is computed again."""
        self.swap.give_back(sequence.swapped)
        sequence.kept = sequence.swapped = 0

    def _digest(self, sequence: Sequence, blocks: int) -> None:
        if len(sequence.digests) < blocks:
            tokens = sequence.ids[: blocks * self._block_tokens]
            sequence.digests = chained_digests(
                self._salt, tokens, self._block_tokens, sequence.digests, sequence.activation
            )

    def _grow(self, sequence: Sequence, count: int) -> bool:
        """Hold blocks for `count` more tokens. False when the pool has none left; nothing is taken then."""
        missing = self.blocks_for(sequence.computed + count) - len(sequence.blocks)
        if missing <= 0:
            return True
        taken = self._pool.take(missing)
        if taken is None:
            return False
        sequence.blocks.extend(taken)
        return True

    def _preempt_for(self, sequence: Sequence, chunks: dict[int, Chunk]) -> bool:
        """Stop the lowest in rank if `sequence` is of a higher priority (not merely earlier)."""
        if not self._running or self._running[-1].priority <= sequence.priority:
            return False
        self._preempt(self._running[-1], chunks)
        return True

    def _preempt(self, victim: Sequence, chunks: dict[int, Chunk]) -> None:
        self.preemptions += 1
        chunks.pop(victim.order, None)
        self._running.remove(victim)
        blocks = self.blocks_for(victim.computed)
        if self.swap.take(victim.computed, blocks):
            victim.kept, victim.swapped = victim.computed, blocks
            self.moves.append(Keep(victim, tuple(victim.blocks[:blocks])))
        self._give_back(victim)
        insort(self._waiting, victim, key=_rank)

    def _give_back(self, sequence: Sequence) -> None:
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = sequence.published = sequence.fetched = 0


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank

"""A loaded decoder: requests come and go while others run. Implements ContinuousModel."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from threading import RLock

import torch
from torch import Tensor

from gpu_worker.backends.base import EngineDelta, EngineInput, EngineOutput, failed, not_finite
from gpu_worker.backends.decoder.arena import HostCopies
from gpu_worker.backends.decoder.flight import Flight
from gpu_worker.backends.decoder.frozen import Intake, asked_as, frozen, thawed
from gpu_worker.backends.decoder.grammar import GrammarRefused, Grammars
from gpu_worker.backends.decoder.runner import Runner
from gpu_worker.backends.decoder.tier import TierOf
from gpu_worker.backends.slots.weights import Weight
from gpu_worker.decoding.image import ImageRefused, packed, packed_bytes, unpacked
from gpu_worker.decoding.kv_tier import KvTier
from gpu_worker.decoding.sequence import Chunk, Fetch, Keep, Move
from gpu_worker.decoding.step_scheduler import StepScheduler
from sie_stream.ports import Clock
from sie_stream.telemetry import SequenceCounts
from sie_stream.trunks import Trunk


class DecoderModel:
    """One step is one forward pass for some tokens of every running request.

    lock: held while the pool is touched; shared by all models of an arena, because a model is warmed up in another
    thread than the one that serves.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: StepScheduler,
        intake: Intake,
        pages: HostCopies,
        sequences_max: int,
        clock: Clock,
        lock: RLock,
        memory_bytes: int,
        parts: dict[str, int] | None = None,
        weights: Sequence[Weight] = (),
        pools: dict[str, int] | None = None,
        tier: KvTier | None = None,
        weights_digest: str = "",
    ) -> None:
        """parts, pools: see engine_messages.Loaded. weights: those that can be moved (see backends/slots). tier: keeps
        full blocks outside the process, for all models of it. weights_digest: of what was declared, where that is not
        all of the files: an adapter without its base.
        """
        self._runner = runner
        self._scheduler = scheduler
        self._intake = intake
        self._pages = pages
        self.parts = parts or {}
        self.pools = pools or {}
        self._weights = weights
        self._tier = None if tier is None else TierOf(tier, intake.origin, pages)
        self._clock = clock
        self._lock = lock
        self._flights: dict[int, Flight] = {}
        """By ticket, in order of arrival."""
        self._followed: dict[int, Flight] = {}
        """Those of them that stream."""
        self._last_deltas: list[tuple[int, EngineDelta]] = []
        """Of answers that ended in the newest step."""
        self.sequences_max = sequences_max
        self.memory_bytes = memory_bytes
        self.weights_digest = weights_digest or intake.origin.weights
        self.prompt_tokens = 0
        self.reused_tokens = 0
        """Of the prompts that were admitted: all their tokens, and those found in the pool."""

    def weights(self) -> Sequence[Weight]:
        return self._weights

    @property
    def trunk(self) -> Trunk | None:
        return self._intake.origin.trunk

    @property
    def grammars(self) -> Grammars | None:
        return self._intake.grammars

    @property
    def busy(self) -> bool:
        return bool(self._flights)

    @property
    def preemptions(self) -> int:
        return self._scheduler.preemptions

    def counts(self) -> SequenceCounts:
        with self._lock:
            scheduler = self._scheduler
            running, waiting = len(scheduler.running), len(scheduler.waiting)
            return SequenceCounts(running, waiting, *scheduler.blocks, self.prompt_tokens, self.reused_tokens)

    def submit(self, ticket: int, item: EngineInput) -> EngineOutput | None:
        if self._tier is not None:
            # Not for what `run` is asked before the model serves: a warm-up and golden requests must be computed.
            self._scheduler.tier_run = self._tier.run_of
        return self._submit(ticket, item)

    def _submit(self, ticket: int, item: EngineInput) -> EngineOutput | None:
        now_ms = self._clock.monotonic_ms()
        flight: Flight | EngineOutput | None = None
        if item.resume and self._tier is not None:
            flight = self._tier.resumed(ticket, item, self._intake, now_ms)
        if flight is None:
            flight = self._intake.begin(ticket, item, now_ms)
        if isinstance(flight, EngineOutput):
            return flight
        with self._lock:
            problem = self._too_long(flight)
            if problem:
                return failed(item, "context_length_exceeded", problem)
            self._take(flight)
        return None

    def _too_long(self, flight: Flight) -> str:
        longest = flight.tokens.prompt_tokens + flight.tokens.tokens_max
        if self._scheduler.fits(longest):
            return ""
        return f"prompt and answer may have {longest} tokens, more than the KV pool holds (kv_mb)."

    def _take(self, flight: Flight) -> None:
        self._flights[flight.tokens.ticket] = flight
        if flight.item.stream:
            self._followed[flight.tokens.ticket] = flight
        self._scheduler.add(flight.tokens)

    def release(self, ticket: int) -> bytes | None:
        with self._lock:
            flight = self._flights.get(ticket)
            if flight is None:
                return None
            tokens = flight.tokens
            computed = tokens.kept or tokens.computed
            pages = flight.kept
            if computed and pages is None:
                pages = self._pages.read(tokens.blocks[: self._scheduler.blocks_for(computed)], computed)
            state = frozen(flight, self._intake.origin, computed, self._clock.monotonic_ms())
            self._leave(flight)
        if pages is None:
            return packed(state, 0, b"")
        return packed(state, self._pages.used_bytes, pages.numpy().data.cast("B"))

    def image_bytes(self, ticket: int) -> int:
        with self._lock:
            flight = self._flights.get(ticket)
            if flight is None:
                return 0
            computed = flight.tokens.kept or flight.tokens.computed
            state = frozen(flight, self._intake.origin, computed, self._clock.monotonic_ms())
            return packed_bytes(len(state), self._pages.used_bytes, self._scheduler.blocks_for(computed))

    def tokens_of(self, ticket: int) -> int:
        flight = self._flights.get(ticket)
        return 0 if flight is None else len(flight.tokens.ids)

    def adopt(self, ticket: int, image: bytes, item: EngineInput | None = None) -> None:
        read = unpacked(image)
        flight, computed = thawed(read.state, self._intake, ticket, self._clock.monotonic_ms())
        if item is not None:
            asked_as(flight, item)
        wanted = (self._scheduler.blocks_for(computed), self._pages.used_bytes if computed else 0)
        if (read.count, read.page_bytes) != wanted:
            message = f"the image has {read.count} pages of {read.page_bytes} bytes; {computed} tokens need {wanted}."
            raise ImageRefused("image_damaged", message)
        if computed:
            flight.kept = torch.frombuffer(bytearray(read.pages), dtype=torch.uint8).view(wanted)
        flight.tokens.kept = computed
        with self._lock:
            problem = self._too_long(flight)
            if problem:
                raise ImageRefused("image_unfit", problem)
            self._take(flight)

    def _leave(self, flight: Flight) -> None:
        """It holds nothing here from now on."""
        ticket = flight.tokens.ticket
        self._scheduler.remove(flight.tokens)
        del self._flights[ticket]
        self._followed.pop(ticket, None)

    @torch.inference_mode()
    def step(self) -> list[tuple[int, EngineOutput]]:
        with self._lock:
            ended = self._drop_late()
            chunks = self._scheduler.plan()
            for move in self._scheduler.moves:
                self._do(move)
            if chunks:
                flights = [self._flights[chunk.sequence.ticket] for chunk in chunks]
                started_ms = self._clock.monotonic_ms()
                logits = self._runner.run(chunks, [flight.reads_all_rows for flight in flights])
                self._scheduler.ran(chunks)
                self._scheduler.swap.stepped(chunks, self._clock.monotonic_ms() - started_ms)
                stored = [] if self._tier is None else self._tier.store(chunks, flights)
                ended += self._advance(chunks, flights, logits)
                for flight in stored:
                    if flight.tokens.ticket in self._flights and self._tier is not None:
                        self._tier.note(flight, self._clock.monotonic_ms())
            return ended

    def _do(self, move: Move) -> None:
        """Copy pages out of the pool or into it."""
        flight = self._flights[move.sequence.ticket]
        if isinstance(move, Fetch):
            assert self._tier is not None, "planned by what it has"
            self._tier.fetch(move)
            return
        started_ms = self._clock.monotonic_ms()
        if isinstance(move, Keep):
            try:
                flight.kept = self._pages.read(move.blocks, move.sequence.kept)
            except (MemoryError, RuntimeError) as error:  # no memory for the copy: computing again needs none
                sys.stderr.write(f"engine: a request that gave way is not kept in host memory: {error}\n")
                self._scheduler.forget_kept(move.sequence)
                return
        else:
            assert flight.kept is not None, "kept when it gave its blocks back"
            self._pages.write(move.blocks, flight.kept[move.first :])
            flight.kept = None
        size = len(move.blocks) * self._pages.used_bytes
        self._scheduler.swap.copied(size, self._clock.monotonic_ms() - started_ms)

    def deltas(self) -> list[tuple[int, EngineDelta]]:
        if not self._followed and not self._last_deltas:
            return []
        told, self._last_deltas = self._last_deltas, []
        now_ms = self._clock.monotonic_ms()
        for ticket, flight in self._followed.items():
            delta = flight.grown(now_ms)
            if delta is not None:
                told.append((ticket, delta))
        return told

    def cancel(self, ticket: int) -> EngineOutput | None:
        with self._lock:
            flight = self._flights.get(ticket)
            if flight is None:
                return None
            self._leave(flight)
        return failed(flight.item, "cancelled", f"cancelled after {len(flight.tokens.answer)} tokens.")

    def reset(self) -> list[int]:
        with self._lock:
            for flight in self._flights.values():
                self._scheduler.remove(flight.tokens)
            tickets = list(self._flights)
            self._flights.clear()
            self._followed.clear()
            self._last_deltas.clear()
            return tickets

    def run(self, batch: Sequence[EngineInput]) -> list[EngineOutput]:
        """All of a batch, continuously: for warm-up and for callers that know nothing of steps."""
        answers: dict[int, EngineOutput] = {}
        tickets = range(-1, -1 - len(batch), -1)
        for ticket, item in zip(tickets, batch, strict=True):
            refused = self._submit(ticket, item)
            if refused is not None:
                answers[ticket] = refused
        while len(answers) < len(batch):
            answers.update(self.step())
        return [answers[ticket] for ticket in tickets]

    # ------------------------------------------------------------ one step

    def _drop_late(self) -> list[tuple[int, EngineOutput]]:
        if not any(flight.item.deadline_at_ms is not None for flight in self._flights.values()):
            return []
        late: list[tuple[int, EngineOutput]] = []
        for sequence in self._scheduler.expired(self._clock.now_ms()):
            flight = self._flights[sequence.ticket]
            self._leave(flight)
            message = f"the deadline passed after {len(sequence.answer)} of at most {sequence.tokens_max} tokens."
            late.append((sequence.ticket, failed(flight.item, "deadline_exceeded", message)))
        return late

    def _advance(
        self, chunks: Sequence[Chunk], flights: Sequence[Flight], logits: Sequence[Tensor]
    ) -> list[tuple[int, EngineOutput]]:
        """A token for every chunk that reached the end of its sequence."""
        choosing = [place for place, chunk in enumerate(chunks) if chunk.chooses and flights[place].reader is None]
        likeliest: list[int] = []
        largest: list[float] = []
        if choosing:
            last = torch.stack([logits[place][-1] for place in choosing])
            best = last.argmax(dim=-1, keepdim=True)  # a NaN, where there is one
            likeliest, largest = best[:, 0].tolist(), last.gather(1, best)[:, 0].tolist()
        now_ms = self._clock.monotonic_ms()
        ended: list[tuple[int, EngineOutput]] = []
        for place, token, logit in zip(choosing, likeliest, largest, strict=True):
            flight = flights[place]
            self._time_first(flight, now_ms)
            if not math.isfinite(logit):
                ended.append(self._end(flight, not_finite(flight.item, "its logits")))
                continue
            try:
                reason = flight.choose(logits[place][-1], token)
            except GrammarRefused as refusal:
                ended.append(self._end(flight, failed(flight.item, refusal.code, refusal.message)))
                continue
            if reason is not None:
                self._tell_last(flight, now_ms)
                ended.append(self._end(flight, flight.ended(reason)))
        for chunk, flight, rows in zip(chunks, flights, logits, strict=True):
            if flight.reader is not None:
                flight.reader.read(chunk, rows)
                if chunk.chooses:
                    self._time_first(flight, now_ms)
                    ended.append(self._end(flight, flight.reader.answer(flight.item, flight.first_token_ms)))
        return ended

    def _tell_last(self, flight: Flight, now_ms: float) -> None:
        if flight.item.stream:
            delta = flight.last_grown(now_ms)
            if delta is not None:
                self._last_deltas.append((flight.tokens.ticket, delta))

    def _time_first(self, flight: Flight, now_ms: float) -> None:
        if flight.first_token_ms is None:
            flight.first_token_ms = now_ms - flight.started_ms
            self.prompt_tokens += flight.tokens.prompt_tokens
            self.reused_tokens += flight.tokens.reused

    def _end(self, flight: Flight, output: EngineOutput) -> tuple[int, EngineOutput]:
        self._leave(flight)
        return flight.tokens.ticket, output

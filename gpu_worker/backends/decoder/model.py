"""A loaded decoder: requests come and go while others run. Implements ContinuousModel."""

from __future__ import annotations

from collections.abc import Sequence
from threading import RLock

import torch
from torch import Tensor

from gpu_worker.backends.base import EngineDelta, EngineInput, EngineOutput, failed
from gpu_worker.backends.decoder.flight import DecoderLimits, Flight, admitted, admitted_to
from gpu_worker.backends.decoder.grammar import GrammarRefused, Grammars
from gpu_worker.backends.decoder.readers import Embedder
from gpu_worker.backends.decoder.runner import Runner
from gpu_worker.backends.slots.weights import Weight
from gpu_worker.decoding.sequence import Chunk
from gpu_worker.decoding.step_scheduler import StepScheduler
from gpu_worker.decoding.transcript import Detokenise
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
        limits: DecoderLimits,
        sequences_max: int,
        detokenise: Detokenise | None,
        grammars: Grammars | None,
        clock: Clock,
        lock: RLock,
        memory_bytes: int,
        weights_digest: str,
        embedder: Embedder | None = None,
        trunk: Trunk | None = None,
        parts: dict[str, int] | None = None,
        weights: Sequence[Weight] = (),
        pools: dict[str, int] | None = None,
    ) -> None:
        """embedder: of a model whose head is `embedding`. parts, pools: see engine_messages.Loaded. weights: those that
        can be moved (see backends/slots).
        """
        self._runner = runner
        self._scheduler = scheduler
        self._limits = limits
        self._detokenise = detokenise
        self.grammars = grammars
        self._embedder = embedder
        self.trunk = trunk
        self.parts = parts or {}
        self.pools = pools or {}
        self._weights = weights
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
        self.weights_digest = weights_digest
        self.prompt_tokens = 0
        self.reused_tokens = 0
        """Of the prompts that were admitted: all their tokens, and those found in the pool."""

    def weights(self) -> Sequence[Weight]:
        return self._weights

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
        now_ms = self._clock.monotonic_ms()
        if self._embedder is not None:
            flight = admitted_to(self._embedder, ticket, item, self._limits, now_ms)
        else:
            flight = admitted(ticket, item, self._limits, self._detokenise, self.grammars, now_ms)
        if isinstance(flight, EngineOutput):
            return flight
        longest = flight.tokens.prompt_tokens + flight.tokens.tokens_max
        with self._lock:
            if not self._scheduler.fits(longest):
                message = f"prompt and answer may have {longest} tokens, more than the KV pool holds (kv_mb)."
                return failed(item, "context_length_exceeded", message)
            self._flights[ticket] = flight
            if item.stream:
                self._followed[ticket] = flight
            self._scheduler.add(flight.tokens)
        return None

    @torch.inference_mode()
    def step(self) -> list[tuple[int, EngineOutput]]:
        with self._lock:
            ended = self._drop_late()
            chunks = self._scheduler.plan()
            if chunks:
                flights = [self._flights[chunk.sequence.ticket] for chunk in chunks]
                logits = self._runner.run(chunks, [flight.reads_all_rows for flight in flights])
                self._scheduler.ran(chunks)
                ended += self._advance(chunks, flights, logits)
            return ended

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
            flight = self._flights.pop(ticket, None)
            self._followed.pop(ticket, None)
            if flight is None:
                return None
            self._scheduler.remove(flight.tokens)
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
            refused = self.submit(ticket, item)
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
            self._scheduler.remove(sequence)
            flight = self._flights.pop(sequence.ticket)
            self._followed.pop(sequence.ticket, None)
            message = f"the deadline passed after {len(sequence.answer)} of at most {sequence.tokens_max} tokens."
            late.append((sequence.ticket, failed(flight.item, "deadline_exceeded", message)))
        return late

    def _advance(
        self, chunks: Sequence[Chunk], flights: Sequence[Flight], logits: Sequence[Tensor]
    ) -> list[tuple[int, EngineOutput]]:
        """A token for every chunk that reached the end of its sequence."""
        choosing = [place for place, chunk in enumerate(chunks) if chunk.chooses and flights[place].reader is None]
        likeliest: list[int] = []
        if choosing:
            likeliest = torch.stack([logits[place][-1] for place in choosing]).argmax(dim=-1).tolist()
        now_ms = self._clock.monotonic_ms()
        ended: list[tuple[int, EngineOutput]] = []
        for place, token in zip(choosing, likeliest, strict=True):
            flight = flights[place]
            self._time_first(flight, now_ms)
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
        ticket = flight.tokens.ticket
        self._scheduler.remove(flight.tokens)
        del self._flights[ticket]
        self._followed.pop(ticket, None)
        return ticket, output

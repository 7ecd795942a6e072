"""The requests of continuous models inside an engine process: admitted between steps, answered as they end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from gpu_worker.backends.base import ContinuousModel, Counted, EngineDelta, EngineInput, EngineOutput, MovableModel
from gpu_worker.decoding.image import ImageRefused
from gpu_worker.engine_messages import (
    Adopted,
    Answers,
    Delta,
    Deltas,
    Export,
    Exported,
    FromEngine,
    Raised,
    Run,
    Stepped,
)
from sie_stream.ports import Clock

STEPPED_EVERY_MS = 1_000.0
"""How often the host hears that steps are being made."""


@dataclass(slots=True, eq=False)
class _Open:
    """A batch that runs. The host sends batches of one; a longer one is answered when all of it has ended."""

    batch_id: int
    slot: int
    started_ms: float
    outputs: list[EngineOutput | None]
    tickets: dict[int, int]
    """Ticket -> place in outputs, of those that are not answered yet."""


class ContinuousRuns:
    """Used from the engine process's main thread. `say` sends a message to the host, `tell` is the Tell of a slot;
    `unload` ends a model that nothing runs in.
    """

    def __init__(
        self,
        unload: Callable[[int, ContinuousModel], None],
        say: Callable[[FromEngine], None],
        tell: Callable[[int, BaseException], str],
        clock: Clock,
    ) -> None:
        self._tell = tell
        self._unload = unload
        self._say = say
        self._clock = clock
        self._models: dict[int, ContinuousModel] = {}
        """By slot, those that may have work."""
        self._leaving: dict[int, None] = {}
        self._open: dict[int, _Open] = {}
        self._by_ticket: dict[int, _Open] = {}
        self._adopted: dict[int, int] = {}
        """By ticket, requests that go on from an image and have no new token yet: their tokens."""
        self._next_ticket = 0
        self._stepped_at = float("-inf")

    @property
    def busy(self) -> bool:
        return bool(self._open)

    def run(self, message: Run, model: ContinuousModel) -> None:
        """Admits all items of a batch; answers at once what cannot be served."""
        self._models[message.slot] = model
        count = len(message.items)
        tickets = range(self._next_ticket, self._next_ticket + count)
        self._next_ticket += count
        entry = _Open(
            message.batch_id,
            message.slot,
            self._clock.monotonic_ms(),
            [None] * count,
            {ticket: place for place, ticket in enumerate(tickets)},
        )
        self._open[message.batch_id] = entry
        if len(self._open) == 1:
            self._stepped_at = entry.started_ms
        for ticket in tickets:
            self._by_ticket[ticket] = entry

        def admit() -> list[tuple[int, EngineOutput]]:
            pairs = zip(tickets, message.items, strict=True)
            answers = [(ticket, self._begin(message, model, ticket, item)) for ticket, item in pairs]
            return [(ticket, refusal) for ticket, refusal in answers if refusal is not None]

        self._try(message.slot, model, admit)

    def _begin(self, message: Run, model: ContinuousModel, ticket: int, item: EngineInput) -> EngineOutput | None:
        """From its image if it has one; whatever is wrong with that, the request can be computed."""
        if message.image:
            refused = self._adopt(message.image, model, ticket, item)
            if not refused:
                return None
            self._say(Adopted(message.batch_id, refused))
        return model.submit(ticket, item)

    def _adopt(self, image: bytes, model: ContinuousModel, ticket: int, item: EngineInput) -> str:
        """Why not; empty: it goes on."""
        if not isinstance(model, MovableModel):
            return "requests of this model cannot go on from an image"
        try:
            model.adopt(ticket, image, item)
        except ImageRefused as refusal:
            return f"{refusal.code}: {refusal.message}"
        except (MemoryError, RuntimeError) as error:
            return f"no memory for the image: {error}"
        self._adopted[ticket] = model.tokens_of(ticket)
        return ""

    def export(self, message: Export) -> None:
        """Let go of the requests of these batches, in order, as long as their images fit."""
        left = message.bytes_max
        for batch_id in message.batch_ids:
            image = self._exported(batch_id, left)
            left -= len(image or b"")
            self._say(Exported(batch_id, image))
        self._let_go()

    def _exported(self, batch_id: int, bytes_max: int) -> bytes | None:
        entry = self._open.get(batch_id)
        model = None if entry is None else self._models[entry.slot]
        if entry is None or len(entry.outputs) != 1 or not isinstance(model, MovableModel):
            return None
        (ticket,) = entry.tickets
        if model.image_bytes(ticket) > bytes_max:
            return None
        try:
            image = model.release(ticket)
        except (MemoryError, RuntimeError) as error:  # no memory for the copy: it is still there, and runs on
            sys.stderr.write(f"engine: a request cannot be moved: {error}\n")
            return None
        del self._open[batch_id], self._by_ticket[ticket]
        self._adopted.pop(ticket, None)
        return image

    def step(self) -> None:
        """One step of every model that has work."""
        for slot, model in list(self._models.items()):
            if model.busy:
                self._try(slot, model, model.step)
        self._let_go()
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._stepped_at >= STEPPED_EVERY_MS or not self._open:
            self._stepped_at = now_ms
            counted = self._models.items()
            self._say(Stepped([(slot, model.counts()) for slot, model in counted if isinstance(model, Counted)]))

    def cancel(self, batch_id: int) -> None:
        """Nothing happens for a batch that has ended or is of another kind."""
        entry = self._open.get(batch_id)
        if entry is None:
            return
        for ticket in list(entry.tickets):
            output = self._models[entry.slot].cancel(ticket)
            if output is not None:
                self._ended(ticket, output)
        self._let_go()

    def unload(self, slot: int, model: ContinuousModel) -> None:
        """Now, or after the requests it was given before."""
        if model.busy:
            self._leaving[slot] = None
        else:
            self._models.pop(slot, None)
            self._unload(slot, model)

    def _let_go(self) -> None:
        """Unload models that are to go and have nothing left to do."""
        for slot in [slot for slot in self._leaving if not self._models[slot].busy]:
            del self._leaving[slot]
            self._unload(slot, self._models.pop(slot))

    def _try(self, slot: int, model: ContinuousModel, work: Callable[[], list[tuple[int, EngineOutput]]]) -> None:
        """Let the model work, and pass on how answers grew, and then what ended with it."""
        try:
            ended = work()
            grown = model.deltas()
        except Exception as error:  # noqa: BLE001  # whatever a backend raises is an answer to the host
            self._failed(slot, model, error)
            return
        if self._adopted:
            self._tell_adopted(slot, model, [ticket for ticket, _ in ended])
        if grown:
            self._say(Deltas([self._delta(ticket, delta) for ticket, delta in grown]))
        for ticket, output in ended:
            self._ended(ticket, output)

    def _tell_adopted(self, slot: int, model: ContinuousModel, ended: list[int]) -> None:
        for ticket, tokens in list(self._adopted.items()):
            entry = self._by_ticket[ticket]
            if entry.slot != slot or not isinstance(model, MovableModel):
                continue
            if ticket in ended or model.tokens_of(ticket) > tokens:
                del self._adopted[ticket]
                self._say(Adopted(entry.batch_id))

    def _delta(self, ticket: int, delta: EngineDelta) -> Delta:
        entry = self._by_ticket[ticket]
        return Delta(entry.batch_id, entry.tickets[ticket], delta.token_ids, delta.text)

    def _ended(self, ticket: int, output: EngineOutput) -> None:
        entry = self._by_ticket.pop(ticket)
        self._adopted.pop(ticket, None)
        entry.outputs[entry.tickets.pop(ticket)] = output
        if not entry.tickets:
            del self._open[entry.batch_id]
            outputs = [one for one in entry.outputs if one is not None]
            self._say(Answers(entry.batch_id, outputs, self._clock.monotonic_ms() - entry.started_ms))

    def _failed(self, slot: int, model: ContinuousModel, error: Exception) -> None:
        """All that ran in the model shared the failure: nothing of it is left, and the host is told of each batch."""
        said = self._tell(slot, error)
        model.reset()
        together = [entry for entry in self._open.values() if entry.slot == slot]
        for entry in together:
            del self._open[entry.batch_id]
            for ticket in entry.tickets:
                del self._by_ticket[ticket]
                self._adopted.pop(ticket, None)
        for entry in together:
            self._say(Raised(entry.batch_id, "engine_error", said, len(together)))

"""The models of an engine process by slot and, on a device with a budget, where their weights are.

Weights are moved in a thread of their own, one order after the other: what runs meanwhile goes on. Orders that requests
wait for pass images on their way to another tier.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from queue import PriorityQueue
from typing import NamedTuple

from msgspec import Struct

from gpu_worker.backends.base import Backend, LoadedModel
from gpu_worker.backends.slots.arena import Arena
from gpu_worker.backends.slots.slot import ModelSlot, SlotError
from gpu_worker.backends.slots.weights import Movable, Pooled, SharesWeights
from gpu_worker.edge.message_socket import PeerClosed
from gpu_worker.engine_messages import Activate, Deactivate, FromEngine, ImageMoved, MoveImage, NotSwitched, Switched
from sie_stream.ports import Clock

URGENT, LATER = 0, 1


class ArenaOption(Struct, frozen=True):
    """The arena of a device as the host names it to an engine process."""

    file: int
    page_bytes: int
    folder: str

    def arena(self) -> Arena:
        return Arena(self.file, self.page_bytes, Path(self.folder))


class Footprint(NamedTuple):
    """See engine_messages.Loaded."""

    image_bytes: int
    pools: dict[str, int]


class _Close(NamedTuple):
    """The model of this slot is gone."""

    closing: ModelSlot


Order = Activate | Deactivate | MoveImage | _Close


class EngineModels:
    """arena: None on a device without a budget: models are then where their backend put them."""

    def __init__(self, backend: Backend, arena: Arena | None, say: Callable[[FromEngine], None], clock: Clock) -> None:
        self._backend = backend
        self._arena = arena
        self._say = say
        self._clock = clock
        self._models: dict[int, LoadedModel] = {}
        self._slots: dict[int, ModelSlot] = {}
        self._orders: PriorityQueue[tuple[int, int, Order]] = PriorityQueue()
        self._numbers = count()
        if arena is not None:
            if isinstance(backend, SharesWeights):
                backend.keep_weights_apart()
            threading.Thread(target=self._move_for_ever, name="mover", daemon=True).start()

    def get(self, slot: int) -> LoadedModel | None:
        return self._models.get(slot)

    def away(self, slot: int) -> bool:
        """Whether its weights are not on the device: it must not be run."""
        moved = self._slots.get(slot)
        return moved is not None and not moved.active

    def add(self, slot: int, model: LoadedModel) -> Footprint:
        """The model can be run, once it is activated if it has an image. Raises OSError when that has no memory."""
        pools = model.pools if isinstance(model, Pooled) else {}
        weights = model.weights() if isinstance(model, Movable) and self._arena is not None else []
        size = 0
        if weights and self._arena is not None:
            made = self._slots[slot] = ModelSlot(weights, self._arena)
            size = made.size
        self._models[slot] = model
        return Footprint(size, pools)

    def pop(self, slot: int) -> LoadedModel | None:
        """It takes no more requests; `unload` it when the last one has ended."""
        return self._models.pop(slot, None)

    def unload(self, slot: int, model: LoadedModel) -> None:
        """Nothing of it runs any more: its image and its addresses can go."""
        self._backend.unload(model)
        closing = self._slots.pop(slot, None)
        if closing is not None:
            self._put(URGENT, _Close(closing))

    def obey(self, order: Activate | Deactivate | MoveImage) -> None:
        self._put(LATER if isinstance(order, MoveImage) else URGENT, order)

    def _put(self, rank: int, order: Order) -> None:
        self._orders.put((rank, next(self._numbers), order))

    # ------------------------------------------------------------ the mover's thread

    def _move_for_ever(self) -> None:
        while True:
            _, _, order = self._orders.get()
            try:
                answer = self._moved(order)
                if answer is not None:
                    self._say(answer)
            except PeerClosed:
                return
            except Exception:  # noqa: BLE001  # the host waits for an answer that will not come: end, and be started anew
                traceback.print_exc()
                os._exit(1)

    def _moved(self, order: Order) -> FromEngine | None:
        match order:
            case Activate():
                return self._activated(order.slot, order.pages)
            case Deactivate():
                if (moved := self._slots.get(order.slot)) is not None:
                    moved.deactivate()
            case MoveImage():
                return self._image_moved(order)
            case _Close():
                order.closing.close()
        return None

    def _activated(self, slot: int, pages: Sequence[int]) -> FromEngine:
        """Always answered: until then the host gives the pages to nobody else."""
        moved = self._slots.get(slot)
        if moved is None:
            return NotSwitched(slot, "the model was unloaded meanwhile")
        started_at = self._clock.monotonic_ms()
        try:
            switch_class = moved.activate(pages)
        except (SlotError, OSError) as error:
            return NotSwitched(slot, str(error))
        size = 0 if switch_class == "resident" else moved.size
        return Switched(slot, switch_class, size, self._clock.monotonic_ms() - started_at)

    def _image_moved(self, order: MoveImage) -> FromEngine | None:
        moved = self._slots.get(order.slot)
        if moved is None:
            return None
        try:
            moved.move_image(order.to)
        except OSError as error:
            return ImageMoved(order.slot, moved.tier, str(error))
        return ImageMoved(order.slot, moved.tier)

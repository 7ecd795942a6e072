"""A model in a slot: its image, the addresses its tensors have for good, and the pages that are mapped there now."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_worker.backends.slots.address_space import AddressRange
from gpu_worker.backends.slots.arena import Arena
from gpu_worker.backends.slots.image import Image, offsets_of
from gpu_worker.backends.slots.weights import Weight
from gpu_worker.memory.pages import pages_of
from gpu_worker.memory.slots import Below, SwitchClass


class SlotError(Exception):
    """The slot is not as the caller thinks."""


class ModelSlot:
    """Takes the weights over: they are copied to an image, and from then on the model can only run while it is active.

    Raises OSError when there is no memory for the image; the weights are then where they were.
    """

    def __init__(self, weights: Sequence[Weight], arena: Arena) -> None:
        self._arena = arena
        offsets, self.size = offsets_of(weights)
        self._pages: tuple[int, ...] = ()
        self._image = Image(self.size, arena.folder)
        self._range = AddressRange(pages_of(self.size, arena.page_bytes) * arena.page_bytes)
        for weight, offset in zip(weights, offsets, strict=True):
            self._image.take(weight, offset)
            weight.move_to(self._range.address + offset)

    @property
    def active(self) -> bool:
        return bool(self._pages)

    @property
    def tier(self) -> Below:
        """Of the image."""
        return self._image.tier

    def activate(self, pages: Sequence[int]) -> SwitchClass:
        """Map the pages and fill them; from where. Nothing is done for the pages that it has. Raises SlotError when it
        is active with others, or they are too few or not there; OSError when an image cannot be read, and then it is
        not active.
        """
        wanted = tuple(pages)
        if self._pages == wanted:
            return "resident"
        if self._pages:
            raise SlotError("the model is active already, with other pages")
        if len(wanted) != pages_of(self.size, self._arena.page_bytes):
            raise SlotError(f"{len(wanted)} pages of {self._arena.page_bytes} bytes do not hold {self.size} bytes")
        if min(wanted) < 0 or max(wanted) >= self._arena.pages:
            # Behind its end there is no memory: the first write would end the process.
            raise SlotError(f"the arena has pages 0 to {self._arena.pages - 1}")
        from_tier = self._image.tier
        try:
            self._fill(wanted)
        except OSError:
            self._range.unmap()
            raise
        self._pages = wanted
        return from_tier

    def _fill(self, pages: Sequence[int]) -> None:
        self._arena.lend(pages, self._range.address)
        try:
            self._image.write_to(self._range.address)
        except OSError:
            self._arena.take_back(pages, self._range.address)
            raise

    def deactivate(self) -> None:
        """The pages are the device's again. Weights do not change, so nothing is copied back."""
        pages, self._pages = self._pages, ()
        self._arena.take_back(pages, self._range.address)
        self._range.unmap()

    def move_image(self, to: Below) -> None:
        """Raises OSError; then it is where it was."""
        if to == "disk":
            self._image.to_disk()
        else:
            self._image.to_host()

    def close(self) -> None:
        """The model is gone, too: its tensors must not be used any more."""
        self.deactivate()
        self._range.release()
        self._image.close()

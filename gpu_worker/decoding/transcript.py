"""The text of a growing answer, put into words piece by piece: no broken character, nothing that may be a stop text.

Tokens do not map to characters one by one, so text is only ever cut out of the decoding of many tokens. To keep that
cheap, tokens far enough back are decoded for the last time where the tokenizer proves on these very tokens that it
makes no difference; where it does (it strips the first blank, say), the whole answer is decoded each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from gpu_worker.decoding.stops import look_for_stops

Detokenise = Callable[[Sequence[int]], str]

WINDOW = 64
"""Tokens decoded again with every look; twice as many before the older half is settled."""


class Place(Struct, frozen=True):
    """Where a transcript stands: enough to go on with it elsewhere."""

    settled: int
    before: int
    text: str
    stopped: bool


class Transcript:
    """Of one answer.

    text: everything that is final, whatever comes.
    stopped: a stop text was found; the answer is `text`, and later tokens are ignored.
    """

    def __init__(self, detokenise: Detokenise, stops: Sequence[str] = ()) -> None:
        self._detokenise = detokenise
        self._stops = stops
        self._settled = 0
        """Tokens that are not decoded any more."""
        self._before = 0
        """Characters of `text` that came from them."""
        self.text = ""
        self.stopped = False

    @property
    def place(self) -> Place:
        return Place(self._settled, self._before, self.text, self.stopped)

    def resume(self, place: Place) -> None:
        """Go on where another transcript of the same answer stood."""
        self._settled, self._before, self.text, self.stopped = msgspec.structs.astuple(place)

    def read(self, answer: Sequence[int]) -> str:
        """What has become final with the answer so far, which begins as it did at the last call."""
        if self.stopped:
            return ""
        window = self._detokenise(answer[self._settled :])
        shown = min(len(self.text) - self._before, len(window))
        look = look_for_stops(window, self._stops, shown)
        self.stopped = look.stopped
        return self._take(window, look.shown, answer)

    def finish(self, answer: Sequence[int]) -> str:
        """The rest of a text that ended, also what was held back."""
        if self.stopped:
            return ""
        window = self._detokenise(answer[self._settled :])
        return self._take(window, len(window), answer)

    def _take(self, window: str, shown: int, answer: Sequence[int]) -> str:
        fresh = window[len(self.text) - self._before : shown]
        self.text += fresh
        self._settle(window, answer)
        return fresh

    def _settle(self, window: str, answer: Sequence[int]) -> None:
        if self.stopped or len(answer) - self._settled < 2 * WINDOW:
            return
        cut = self._settled + WINDOW
        head = self._detokenise(answer[self._settled : cut])
        final = self._before + len(head) <= len(self.text)
        if final and head + self._detokenise(answer[cut:]) == window:
            self._settled = cut
            self._before += len(head)

"""Token deltas of a world: provisional, numbered, and always the beginning of the one right answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sie_stream.records import TokenDelta
from sie_stream.sim.traffic import right_answer
from sie_stream.sim.world import Violation


class StreamChecker:
    """Takes the deltas in the order of their partition.

    streaming: inputs of the requests that asked for deltas, by request id
    """

    def __init__(self, streaming: Mapping[str, bytes]) -> None:
        self._streaming = streaming
        self._runs: dict[tuple[str, str], tuple[int, int, str]] = {}
        """(request, incarnation) -> attempt, index of the last delta, text so far."""
        self.restarts = 0
        """Answers that were begun again."""
        self.gaps = 0
        """Deltas that were lost on their way."""

    def take(self, deltas: Iterable[TokenDelta]) -> None:
        """Raises Violation."""
        for delta in deltas:
            self._take(delta)

    def _take(self, delta: TokenDelta) -> None:
        request_id = delta.request_id
        inputs = self._streaming.get(request_id)
        if inputs is None:
            raise Violation(f"a delta of {request_id}, which did not ask for any")
        if not delta.provisional:
            raise Violation(f"delta {delta.index} of {request_id} says that it is final")
        run = (request_id, delta.incarnation)
        attempt, last, text = self._runs.get(run, (-1, -1, ""))
        if delta.index == 0:
            self.restarts += any(request == request_id for request, _ in self._runs)
            last, text = -1, ""
        elif (delta.attempt, delta.index) <= (attempt, last):
            raise Violation(f"delta {delta.attempt}/{delta.index} of {request_id} came after {attempt}/{last}")
        if delta.index != last + 1:
            self.gaps += 1
            self._runs[run] = (delta.attempt, delta.index, text)
            return
        text += delta.text
        if not right_answer(request_id, inputs).startswith(text.encode()):
            raise Violation(f"the deltas of {request_id} say {text!r}, which does not begin its answer")
        self._runs[run] = (delta.attempt, delta.index, text)

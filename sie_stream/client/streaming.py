"""Answers as they grow: from the provisional deltas of sie.tokens, and the result that alone counts, to one stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from queue import Empty, SimpleQueue

from msgspec import Struct

from schemas.codec import CodecError, decode_token_delta
from sie_stream.client.requests import InferenceResult, RequestFailed, ResultTimeout
from sie_stream.errors import Retriable, SieError
from sie_stream.ids import TopicPartition
from sie_stream.ports import LogReader
from sie_stream.records import TokenDelta

POLL_MS = 100
BATCH = 2_000


class TextDelta(Struct, frozen=True):
    """What was added to an answer."""

    request_id: str
    text: str
    token_ids: tuple[int, ...] = ()
    """Empty where the text came with the result."""
    restarted: bool = False
    """The answer was begun again (its engine died, say): what came before does not count any more."""


Inbox = SimpleQueue[TokenDelta | Future[InferenceResult] | SieError]


class AnswerSoFar:
    """Puts deltas together. The texts since the last restart, with that of `finish`, are the text of the result."""

    def __init__(self) -> None:
        self._run: tuple[str, int] | None = None
        """Incarnation and attempt that are followed: the ones that began last."""
        self._next = 0
        self._text = ""
        self._broken = False
        """A delta was lost: only the result can tell how it goes on."""

    def take(self, delta: TokenDelta) -> TextDelta | None:
        """None for what does not count: of an attempt that is superseded, or after a gap."""
        run = (delta.incarnation, delta.attempt)
        restarted = False
        if delta.index == 0:
            restarted = bool(self._text)
            self._run, self._next, self._text, self._broken = run, 0, "", False
        elif run != self._run:
            return None
        self._broken = self._broken or delta.index != self._next
        self._next = delta.index + 1
        if self._broken:
            return None
        self._text += delta.text
        return TextDelta(delta.request_id, delta.text, delta.token_ids, restarted)

    def finish(self, result: InferenceResult) -> TextDelta | None:
        """What the deltas did not say of the result's text; all of it, if they said something else."""
        text = (result.outputs or {}).get("text")
        if not isinstance(text, str) or text == self._text:
            return None
        if text.startswith(self._text):
            return TextDelta(result.request_id, text[len(self._text) :])
        return TextDelta(result.request_id, text, restarted=True)


def unroll(request_id: str, inbox: Inbox, timeout_s: float) -> Iterator[TextDelta | InferenceResult]:
    """Deltas, then the result. Raises RequestFailed, ResultTimeout, and what the log's readers raise."""
    answer = AnswerSoFar()
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            found = inbox.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            raise ResultTimeout(f"no result for request {request_id} within {timeout_s} s") from None
        if isinstance(found, SieError):
            raise found
        if isinstance(found, TokenDelta):
            delta = answer.take(found)
            if delta is not None:
                yield delta
            continue
        result = found.result()
        if not result.ok:
            raise RequestFailed(result)
        rest = answer.finish(result)
        if rest is not None:
            yield rest
        yield result
        return


class TokenWatcher:
    """Reads sie.tokens from its end at construction, on a thread of its own; deltas nobody follows are skipped."""

    def __init__(self, reader: LogReader, topic: str) -> None:
        self._reader = reader
        self._inboxes: dict[str, Inbox] = {}
        self._lock = threading.Lock()
        self._failed: SieError | None = None
        self._stopping = threading.Event()
        partitions = [TopicPartition(topic, number) for number in range(reader.partitions_of(topic))]
        reader.assign(reader.end_offsets(partitions))
        self._thread = threading.Thread(target=self._run, name="sie-tokens", daemon=True)
        self._thread.start()

    def follow(self, request_id: str) -> Inbox:
        """Where the deltas of a request will arrive; call it before the request is sent."""
        inbox: Inbox = SimpleQueue()
        with self._lock:
            if self._failed is not None:
                raise self._failed
            self._inboxes[request_id] = inbox
        return inbox

    def forget(self, request_id: str) -> None:
        with self._lock:
            self._inboxes.pop(request_id, None)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._take_batch()
        except SieError as error:  # raised again for whoever follows, now or later
            with self._lock:
                self._failed = error
                for inbox in self._inboxes.values():
                    inbox.put(error)
        finally:
            self._reader.close()

    def _take_batch(self) -> None:
        try:
            records = self._reader.poll(BATCH, POLL_MS)
        except Retriable:
            return
        for record in records:
            with self._lock:
                inbox = self._inboxes.get((record.key or b"").decode("utf-8", "replace"))
            if inbox is None:
                continue
            try:
                inbox.put(decode_token_delta(record.value))
            except CodecError:
                continue  # no delta: what is missing comes with the result

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=5)

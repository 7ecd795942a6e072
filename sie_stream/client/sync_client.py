"""The Python client: submit requests to the stream, wait for their terminal records."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from types import TracebackType
from typing import Any, Self

from schemas.codec import CodecError, decode_result
from sie_stream.client.large import HOW_TO_SEND_LARGE, written
from sie_stream.client.requests import (
    InferenceResult,
    Request,
    RequestFailed,
    ResultTimeout,
    from_record,
)
from sie_stream.client.streaming import TextDelta, TokenWatcher, unroll
from sie_stream.client.watcher import ResultWatcher
from sie_stream.edge.connection import Connection
from sie_stream.errors import RecordTooLarge, Retriable
from sie_stream.ids import TopicPartition
from sie_stream.references import place_of

FLUSH_MS = 30_000
RESEND_ATTEMPTS = 3


class Submission:
    """A request on its way. `result()` waits for its terminal record."""

    def __init__(self, request_id: str, future: Future[InferenceResult]) -> None:
        self.request_id = request_id
        self.future = future

    def result(self, timeout_s: float | None = None) -> InferenceResult:
        """The terminal record, whatever its status. Raises ResultTimeout."""
        try:
            return self.future.result(timeout_s)
        except FutureTimeout as error:
            raise ResultTimeout(f"no result for request {self.request_id} within {timeout_s} s") from error


class Client:
    """Synchronous client; safe to share between threads.

    >>> with Client() as client:                       # finds the local `sie-stream up`
    ...     result = client.score("wine-rf", {"alcohol": 13.2, ...})
    ...     result.outputs["label"]
    """

    def __init__(
        self,
        bootstrap_servers: str | None = None,
        *,
        connection: Connection | None = None,
        reference_store: str | None = None,
    ) -> None:
        """`bootstrap_servers` None: SIE_STREAM_BOOTSTRAP_SERVERS, else the local `sie-stream up`.

        `reference_store`: folder or fsspec URL for inputs that are too large for a request; ingress must be allowed to
        read there. None: setting reference_store. Raises ConfigError for one that is no folder.
        """
        self._connection = connection or Connection.open(bootstrap_servers)
        settings = self._connection.settings
        self._topics = settings.topics
        self._store = settings.reference_store if reference_store is None else reference_store
        if self._store:
            place_of(self._store)
        self._writer = self._connection.plain_writer()
        self._watcher: ResultWatcher | None = None
        self._tokens: TokenWatcher | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, model: str, inputs: Mapping[str, Any] | None = None, **options: Any) -> Submission:
        """Send one request; returns once Kafka has it. `options` are the other fields of Request.

        >>> client.submit("wine-rf", inputs_ref=InputsRef("s3://bucket/inputs/1.json", sha256="9f86d0..."))
        """
        return self.submit_many([Request(model=model, inputs=inputs or {}, **options)])[0]

    def submit_many(self, requests: Iterable[Request]) -> list[Submission]:
        """Send many requests; returns once Kafka has all of them, in the order given.

        Inputs too large for a request go to the reference store first, if there is one, as an object named by its
        digest. Raises LogError when a record could not be delivered; ConfigError for a malformed request and
        StoreUnavailable for a store that takes nothing, before any is sent.
        """
        watcher = self._watching()
        topic, bytes_max = self._topics.requests, self._connection.settings.request_bytes_max
        prepared = []
        for request in requests:
            request_id = request.request_id or uuid.uuid4().hex
            prepared.append((request_id, written(request, request_id, topic, bytes_max, self._store)))
        submissions = [Submission(request_id, watcher.expect(request_id)) for request_id, _ in prepared]
        try:
            self._writer.write([write for _, write in prepared])
        except RecordTooLarge as error:
            raise RecordTooLarge(f"{error}. {HOW_TO_SEND_LARGE}") from error
        self._writer.flush(FLUSH_MS)
        return submissions

    def score(
        self, model: str, inputs: Mapping[str, Any] | None = None, *, timeout_s: float = 30.0, **options: Any
    ) -> InferenceResult:
        """Send one request and wait for its answer.

        A request without an answer is sent again with the same id (ingress drops the repeat when the first arrived).
        Raises RequestFailed when it ends in another status than ok, ResultTimeout when no answer comes in time.
        """
        request_id = options.pop("request_id", None) or uuid.uuid4().hex
        for attempt in range(RESEND_ATTEMPTS):
            submission = self.submit(model, inputs, request_id=request_id, **options)
            try:
                result = submission.result(timeout_s / RESEND_ATTEMPTS)
            except ResultTimeout:
                if attempt == RESEND_ATTEMPTS - 1:
                    raise ResultTimeout(f"no result for request {request_id} within {timeout_s} s") from None
                continue
            if not result.ok:
                raise RequestFailed(result)
            return result
        raise AssertionError("unreachable")

    def stream(
        self, model: str, inputs: Mapping[str, Any] | None = None, *, timeout_s: float = 60.0, **options: Any
    ) -> Iterator[TextDelta | InferenceResult]:
        """Send one request when iterated, and yield its answer as it grows: TextDelta after TextDelta, then the result.

        Deltas are provisional; the texts since the last one that is `restarted` add up to the result's text. Models
        that do not generate give the result alone. Raises RequestFailed and ResultTimeout.
        """
        request_id = options.pop("request_id", None) or uuid.uuid4().hex
        if self._tokens is None:
            self._tokens = TokenWatcher(self._connection.reader(), self._topics.tokens)
        inbox = self._tokens.follow(request_id)
        try:
            submission = self.submit(model, inputs, request_id=request_id, **{**options, "stream": True})
            submission.future.add_done_callback(inbox.put)
            yield from unroll(request_id, inbox, timeout_s)
        finally:
            self._tokens.forget(request_id)

    def results(
        self, request_ids: Sequence[str] = (), *, follow: bool = False, since_ms: int | None = None
    ) -> Iterator[InferenceResult]:
        """Terminal records already on the topic (from `since_ms` on), oldest first per partition.

        `request_ids` picks some; `follow` goes on with new ones until every picked id was seen, or for ever.
        """
        wanted = set(request_ids)
        reader = self._connection.reader()
        try:
            topic = self._topics.results
            partitions = [TopicPartition(topic, number) for number in range(reader.partitions_of(topic))]
            ends = reader.end_offsets(partitions)
            starts = (
                reader.beginning_offsets(partitions) if since_ms is None else reader.offsets_at(partitions, since_ms)
            )
            reader.assign(starts)
            left = {partition for partition in partitions if starts[partition] < ends[partition]}
            while left or follow:
                try:
                    records = reader.poll(2_000, 100)
                except Retriable:
                    continue
                for record in records:
                    try:
                        result = decode_result(record.value)
                    except CodecError:
                        continue  # no result: `sie-stream audit verify` tells of it
                    if not request_ids or result.request_id in wanted:
                        wanted.discard(result.request_id)
                        yield from_record(result)
                if request_ids and not wanted:
                    return
                left = {partition for partition in left if reader.position(partition) < ends[partition]}
        finally:
            reader.close()

    def _watching(self) -> ResultWatcher:
        if self._watcher is None:
            self._watcher = ResultWatcher(self._connection.reader(), self._topics.results)
        return self._watcher

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.close()
        if self._tokens is not None:
            self._tokens.close()
        self._writer.close()

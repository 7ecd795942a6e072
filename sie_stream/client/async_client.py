"""The same client for asyncio: Kafka stays on its own threads, futures are awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from sie_stream.client.requests import InferenceResult, Request, ResultTimeout
from sie_stream.client.streaming import TextDelta
from sie_stream.client.sync_client import Client, Submission
from sie_stream.edge.connection import Connection


class AsyncClient:
    """Asynchronous client.

    >>> async with AsyncClient() as client:
    ...     result = await client.score("wine-rf", {"alcohol": 13.2, ...})
    """

    def __init__(
        self,
        bootstrap_servers: str | None = None,
        *,
        connection: Connection | None = None,
        reference_store: str | None = None,
    ) -> None:
        self._client = Client(bootstrap_servers, connection=connection, reference_store=reference_store)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def submit(self, model: str, inputs: Mapping[str, Any] | None = None, **options: Any) -> Submission:
        """Send one request; returns once Kafka has it."""
        return await asyncio.to_thread(self._client.submit, model, inputs, **options)

    async def submit_many(self, requests: Iterable[Request]) -> list[Submission]:
        return await asyncio.to_thread(self._client.submit_many, list(requests))

    async def score(
        self, model: str, inputs: Mapping[str, Any] | None = None, *, timeout_s: float = 30.0, **options: Any
    ) -> InferenceResult:
        """Send one request and wait for its answer; errors as Client.score."""
        return await asyncio.to_thread(self._client.score, model, inputs, timeout_s=timeout_s, **options)

    async def stream(
        self, model: str, inputs: Mapping[str, Any] | None = None, *, timeout_s: float = 60.0, **options: Any
    ) -> AsyncIterator[TextDelta | InferenceResult]:
        """The answer as it grows, then the result; as Client.stream."""
        iterator = self._client.stream(model, inputs, timeout_s=timeout_s, **options)
        while (found := await asyncio.to_thread(next, iterator, None)) is not None:
            yield found

    async def result(self, submission: Submission, timeout_s: float | None = None) -> InferenceResult:
        """The terminal record of a submission, without holding a thread. Raises ResultTimeout."""
        try:
            return await asyncio.wait_for(asyncio.wrap_future(submission.future), timeout_s)
        except TimeoutError as error:
            raise ResultTimeout(f"no result for request {submission.request_id} within {timeout_s} s") from error

    async def results(
        self, request_ids: Sequence[str] = (), *, follow: bool = False, since_ms: int | None = None
    ) -> AsyncIterator[InferenceResult]:
        """Terminal records already on the topic, then (follow) new ones."""
        iterator = self._client.results(request_ids, follow=follow, since_ms=since_ms)
        while (result := await asyncio.to_thread(next, iterator, None)) is not None:
            yield result

    async def close(self) -> None:
        await asyncio.to_thread(self._client.close)

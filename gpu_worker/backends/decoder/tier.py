"""One model's use of the tier outside the engine: full blocks as they are computed, and where each request stands.

Where a request stands is written whenever it has filled a block. After the engine was killed a request goes on from
there: its full blocks are copied, and only the tokens behind them, fewer than a block has, are computed again.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from gpu_worker.backends.base import EngineInput
from gpu_worker.backends.decoder.arena import HostCopies
from gpu_worker.backends.decoder.flight import Flight
from gpu_worker.backends.decoder.frozen import Intake, Origin, frozen, thawed
from gpu_worker.decoding.image import ImageRefused, digest
from gpu_worker.decoding.kv_tier import KvTier
from gpu_worker.decoding.sequence import Chunk, Fetch


class TierOf:
    """Digests of blocks are salted with the trunk, so models of one trunk use each other's blocks, and no others."""

    def __init__(self, tier: KvTier, origin: Origin, pages: HostCopies) -> None:
        self._tier = tier
        self._origin = origin
        self._pages = pages
        self.run_of = tier.run_of
        self.fetched = 0
        """Blocks."""
        self.resumptions = 0

    def store(self, chunks: Sequence[Chunk], flights: Sequence[Flight]) -> list[Flight]:
        """Bring blocks that are full now to the tier; the requests that filled one. Between two steps."""
        filled: list[Flight] = []
        for chunk, flight in zip(chunks, flights, strict=True):
            full = chunk.end // self._pages.block_tokens
            if full <= flight.stored:
                continue
            for block, key in list(zip(chunk.sequence.blocks, chunk.sequence.digests, strict=False))[
                flight.stored : full
            ]:
                if not self._tier.holds("block", key):
                    content = self._pages.read([block], self._pages.block_tokens)
                    self._tier.put("block", key, content.numpy().data.cast("B"))
            flight.stored = full
            filled.append(flight)
        return filled

    def note(self, flight: Flight, now_ms: float) -> None:
        """Where a request stands that generates an answer. Others are begun again: their blocks spare most of it."""
        if flight.reader is None and len(flight.tokens.ids) > flight.tokens.prompt_tokens:
            self._tier.put("state", self._name(flight.item), frozen(flight, self._origin, 0, now_ms))

    def fetch(self, move: Fetch) -> None:
        """Copies what was compared with its digests when the step was planned."""
        for block, key in zip(move.blocks, move.digests, strict=True):
            content = bytearray(self._tier.block(key))
            self._pages.write([block], torch.frombuffer(content, dtype=torch.uint8)[None])
        self.fetched += len(move.blocks)

    def resumed(self, ticket: int, item: EngineInput, intake: Intake, now_ms: float) -> Flight | None:
        """The request where it stood; None: begin it again."""
        content = self._tier.find("state", self._name(item))
        if content is None:
            return None
        try:
            flight, _ = thawed(bytes(content), intake, ticket, now_ms)
        except ImageRefused:
            return None  # of another release, say; computed again it is right in any case
        flight.item = item
        flight.tokens.priority, flight.tokens.deadline_at_ms = item.priority, item.deadline_at_ms
        flight.tell_again()
        self.resumptions += 1
        return flight

    def _name(self, item: EngineInput) -> bytes:
        """Of a request: all that its answer depends on, and of the model."""
        asked = (item.request_id, item.token_ids, item.parameters, item.seed, item.stream)
        return digest(
            msgspec.msgpack.encode((self._origin.trunk.digest, self._origin.weights, self._origin.head, asked))
        )

"""One answer of a replay, in the form in which it is compared."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from gpu_worker.backends.base import EngineOutput, ending_of
from sie_stream.cli.replaying.engines import Target
from sie_stream.errors import InvalidRequest
from sie_stream.records import LogRecord, ResultError, WorkItem
from sie_stream.replay.compare import Again, Original
from sie_stream.replay.report import Place


class Token(Struct, frozen=True, gc=False):
    """Goes along with an input, and comes back with its answer."""

    original: Original
    record: LogRecord
    work: WorkItem

    @property
    def place(self) -> Place:
        return place_of(self.record)


def place_of(record: LogRecord) -> Place:
    return Place(record.topic, record.partition, record.offset)


def answer_again(
    target: Target, token: Token, output: EngineOutput, built: bytes | ResultError | None, inference_ms: float
) -> Again:
    """`built`: by Stage 2; None: the engine gave an error."""
    code, message, schema = output.error_code or "", output.error_message or "", False
    if isinstance(built, ResultError):
        code, message, schema = built.code, built.message, built.code == "output_schema_mismatch"
    return Again(
        ending_of(code) if code else "ok",
        target.launch.version,
        target.weights_digest,
        target.engine,
        built if isinstance(built, bytes) else None,
        code,
        message,
        token.work.seed,
        schema,
        inference_ms,
        drawn_by_chance(token.work, target.launch.backend),
    )


class _Chance(Struct, frozen=True):
    temperature: float = 0.0
    seed: int | None = None


_chance = msgspec.json.Decoder(_Chance)
SEEDED_BY_ID = ("torch", "vllm", "sglang")
"""Backends that make a seed of the request id where there is none, and so draw the same again."""


def drawn_by_chance(work: WorkItem, backend: str) -> bool:
    """Whether the answer was asked to be drawn by chance while no seed says how. Ingress gives every request to a
    generative model a seed; those to models of other service types have the seed that they asked for, or none.
    """
    if work.seed is not None or not work.parameters or backend in SEEDED_BY_ID:
        return False
    try:
        asked = _chance.decode(work.parameters)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False  # parameters of another kind
    return asked.temperature > 0 and asked.seed is None


def refused_again(target: Target, token: Token, refusal: InvalidRequest) -> Again:
    """The inputs are none for the pinned version."""
    return Again(
        "rejected",
        target.launch.version,
        target.weights_digest,
        target.engine,
        None,
        refusal.code,
        f"{refusal.field}: {refusal.message}" if refusal.field else refusal.message,
        token.work.seed,
        schema_refused=True,
    )

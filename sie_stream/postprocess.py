"""Stage 2: from what an engine produced to the outputs of a result. Pure; used by egress and, fused, by workers.

Detokenises, builds the outputs object of language models, holds it against the output_schema and the size limit. What
is wrong with the output of one request ends that request as `failed`, and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from sie_stream.errors import InvalidRequest
from sie_stream.records import Result, ResultError

RESULT_OVERHEAD_BYTES = 8 * 1024
"""Room a result needs besides its outputs: ids, timings, provenance, batch framing."""


class Stage2(NamedTuple):
    """How one model's output is finished.

    detokenise:   token ids to text, without special tokens; None for models that do not generate.
    check:        raises InvalidRequest (InvalidInput of the compiled output_schema); None: not checked.
    outputs_bytes_max: largest outputs object in bytes.
    """

    detokenise: Callable[[Sequence[int]], str] | None
    check: Callable[[bytes], None] | None
    outputs_bytes_max: int


class GeneratedText(Struct, frozen=True):
    """Outputs object of language models."""

    text: str
    finish_reason: str


def stage2_of(
    record_bytes_max: int,
    detokenise: Callable[[Sequence[int]], str] | None = None,
    check: Callable[[bytes], None] | None = None,
) -> Stage2:
    """Stage 2 of a model whose terminal records must stay below `record_bytes_max`."""
    return Stage2(detokenise, check, record_bytes_max - RESULT_OVERHEAD_BYTES)


_encoder = msgspec.json.Encoder()


def build_outputs(
    stage2: Stage2, outputs: bytes | None, token_ids: Sequence[int] | None, finish_reason: str
) -> bytes | ResultError:
    """The outputs object of one request, or why it must end as `failed`.

    Codes: output_missing (neither outputs nor tokens, or tokens without a tokenizer), output_too_large,
    output_schema_mismatch.
    """
    if outputs is None:
        if token_ids is None or stage2.detokenise is None:
            return ResultError("output_missing", "the engine gave neither outputs nor tokens that can become text.")
        outputs = _encoder.encode(GeneratedText(stage2.detokenise(token_ids), finish_reason))
    if len(outputs) > stage2.outputs_bytes_max:
        return ResultError(
            "output_too_large",
            f"the outputs have {len(outputs)} bytes, allowed are {stage2.outputs_bytes_max}. Ask for less at once, or "
            "raise the setting record_bytes_max together with the brokers' message.max.bytes.",
            "outputs",
        )
    if stage2.check is not None:
        try:
            stage2.check(outputs)
        except InvalidRequest as mismatch:
            field = f"outputs.{mismatch.field}" if mismatch.field else "outputs"
            return ResultError(
                "output_schema_mismatch", f"the outputs break the model's output_schema: {mismatch.message}", field
            )
    return outputs


def finish_result(partial: Result, built: bytes | ResultError, postprocess_ms: float, now_ms: int) -> Result:
    """The terminal record from the record so far and what Stage 2 built.

    `partial.finished_at` is when the engine's part was written; the time since then is added to the total.
    """
    timings = replace(
        partial.timings_ms,
        postprocess=partial.timings_ms.postprocess + postprocess_ms,
        total=partial.timings_ms.total + max(0, now_ms - partial.finished_at),
    )
    if isinstance(built, ResultError):
        return replace(partial, status="failed", outputs=None, error=built, timings_ms=timings, finished_at=now_ms)
    return replace(partial, status="ok", outputs=built, error=None, timings_ms=timings, finished_at=now_ms)

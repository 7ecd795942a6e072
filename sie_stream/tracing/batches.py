"""Which results came out of one engine batch. A Result names no batch; what all of a batch share identifies it. Pure.

The measured engine time is a double that all results of a batch carry, so that two batches of one replica with equal
times, sizes and ends hardly exist.
"""

from __future__ import annotations

from collections.abc import Iterable

from sie_stream.records import Result
from sie_stream.tracing.evidence import Neighbour

BatchKey = tuple[str, str, str, str, int, int, float]


def batch_key(result: Result) -> BatchKey | None:
    """worker, incarnation, device, model, placement epoch, size, engine time. None: no engine ran."""
    origin = result.provenance
    if not origin.worker or not origin.batch_size:
        return None
    return (
        origin.worker,
        origin.incarnation,
        origin.device,
        result.model,
        origin.placement_epoch,
        origin.batch_size,
        result.timings_ms.inference,
    )


def engine_end_ms(result: Result) -> float:
    """When the engine's answer was there: for pooled models Stage 2 came later."""
    return result.finished_at - result.timings_ms.postprocess


END_SLACK_MS = 2.0
"""Times are rounded to milliseconds twice."""


def neighbours(result: Result, others: Iterable[Result]) -> tuple[Neighbour, ...]:
    """Those of `others` from the same batch, by request id; each id once."""
    wanted = batch_key(result)
    if wanted is None:
        return ()
    found = {
        other.request_id: Neighbour(other.request_id, other.status, other.timings_ms.total)
        for other in others
        if other.request_id != result.request_id
        and batch_key(other) == wanted
        and abs(engine_end_ms(other) - engine_end_ms(result)) <= END_SLACK_MS
    }
    return tuple(found[request_id] for request_id in sorted(found))

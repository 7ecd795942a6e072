"""From what an engine told of answers under way to the provisional records of sie.tokens."""

from __future__ import annotations

from gpu_worker.engine_port import TokensStreamed
from gpu_worker.sequence_images import Run
from gpu_worker.state import Engine
from gpu_worker.worker_state import WorkerState
from schemas.codec import encode_token_delta
from sie_stream.records import LogWrite, TokenDelta


def on_tokens_streamed(state: WorkerState, engine: Engine, event: TokensStreamed) -> None:
    """One record per delta of an item that is still ours, numbered within the attempt.

    The key is the request id, so all deltas of a request are in one partition, in order.
    """
    engine.finished_at = state.at_ms  # steps are being made
    topic = state.names.tokens
    for told in event.deltas:
        batch = engine.outstanding.get(told.batch_id)
        if batch is None:
            continue  # of an engine that was given up since
        guard = batch.finisher.guard
        if guard is not None and guard.hides_outputs:
            continue  # a text is protected as a whole, once it is whole
        item = batch.items[told.place]
        if item.partition.state == "closed":
            continue  # another worker answers it by now
        request_id = item.work.request_id
        run = item.told_as or Run(state.identity.worker, state.identity.incarnation, item.attempts)
        delta = TokenDelta(
            request_id=request_id,
            index=item.told,
            token_ids=tuple(told.token_ids),
            text=told.text,
            worker=run.worker,
            incarnation=run.incarnation,
            attempt=run.attempt,
        )
        item.told += 1
        state.deltas.append(LogWrite(topic, encode_token_delta(delta), request_id.encode()))

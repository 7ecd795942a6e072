"""An engine process ended: what it held is retried, what it had loaded is loaded again, and the scheduler is told."""

from __future__ import annotations

from gpu_worker.replicas import reload_after_death
from gpu_worker.retries import engine_lost
from gpu_worker.state import Engine
from gpu_worker.worker_state import WorkerState
from sie_stream.engine_facts import LOAD_PREFIX, EngineLost, EngineModel

SUSPECTS_MAX = 64
"""A report has to fit into a record; which of more requests it was, only the worker knows then."""


def on_engine_ended(state: WorkerState, engine: Engine, code: str, message: str, cause: str) -> None:
    """`code` and `message` are for the items it held, `cause` for the scheduler."""
    loading = engine.loading
    loaded = [one for one in state.replicas.values() if one.engine == engine.key and one.state == "ready"]
    held = [item.work.request_id for batch in engine.outstanding.values() for item in batch.items]
    place = len(state.reports)  # before whatever the reload reports: this is why
    given_up = engine_lost(state, engine, code, message, cause)
    reload_after_death(state, engine, cause)
    suspects = [f"{LOAD_PREFIX}{loading.key.model}"] if loading is not None else []
    if loading is not None and loading.state == "failed":
        given_up = [*given_up, *suspects]
    identity = state.identity
    state.reports.insert(
        place,
        EngineLost(
            worker=identity.worker,
            incarnation=identity.incarnation,
            device=engine.key.device,
            backend=engine.key.backend,
            cause=cause,
            models=tuple(EngineModel(one.key.model, one.key.version, one.key.placement_epoch) for one in loaded),
            requests=len(held),
            suspects=(*suspects, *held[:SUSPECTS_MAX]),
            given_up=tuple(given_up),
            domain=engine.key.domain,
        ),
    )

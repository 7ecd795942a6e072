"""Replicas: what should be loaded, what is, and what the scheduler is told about it."""

from __future__ import annotations

from gpu_worker import switching
from gpu_worker.engine_port import EngineKey, ImageMoved, LoadFailed, ModelLoaded, ModelSwitched, SwitchFailed
from gpu_worker.facts import LoadModel, StopEngine, UnloadModel
from gpu_worker.memory.slots import TooLarge
from gpu_worker.outcomes import Stage2Refused
from gpu_worker.state import Engine, ModelQueue, Replica, ReplicaKey
from gpu_worker.worker_state import WorkerState
from sie_stream.control import PlacementRow, ReplicaFailed, ReplicaPlacement, ReplicaReady


def follow_replicas(state: WorkerState, model: str, row: PlacementRow | None) -> None:
    """Make the replicas of `model` on this worker those that the row names for this incarnation."""
    wanted: dict[ReplicaKey, ReplicaPlacement] = {}
    for placed in row.replicas if row is not None else ():
        if placed.worker == state.identity.worker and placed.incarnation == state.identity.incarnation:
            wanted[ReplicaKey(model, placed.launch.version, placed.device, placed.placement_epoch)] = placed
    for key in [key for key in state.replicas if key.model == model and key not in wanted]:
        _remove(state, state.replicas[key])
    for key, placed in wanted.items():
        if key not in state.replicas:
            _add(state, key, placed)
    _refresh_queues(state, model)


def _add(state: WorkerState, key: ReplicaKey, placed: ReplicaPlacement) -> None:
    engine_key = EngineKey(placed.device, placed.launch.backend, placed.launch.domain)
    replica = Replica(key, engine_key, state.next_slot, placed.launch, listed_at=state.at_ms)
    state.next_slot += 1
    state.replicas[key] = replica
    state.slots[replica.slot] = replica
    engine = engine_of(state, engine_key)
    engine.replicas += 1
    if len(placed.devices) > 1:
        # An engine process has one device. Said at once, so that nobody waits for a load that cannot come.
        message = (
            f"the replica spans {', '.join(placed.devices)}, and backend {placed.launch.backend!r} of this worker runs "
            f"a model on one device; set tensor_parallel_size to 1"
        )
        _fail(state, replica, "tensor_parallel_unsupported", message)
        return
    engine.to_load.append(replica)


def _remove(state: WorkerState, replica: Replica) -> None:
    engine = engine_of(state, replica.engine)
    if replica.state in ("ready", "loading"):
        _unload(state, replica)
    elif replica.state == "waiting":
        engine.to_load.remove(replica)
    if engine.loading is replica:
        engine.loading = None
    replica.state = "gone"
    engine.replicas -= 1
    del state.replicas[replica.key]
    del state.slots[replica.slot]


def _unload(state: WorkerState, replica: Replica) -> None:
    state.commands.append(UnloadModel(replica.engine, replica.slot))
    switching.unregister(state, replica)


def engine_of(state: WorkerState, key: EngineKey) -> Engine:
    engine = state.engines.get(key)
    if engine is None:
        engine = state.engines[key] = Engine(key)
    return engine


def next_to_load(state: WorkerState, engine: Engine) -> Replica:
    """Urgent models first; among equals those with work waiting (after an engine's death), then as they were placed."""

    def rank(replica: Replica) -> tuple[int, bool]:
        queue = state.queues.models.get((replica.key.model, replica.key.version))
        return replica.launch.priority, queue is None or not any(queue.lanes)

    return min(engine.to_load, key=rank)


def start_load(state: WorkerState, engine: Engine, replica: Replica) -> None:
    """Ask the engine for the next model. One load at a time, so a death during a load has one culprit."""
    engine.to_load.remove(replica)
    engine.loading = replica
    replica.state = "loading"
    replica.loading_since = state.at_ms
    replica.waited_ms = round(state.at_ms - replica.listed_at)
    engine.running = True
    state.commands.append(LoadModel(engine.key, replica.slot, replica.launch))


def on_loaded(state: WorkerState, event: ModelLoaded) -> None:
    replica = state.slots.get(event.slot)
    if replica is None or replica.state != "loading":
        return  # unloaded meanwhile
    engine = engine_of(state, replica.engine)
    engine.loading = None
    engine.deaths_in_a_row = 0
    replica.memory_bytes = event.memory_bytes
    replica.weights_digest = event.weights_digest
    replica.load_ms = event.load_ms
    replica.warmup_ms = event.warmup_ms
    replica.engine_start_ms = max(0, round(state.at_ms - replica.loading_since) - event.load_ms - event.warmup_ms)
    replica.load_attempts = 0
    replica.sequences_max = event.sequences_max
    replica.movable = event.movable
    engine.continuous = engine.continuous or event.sequences_max > 0
    try:
        switching.register(state, replica, event)
    except TooLarge as problem:
        state.commands.append(UnloadModel(replica.engine, replica.slot))
        _fail(state, replica, "device_memory_exceeded", str(problem))
        return
    replica.state = "ready"
    _become_ready(state, replica)


def _become_ready(state: WorkerState, replica: Replica) -> None:
    """Prepare its results and say so, unless that was said before."""
    try:
        replica.finisher = state.outcomes.finisher(replica, engine_of(state, replica.engine).versions)
    except Stage2Refused as refusal:
        _unload(state, replica)
        _fail(state, replica, "stage2_refused", str(refusal))
        return
    if replica.reported:
        return
    replica.reported = True
    identity = state.identity
    state.reports.append(
        ReplicaReady(
            identity.worker,
            identity.incarnation,
            replica.key.model,
            replica.key.version,
            replica.key.placement_epoch,
            replica.memory_bytes,
            replica.load_ms,
            replica.warmup_ms,
            replica.waited_ms,
            replica.engine_start_ms,
        )
    )


def on_weights_moved(state: WorkerState, event: ModelSwitched | SwitchFailed | ImageMoved) -> None:
    match event:
        case ModelSwitched():
            switching.on_switched(state, event)
        case ImageMoved():
            switching.on_image_moved(state, event)
        case SwitchFailed():
            _on_switch_failed(state, event)


def _on_switch_failed(state: WorkerState, event: SwitchFailed) -> None:
    """The weights cannot be brought to the device: the model is of no use any more."""
    switching.take_back(state, event.engine, event.slot)
    replica = state.slots.get(event.slot)
    if replica is None or replica.state != "ready":
        return  # unloaded meanwhile
    _unload(state, replica)
    _fail(state, replica, "switch_failed", event.message)


def on_load_failed(state: WorkerState, event: LoadFailed) -> None:
    replica = state.slots.get(event.slot)
    if replica is None or replica.state != "loading":
        return
    engine_of(state, replica.engine).loading = None
    _fail(state, replica, event.code, event.message)


def _fail(state: WorkerState, replica: Replica, code: str, message: str) -> None:
    replica.state = "failed"
    _refresh_queues(state, replica.key.model)
    replica.reported = True
    identity = state.identity
    state.reports.append(
        ReplicaFailed(
            identity.worker,
            identity.incarnation,
            replica.key.model,
            replica.key.version,
            replica.key.placement_epoch,
            code,
            message,
        )
    )


def reload_after_death(state: WorkerState, engine: Engine, cause: str) -> None:
    """All models of a dead engine wait to be loaded again; one that was being loaded is blamed if it was alone."""
    switching.engine_gone(state, engine.key)
    loading = engine.loading
    engine.loading = None
    if loading is not None:
        loading.state = "waiting"
        loading.load_attempts += 1
        if loading.load_attempts >= state.settings.engine_attempts_max:
            message = f"the engine process died ({cause}) {loading.load_attempts} times while it loaded the model"
            _fail(state, loading, "engine_died", message)
        else:
            engine.to_load.append(loading)
    for replica in state.replicas.values():
        if replica.engine == engine.key and replica.state == "ready":
            replica.state = "waiting"
            replica.listed_at = state.at_ms
            replica.reported = False  # the scheduler knows that it is down, and wants to know when it is back
            engine.to_load.append(replica)


def check_load_timeout(state: WorkerState, engine: Engine) -> bool:
    """True when a load took too long: the model has failed, and its engine must be stopped by the caller."""
    replica = engine.loading
    if replica is None or state.at_ms - replica.loading_since < state.settings.load_timeout_ms:
        return False
    engine.loading = None
    message = f"loading took longer than {state.settings.load_timeout_ms} ms (setting load_timeout_ms)"
    _fail(state, replica, "load_timeout", message)
    return True


def stop_engine(state: WorkerState, engine: Engine, reason: str) -> None:
    engine.running = False
    switching.engine_gone(state, engine.key)
    state.commands.append(StopEngine(engine.key, reason))


def _refresh_queues(state: WorkerState, model: str) -> None:
    state.model_caps.pop(model, None)
    for queue in state.queues.models.values():
        if queue.model == model:
            _refresh(state, queue)


def _refresh(state: WorkerState, queue: ModelQueue) -> None:
    queue.replicas = serving(state, queue.model, queue.version)
    queue.ordered = any(replica.launch.ordering == "key" for replica in queue.replicas)


def serving(state: WorkerState, model: str, version: str) -> list[Replica]:
    """Replicas that may run items of this version, best first: that version if it is placed here, else the newest.

    Items keep the version they were routed to; the result says which one ran. That happens only while a version is
    being replaced: the item was routed before the change and is read after it.
    """
    of_model = [replica for replica in state.replicas.values() if replica.key.model == model]
    exact = [replica for replica in of_model if replica.key.version == version and replica.state != "failed"]
    return sorted(exact or of_model, key=lambda replica: -replica.key.placement_epoch)


def queue_of(state: WorkerState, model: str, version: str) -> ModelQueue:
    queue = state.queues.models.get((model, version))
    if queue is None:
        queue = state.queues.queue(model, version)
        _refresh(state, queue)
    return queue

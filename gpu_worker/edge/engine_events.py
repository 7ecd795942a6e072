"""What engines say over the socket, as events of the worker's loop."""

from __future__ import annotations

from gpu_worker import engine_port
from gpu_worker.engine_messages import (
    Adopted,
    Answers,
    Deltas,
    Exported,
    FromEngine,
    ImageMoved,
    Loaded,
    NotLoaded,
    NotSwitched,
    Raised,
    Started,
    Stepped,
    Switched,
)
from gpu_worker.engine_port import (
    BatchCompleted,
    BatchFailed,
    EngineEvent,
    EngineKey,
    EngineStarted,
    EngineStepped,
    LoadFailed,
    ModelLoaded,
    ModelSwitched,
    SequenceAdopted,
    SequenceExported,
    StreamedTokens,
    SwitchFailed,
    TokensStreamed,
)


def event_of(engine: EngineKey, message: FromEngine) -> EngineEvent:
    """The same, with the engine that said it."""
    match message:
        case Answers():
            return BatchCompleted(engine, message.batch_id, message.outputs, message.inference_ms)
        case Raised():
            return BatchFailed(engine, message.batch_id, message.code, message.message, message.shared)
        case Stepped():
            return EngineStepped(engine, message.sequences)
        case Deltas():
            told = [StreamedTokens(one.batch_id, one.place, one.token_ids, one.text) for one in message.deltas]
            return TokensStreamed(engine, told)
        case Loaded():
            return ModelLoaded(
                engine,
                message.slot,
                message.memory_bytes,
                message.weights_digest,
                message.load_ms,
                message.warmup_ms,
                message.sequences_max,
                message.trunk,
                message.parts,
                message.image_bytes,
                message.pools,
                message.movable,
            )
        case NotLoaded():
            return LoadFailed(engine, message.slot, message.code, message.message)
        case Started():
            return EngineStarted(engine, message.pid, message.versions)
        case Switched():
            return ModelSwitched(engine, message.slot, message.switch_class, message.size, message.ms)
        case NotSwitched():
            return SwitchFailed(engine, message.slot, message.message)
        case ImageMoved():
            return engine_port.ImageMoved(engine, message.slot, message.tier, message.message)
        case Exported():
            return SequenceExported(engine, message.batch_id, message.image)
        case Adopted():
            return SequenceAdopted(engine, message.batch_id, message.refused)

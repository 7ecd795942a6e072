"""What the host asks of engine processes, and what they tell it. edge/engine_link.py implements it with real processes,
sim/engine.py with virtual ones.

An engine runs all models of one isolation domain: one backend on one device, versions on trial apart. It holds models
in numbered slots, runs batches in the order they were submitted, and loads a model beside the running batches.
Continuous models run up to `sequences_max` batches side by side and finish them in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from msgspec import Struct

from gpu_worker.backends.base import EngineInput, EngineOutput
from gpu_worker.memory.slots import Below, SwitchClass
from sie_stream.control import ModelLaunch
from sie_stream.telemetry import SequenceCounts
from sie_stream.trunks import Trunk


class EngineKey(NamedTuple):
    """Names one engine of a worker: what dies together."""

    device: str
    backend: str
    domain: str = ""
    """See ModelLaunch."""

    @property
    def name(self) -> str:
        """Among the engines of its device."""
        return f"{self.backend}/{self.domain}" if self.domain else self.backend


class EngineStarted(Struct, frozen=True):
    """The process answers; it holds no model yet."""

    engine: EngineKey
    pid: int
    versions: dict[str, str]


class ModelLoaded(Struct, frozen=True):
    """The model in `slot` is warm and can be run."""

    engine: EngineKey
    slot: int
    memory_bytes: int
    weights_digest: str
    load_ms: int
    warmup_ms: int
    sequences_max: int = 0
    """Continuous models: how many batches (of one request each) run side by side. 0: one batch after the other."""
    trunk: Trunk | None = None
    parts: dict[str, int] = {}
    image_bytes: int = 0
    pools: dict[str, int] = {}
    movable: bool = False
    """See engine_messages.Loaded."""


class LoadFailed(Struct, frozen=True):
    engine: EngineKey
    slot: int
    code: str
    message: str


class ModelSwitched(Struct, frozen=True):
    """The weights of a model are on the device, in the pages it was given."""

    engine: EngineKey
    slot: int
    switch_class: SwitchClass
    size: int
    """Bytes that were copied."""
    ms: float


class SwitchFailed(Struct, frozen=True):
    """They are not, and the pages hold nothing of use."""

    engine: EngineKey
    slot: int
    message: str


class ImageMoved(Struct, frozen=True):
    """In which tier the image of a model is now."""

    engine: EngineKey
    slot: int
    tier: Below
    message: str = ""
    """Why it is not where it was to be moved to."""


class BatchCompleted(Struct, frozen=True):
    """Answers in the order of the batch, one for each."""

    engine: EngineKey
    batch_id: int
    outputs: list[EngineOutput]
    inference_ms: float


class BatchFailed(Struct, frozen=True):
    """The backend raised: nothing of the batch was answered, the engine lives on."""

    engine: EngineKey
    batch_id: int
    code: str
    message: str
    shared: int = 1
    """Batches that failed together; each has an event of its own."""


class SequenceExported(Struct, frozen=True):
    """Answer to export(), for each of its batches. `image` None: the engine keeps it, or it has ended."""

    engine: EngineKey
    batch_id: int
    image: bytes | None


class SequenceAdopted(Struct, frozen=True):
    """A request that was submitted with an image has its next token. `refused`: why it is computed from its beginning
    instead; then nothing was told of its answer yet."""

    engine: EngineKey
    batch_id: int
    refused: str = ""


class EngineStepped(Struct, frozen=True):
    """The engine's continuous models make progress, though nothing may have ended."""

    engine: EngineKey
    sequences: Sequence[tuple[int, SequenceCounts]] = ()
    """(slot, how the model in it stands), of models that say so."""


class StreamedTokens(NamedTuple):
    """What was added to the answer of one item: the one at `place` of its batch."""

    batch_id: int
    place: int
    token_ids: Sequence[int]
    text: str


class TokensStreamed(Struct, frozen=True):
    """Answers under way have grown. What is added to an answer comes in order, and before the batch completes."""

    engine: EngineKey
    deltas: Sequence[StreamedTokens]


class EngineDied(Struct, frozen=True):
    """The process ended. Its slots are empty and what it was running is lost."""

    engine: EngineKey
    cause: str
    """Short and stable: `exit 3`, `SIGSEGV`, `SIGKILL (out of memory)`, `closed its pipe` ..."""


EngineEvent = (
    EngineStarted
    | ModelLoaded
    | LoadFailed
    | ModelSwitched
    | SwitchFailed
    | ImageMoved
    | BatchCompleted
    | BatchFailed
    | SequenceExported
    | SequenceAdopted
    | EngineStepped
    | TokensStreamed
    | EngineDied
)


class EnginePort(Protocol):
    """All engines of one worker. No method waits except poll() and close()."""

    def load(self, engine: EngineKey, slot: int, launch: ModelLaunch) -> None:
        """Load into an unused slot; starts the engine process when there is none."""
        ...

    def unload(self, engine: EngineKey, slot: int) -> None:
        """After the batches already submitted. No event answers."""
        ...

    def submit(
        self, engine: EngineKey, batch_id: int, slot: int, items: Sequence[EngineInput], image: bytes = b""
    ) -> None:
        """`image`: what the one request of a movable model goes on from; SequenceAdopted tells what became of it."""
        ...

    def export(self, engine: EngineKey, batch_ids: Sequence[int], bytes_max: int) -> None:
        """Stop requests of movable models; SequenceExported answers for each, unless the engine ends. Those whose
        images would be more than `bytes_max` together run on."""
        ...

    def cancel(self, engine: EngineKey, batch_id: int) -> None:
        """Its answer is of no use any more. The batch still ends by an event, a continuous one earlier."""
        ...

    def activate(self, engine: EngineKey, slot: int, pages: Sequence[int]) -> None:
        """Bring a model to these pages of its device. ModelSwitched or SwitchFailed answers, unless the engine ends."""
        ...

    def deactivate(self, engine: EngineKey, slot: int) -> None:
        """Its pages may be given to others: it runs nothing."""
        ...

    def move_image(self, engine: EngineKey, slot: int, to: Below) -> None:
        """ImageMoved answers, unless the model is unloaded or the engine ends."""
        ...

    def stop(self, engine: EngineKey) -> None:
        """Kill the process if there is one. No event answers: nothing of that process is reported any more."""
        ...

    def poll(self, wait_ms: float) -> list[EngineEvent]:
        """What happened since the last call, oldest first; waits at most `wait_ms` for the first."""
        ...

    def close(self) -> None:
        """End all engine processes and wait for them."""
        ...

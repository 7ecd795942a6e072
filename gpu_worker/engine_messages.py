"""What crosses the socket between the host and an engine process: msgpack arrays, one message per batch, no pickle.

Fields are only ever added at the end, with a default.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from gpu_worker.backends.base import EngineInput, EngineOutput
from gpu_worker.memory.slots import Below, SwitchClass
from sie_stream.telemetry import SequenceCounts
from sie_stream.trunks import Trunk


class Load(Struct, frozen=True, tag=1, array_like=True):
    slot: int
    launch: bytes
    """ModelLaunch as JSON: it holds raw JSON, which msgpack must not see."""


class Unload(Struct, frozen=True, tag=2, array_like=True):
    slot: int


class Run(Struct, frozen=True, tag=3, array_like=True):
    batch_id: int
    slot: int
    items: list[EngineInput]
    image: bytes = b""
    """Of a batch of one: its request goes on from here (decoding/image.py); the answer is Adopted, and then Answers."""


class Cancel(Struct, frozen=True, tag=4, array_like=True):
    """Nobody waits for this batch any more. One of a continuous model ends early; another is answered as ever."""

    batch_id: int


class Activate(Struct, frozen=True, tag=5, array_like=True):
    """Bring the weights of a model to these pages of the device; the answer is Switched or NotSwitched."""

    slot: int
    pages: list[int]


class Deactivate(Struct, frozen=True, tag=6, array_like=True):
    """Its pages are the device's again. Nothing answers."""

    slot: int


class MoveImage(Struct, frozen=True, tag=7, array_like=True):
    """Keep the weights in this tier, for the next time; the answer is ImageMoved."""

    slot: int
    to: Below


class Export(Struct, frozen=True, tag=8, array_like=True):
    """Let go of requests that can go on in another engine; the answers are Exported, one for each."""

    batch_ids: list[int]
    bytes_max: int
    """Of all images together; what would be more stays."""


class Started(Struct, frozen=True, tag=1, array_like=True):
    pid: int
    versions: dict[str, str]


class Loaded(Struct, frozen=True, tag=2, array_like=True):
    slot: int
    memory_bytes: int
    weights_digest: str
    load_ms: int
    warmup_ms: int
    sequences_max: int = 0
    """Continuous models: how many requests run at once. 0: the model takes batches."""
    trunk: Trunk | None = None
    """Decoders of our own: what decides their keys and values."""
    parts: dict[str, int] = {}
    """{name: bytes} of what models of this engine may hold together, counted in `memory_bytes`. Equal names: the same
    memory.
    """
    image_bytes: int = 0
    """Weights that can leave the device and come back: the model runs after it was activated. 0: they stay."""
    pools: dict[str, int] = {}
    """{name: bytes} of memory for keys and values, which models of this engine share and which stays with it."""
    movable: bool = False
    """Its running requests can go on in another engine of the same model."""


class NotLoaded(Struct, frozen=True, tag=3, array_like=True):
    slot: int
    code: str
    message: str


class Answers(Struct, frozen=True, tag=4, array_like=True):
    batch_id: int
    outputs: list[EngineOutput]
    inference_ms: float


class Raised(Struct, frozen=True, tag=5, array_like=True):
    batch_id: int
    code: str
    message: str
    shared: int = 1
    """Batches that failed by the same exception, each told by a message of its own."""


class Stepped(Struct, frozen=True, tag=6, array_like=True):
    """Sent now and then while continuous models run, and when the last request ends: steps are being made."""

    sequences: list[tuple[int, SequenceCounts]] = []
    """(slot, how the model in it stands)"""


class Delta(Struct, frozen=True, array_like=True):
    batch_id: int
    place: int
    """In the batch."""
    token_ids: list[int]
    text: str


class Deltas(Struct, frozen=True, tag=7, array_like=True):
    """Provisional: what was added to answers under way. All of a request comes before its Answers."""

    deltas: list[Delta]


class Switched(Struct, frozen=True, tag=8, array_like=True):
    """A model is on the device."""

    slot: int
    switch_class: SwitchClass
    """Where its weights came from; resident: they were there."""
    size: int
    """Bytes that were copied."""
    ms: float


class NotSwitched(Struct, frozen=True, tag=9, array_like=True):
    """A model could not be brought to the device."""

    slot: int
    message: str


class ImageMoved(Struct, frozen=True, tag=10, array_like=True):
    """Where the image of a model is now: elsewhere than it was told to, when that was not possible."""

    slot: int
    tier: Below
    message: str = ""


class Exported(Struct, frozen=True, tag=11, array_like=True):
    """The request of this batch is not here any more. `image` None: it is, or it was answered before."""

    batch_id: int
    image: bytes | None


class Adopted(Struct, frozen=True, tag=12, array_like=True):
    """The next token of a request that came with an image is there, or (`refused`) it is computed from its beginning.
    Comes before the first Deltas and the Answers."""

    batch_id: int
    refused: str = ""


ToEngine = Load | Unload | Run | Cancel | Activate | Deactivate | MoveImage | Export
FromEngine = (
    Started
    | Loaded
    | NotLoaded
    | Answers
    | Raised
    | Stepped
    | Deltas
    | Switched
    | NotSwitched
    | ImageMoved
    | Exported
    | Adopted
)

encode_message = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode

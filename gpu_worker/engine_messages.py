"""What crosses the socket between the host and an engine process: msgpack arrays, one message per batch, no pickle.

Fields are only ever added at the end, with a default.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from gpu_worker.backends.base import EngineInput, EngineOutput
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


class Cancel(Struct, frozen=True, tag=4, array_like=True):
    """Nobody waits for this batch any more. One of a continuous model ends early; another is answered as ever."""

    batch_id: int


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


ToEngine = Load | Unload | Run | Cancel
FromEngine = Started | Loaded | NotLoaded | Answers | Raised | Stepped | Deltas

encode_message = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode

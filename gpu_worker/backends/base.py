"""What a backend is: the small interface between the engine process and PyTorch, scikit-learn or ONNX Runtime.

A backend is found by name through the entry point group `sie_stream.backends`, so its library is imported only in
engine processes that serve a model of that kind. It knows nothing of Kafka, of offsets or of other models.

What one input does wrong is an answer (`EngineOutput.error_code`), and its neighbours in the batch are served. What the
engine does wrong is an exception: the engine process reports it and the host decides about retries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Literal, Protocol, runtime_checkable

from msgspec import Struct

from sie_stream.control import ModelLaunch
from sie_stream.errors import ConfigError, SieError, did_you_mean
from sie_stream.ports import Clock
from sie_stream.telemetry import SequenceCounts
from sie_stream.trunks import Trunk

ENTRY_POINT_GROUP = "sie_stream.backends"


class EngineInput(Struct, frozen=True, array_like=True):
    """One request as the engine sees it. Array-like, since it crosses the process boundary for every request."""

    request_id: str
    inputs: bytes
    """JSON of the validated `inputs` object."""
    token_ids: list[int] | None = None
    """Stage 0's tokens for models with a tokenizer, else None."""
    parameters: bytes | None = None
    """JSON of the `parameters` object, if the request had one."""
    seed: int | None = None
    """Seed of sampling; None lets the backend derive one from the request id."""
    deadline_at_ms: int | None = None
    """Wall clock; None: no deadline."""
    priority: int = 1
    """Lane of the request, 0 the most urgent; continuous models follow it."""
    stream: bool = False
    """Tell tokens as they come, if the model is a continuous one."""
    resume: bool = False
    """An engine was killed while it held this request, by nothing that the request did: go on from what that engine
    kept of it outside, if anything."""


class EngineOutput(Struct, frozen=True, array_like=True):
    """The answer to one EngineInput: either outputs (or token ids), or an error code with its message."""

    request_id: str
    outputs: bytes | None = None
    """JSON object by the model's output_schema. None for language models: Stage 2 detokenises `token_ids`."""
    token_ids: list[int] | None = None
    """Generated ids, without the prompt and without the stop token."""
    finish_reason: str | None = None
    """Language models: `stop` (a stop token) or `length` (max_tokens or the context limit)."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_token_ms: float | None = None
    """From the start of `run`, or from `submit`, to this request's first token."""
    error_code: str | None = None
    error_message: str | None = None


class EngineDelta(Struct, frozen=True, array_like=True):
    """What was added to an answer that is under way."""

    token_ids: list[int]
    text: str = ""
    """Whole characters that are final; empty without a tokenizer."""


INVALID_PARAMETERS = "invalid_parameters"
INVALID_FORM = "invalid_response_format"
FORM_ENDED = "grammar_failed"
"""The form of an answer, which the request gave, could not be followed to its end."""
FAULTS_OF_REQUESTS = (INVALID_PARAMETERS, INVALID_FORM, FORM_ENDED)


def ending_of(code: str) -> Literal["rejected", "failed"]:
    """How a request ends that was not answered for this reason: rejected when its parameters are none whatever the
    model is: one who sends such must not be able to roll a new version back. Inputs that an engine refuses are
    `failed`, because there the model may be what is wrong.
    """
    return "rejected" if code in FAULTS_OF_REQUESTS else "failed"


def failed(item: EngineInput, code: str, message: str) -> EngineOutput:
    """The answer for an input that cannot be served."""
    return EngineOutput(request_id=item.request_id, error_code=code, error_message=message)


def not_finite(item: EngineInput, what: str) -> EngineOutput:
    """The answer where the network computed no numbers: a text or a vector made of them would say nothing."""
    message = (
        f"{what} became NaN or infinite: the weights are damaged, or sums are too large for their dtype. Load the "
        "model in float32 or bfloat16, or mend its weights."
    )
    return failed(item, "output_not_finite", message)


class LoadedModel(Protocol):
    """One model in memory."""

    @property
    def memory_bytes(self) -> int:
        """Resident size of the weights, measured at load."""
        ...

    @property
    def weights_digest(self) -> str:
        """Digest of the weights that were loaded, for the provenance of every result."""
        ...

    def run(self, batch: Sequence[EngineInput]) -> list[EngineOutput]:
        """Answers in the order of `batch`, one for each. An exception means that the engine is at fault."""
        ...


@runtime_checkable
class ContinuousModel(LoadedModel, Protocol):
    """A model whose requests come and go while others run. The engine process calls `step` while it is busy.

    Requests are named by tickets of the caller's choice. What a method answers is final: the ticket is forgotten.
    """

    @property
    def sequences_max(self) -> int:
        """How many requests run at once; more may be submitted and wait."""
        ...

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        ...

    def submit(self, ticket: int, item: EngineInput) -> EngineOutput | None:
        """Take a request; an answer at once when it cannot be served."""
        ...

    def step(self) -> list[tuple[int, EngineOutput]]:
        """A little of all that run; what ended with it. An exception means that the engine is at fault: `reset` it."""
        ...

    def deltas(self) -> list[tuple[int, EngineDelta]]:
        """What is to be told of requests that `stream`, between two steps. A request is told of now and then, not
        with every token; the last time after the step that ended it.
        """
        ...

    def cancel(self, ticket: int) -> EngineOutput | None:
        """End a request early; None when it is not there (any more)."""
        ...

    def reset(self) -> list[int]:
        """Forget all requests and what was computed for them; their tickets."""
        ...


@runtime_checkable
class MovableModel(ContinuousModel, Protocol):
    """A continuous model whose requests can go on in another engine of the same model, between any two steps."""

    def release(self, ticket: int) -> bytes | None:
        """All of a request as an image (decoding/image.py), and it is not here any more; None when it is not there."""
        ...

    def adopt(self, ticket: int, image: bytes, item: EngineInput | None = None) -> None:
        """Go on with a request that was released, here or elsewhere. No token of it is computed again. `item`: the
        request that it must be.

        Raises ImageRefused (decoding/image.py); nothing of the request is here then.
        """
        ...

    def image_bytes(self, ticket: int) -> int:
        """How long the image of a request would be now; 0 when it is not there."""
        ...

    def tokens_of(self, ticket: int) -> int:
        """Length of prompt and answer so far; 0 when it is not there."""
        ...


@runtime_checkable
class KeepsBlocks(Protocol):
    """A backend whose models keep full KV blocks, and where their requests stand, outside the process."""

    def keep_in(self, memory: memoryview) -> None:
        """Before the first load. What an earlier process left there is used again."""
        ...


@runtime_checkable
class Counted(Protocol):
    """A continuous model that says how it stands, for telemetry."""

    def counts(self) -> SequenceCounts: ...


@runtime_checkable
class OnTrunk(Protocol):
    """A model that others of its engine may share keys, values and weights with."""

    @property
    def trunk(self) -> Trunk | None:
        """None: with nobody."""
        ...

    @property
    def parts(self) -> dict[str, int]:
        """See engine_messages.Loaded."""
        ...


class Backend(Protocol):
    """Loads models of one kind. One object per engine process."""

    @property
    def name(self) -> str: ...

    def load(self, launch: ModelLaunch) -> LoadedModel:
        """Read the weights from `launch.source`. Raises ModelRefused when they must not or cannot be served."""
        ...

    def unload(self, model: LoadedModel) -> None:
        """Give the memory back; `model` must not be run any more."""
        ...

    def versions(self) -> dict[str, str]:
        """Libraries that results depend on, for provenance: {library: version}."""
        ...


class ModelRefused(SieError):
    """The weights must not be served: wrong digest, untrusted types, or a config the backend cannot follow."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


BackendFactory = Callable[[Clock], Backend]


def backend_names() -> list[str]:
    """Names of the backends installed here, sorted; imports none of them."""
    return sorted({entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)})


def load_backend(name: str, clock: Clock) -> Backend:
    """Import the backend called `name` and make one. Raises ConfigError for a name nobody registered."""
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name == name:
            factory: BackendFactory = entry.load()
            return factory(clock)
    known = backend_names()
    raise ConfigError(
        f"backend.name: {name!r} is not installed. Installed: {', '.join(known) or 'none'}.{did_you_mean(name, known)} "
        f"A package adds one through the entry point group {ENTRY_POINT_GROUP!r}."
    )

"""A request between two steps as data, and back: all that its next tokens depend on, but for keys and values.

The source of chance goes as it stands, and a grammar goes as the tokens it has taken: the same form takes them again
without a step of the network.
"""

from __future__ import annotations

import msgspec
import torch
from msgspec import Struct

from gpu_worker.backends.base import EngineInput, EngineOutput
from gpu_worker.backends.decoder.choice import Chosen
from gpu_worker.backends.decoder.flight import DecoderLimits, Flight, admitted, admitted_to
from gpu_worker.backends.decoder.grammar import GrammarRefused, Grammars
from gpu_worker.backends.decoder.readers import Embedder, Reading
from gpu_worker.decoding.image import ImageRefused
from gpu_worker.decoding.invocation import Invocation
from gpu_worker.decoding.transcript import Detokenise, Place
from sie_stream.trunks import PARTS, Trunk


class Origin(Struct, frozen=True):
    """Which engines can go on with a sequence: those that compute the same from the same.

    head: `lm`, `embedding mean` ... weights: digest of all the files, which the head and the stop tokens are in; of an
    adapter also of those of its base.
    """

    trunk: Trunk
    weights: str
    head: str


class FrozenSequence(Struct, frozen=True):
    """Times are durations up to the freezing."""

    origin: Origin
    item: EngineInput
    answer: list[int]
    tokens_max: int
    computed: int
    """Tokens of prompt and answer whose keys and values are in the pages."""
    reused: int
    generator: bytes
    running_ms: float
    first_token_ms: float | None
    told_tokens: int
    told_characters: int
    reported: list[Chosen]
    place: Place | None
    """Of the transcript."""
    reading: Reading | None


class Intake(Struct, frozen=True):
    """What a loaded decoder needs to take requests."""

    origin: Origin
    limits: DecoderLimits
    detokenise: Detokenise | None
    grammars: Grammars | None
    embedder: Embedder | None
    invocation: Invocation | None = None
    """Of an activated adapter."""

    def begin(self, ticket: int, item: EngineInput, now_ms: float) -> Flight | EngineOutput:
        """A request on its way, or why it cannot be served."""
        if self.embedder is not None:
            flight = admitted_to(self.embedder, ticket, item, self.limits, now_ms)
        else:
            flight = admitted(ticket, item, self.limits, self.detokenise, self.grammars, now_ms)
        if self.invocation is not None and isinstance(flight, Flight):
            flight.tokens.activation = self.invocation.activation(flight.tokens.ids)
        return flight


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(FrozenSequence).decode


def frozen(flight: Flight, origin: Origin, computed: int, now_ms: float) -> bytes:
    """The state of a request between two steps, of which the first `computed` tokens go as pages."""
    return _encode(
        FrozenSequence(
            origin=origin,
            item=flight.item,
            answer=flight.tokens.answer,
            tokens_max=flight.tokens.tokens_max,
            computed=computed,
            reused=flight.tokens.reused,
            generator=flight.generator.get_state().numpy().tobytes(),
            running_ms=now_ms - flight.started_ms,
            first_token_ms=flight.first_token_ms,
            told_tokens=flight.told_tokens,
            told_characters=flight.told_characters,
            reported=flight.reported,
            place=None if flight.transcript is None else flight.transcript.place,
            reading=None if flight.reader is None else flight.reader.reading,
        )
    )


def thawed(content: bytes, intake: Intake, ticket: int, now_ms: float) -> tuple[Flight, int]:
    """The request as it stood, and how many of its tokens are in the pages. Raises ImageRefused."""
    try:
        state = _decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ImageRefused("image_damaged", f"the state of a sequence cannot be read: {error}") from error
    _compare(state.origin, intake.origin)
    flight = intake.begin(ticket, state.item, now_ms - state.running_ms)
    if isinstance(flight, EngineOutput):
        message = f"request {state.item.request_id} cannot be served here: {flight.error_code}: {flight.error_message}"
        raise ImageRefused("image_unfit", message)
    _check_lengths(state, flight, intake.limits)
    if state.place is not None and intake.detokenise is None:
        raise ImageRefused("image_unfit", "its text is told while it grows, for which this engine has no tokenizer.")
    try:
        _resume(flight, state)
    except (RuntimeError, ValueError, GrammarRefused) as error:
        raise ImageRefused("image_damaged", f"the state of a sequence is none: {error}") from error
    return flight, state.computed


def asked_as(flight: Flight, item: EngineInput) -> None:
    """Let `item` be what is asked: its priority and deadline count now. Raises ImageRefused for another request."""
    theirs, ours = (
        (one.request_id, one.inputs, one.token_ids, one.parameters, one.seed, one.stream) for one in (flight.item, item)
    )
    if theirs != ours:
        message = f"the image is of another request than {item.request_id}, or it was asked otherwise there."
        raise ImageRefused("image_foreign", message)
    flight.item = item
    flight.tokens.priority, flight.tokens.deadline_at_ms = item.priority, item.deadline_at_ms


def _resume(flight: Flight, state: FrozenSequence) -> None:
    """Raises RuntimeError for no state of a generator, ValueError and GrammarRefused for what does not fit."""
    if (state.place is None, state.reading is None) != (flight.transcript is None, flight.reader is None):
        raise ValueError("it has a transcript or a reading where this request has none, or the other way round")
    flight.generator.set_state(torch.frombuffer(bytearray(state.generator), dtype=torch.uint8))
    flight.tokens.ids += state.answer
    flight.tokens.tokens_max = state.tokens_max
    flight.tokens.reused = state.reused
    flight.first_token_ms = state.first_token_ms
    flight.told_tokens, flight.told_characters = state.told_tokens, state.told_characters
    flight.reported = list(state.reported)
    if flight.grammar is not None:
        flight.grammar.resume(state.answer)
    if flight.transcript is not None and state.place is not None:
        flight.transcript.resume(state.place)
    if flight.reader is not None and state.reading is not None:
        flight.reader.resume(state.reading)


def _compare(theirs: Origin, ours: Origin) -> None:
    """Raises ImageRefused that names the first difference."""
    named = [(f"trunk {part}", getattr(theirs.trunk, part), getattr(ours.trunk, part)) for part in PARTS]
    named += [("trunk", theirs.trunk.digest, ours.trunk.digest), ("weights", theirs.weights, ours.weights)]
    named += [("head", theirs.head, ours.head)]
    for name, their, our in named:
        if their != our:
            message = f"{name} of the image: {their!r}, of this engine: {our!r}. Only an equal one computes the same."
            raise ImageRefused("image_foreign", message)


def _check_lengths(state: FrozenSequence, flight: Flight, limits: DecoderLimits) -> None:
    prompt, answer = flight.tokens.prompt_tokens, len(state.answer)
    longest = prompt + state.tokens_max
    if longest > limits.context_tokens:
        message = f"prompt and answer may have {longest} tokens, this engine allows {limits.context_tokens}."
        raise ImageRefused("image_unfit", message)
    wrong = ""
    if not 0 <= state.computed < prompt + answer:
        wrong = f"{state.computed} of {prompt + answer} tokens are computed: one at least must be left"
    elif answer and answer >= state.tokens_max:
        wrong = f"its answer has {answer} tokens of at most {state.tokens_max}: it has ended"
    elif not all(0 <= token < limits.vocabulary for token in state.answer):
        wrong = f"a token of its answer lies outside the vocabulary of {limits.vocabulary}"
    elif not 0 <= state.told_tokens <= answer:
        wrong = f"{state.told_tokens} tokens of {answer} are said to have been told"
    if wrong:
        raise ImageRefused("image_damaged", f"the state of a sequence is none: {wrong}.")

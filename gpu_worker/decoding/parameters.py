"""What a request may ask of a decoder: how tokens are chosen, when to stop, what to report."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from sie_stream.errors import did_you_mean

Probability = Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]
Penalty = Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)]
StopText = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
STOP_TEXTS_MAX = 16
STOP_TOKENS_MAX = 64
LOGPROBS_MAX = 20
INT64_MAX = (1 << 63) - 1
"""Whole numbers beyond it are counts of nothing, and other servers, JSON libraries and torch do not take them."""
Count = Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)]
VALUE_CHARS_MAX = 60
PLACE = re.compile(r"`\$\.(\w+)")
"""Where msgspec says the name of a parameter."""
TEMPERATURE_MIN = 1e-6
"""Below it logits divided by the temperature leave the range of numbers."""
Pattern = Annotated[str, msgspec.Meta(min_length=1, max_length=16_384)]


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """The answer is a JSON value by this schema."""

    schema: msgspec.Raw


class RegexFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="regex"):
    """The whole answer matches this pattern (syntax of Rust's regex crate, without look-around)."""

    pattern: Pattern


ResponseFormat = JsonSchemaFormat | RegexFormat


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `parameters` object of a request. Names no engine follows are refused, never ignored."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=INT64_MAX)] | None = None
    """None: the model's default. An answer ends with the context all the same."""
    min_tokens: Count = 0
    """Stop tokens are not chosen before the answer is that long."""
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=2.0)] = 0.0
    """0, or below TEMPERATURE_MIN, always takes the likeliest token."""
    top_k: Count = 0
    """Only this many of the likeliest tokens are drawn from; 0: all."""
    top_p: Probability = 1.0
    """Only the likeliest tokens that together reach this probability are drawn from."""
    min_p: Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)] = 0.0
    """Only tokens with at least this share of the likeliest token's probability are drawn from."""
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0.0, le=10.0)] = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or answer (CTRL, arXiv:1909.05858)."""
    presence_penalty: Penalty = 0.0
    """Taken from the logits of tokens in the answer so far."""
    frequency_penalty: Penalty = 0.0
    """Taken from the logits of tokens in the answer so far, once for each time."""
    stop: StopText | Annotated[tuple[StopText, ...], msgspec.Meta(max_length=STOP_TEXTS_MAX)] = ()
    """A text, or several, that end the answer; it ends before them."""
    stop_token_ids: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=STOP_TOKENS_MAX)] = ()
    """More stop tokens than the model's own."""
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    """Report the log-probability of every chosen token, and as many of the likeliest tokens of each place."""
    score: bool = False
    """Generate nothing; report the log-probability of every token of the prompt given those before it."""
    response_format: ResponseFormat | None = None
    """Only tokens that keep the answer within this form can be chosen; the answer ends when it is complete, so
    min_tokens has no say. An answer that max_tokens cuts off (finish_reason `length`) is incomplete.
    """
    seed: int | None = None
    """Ingress has read it already; the item carries it."""

    @property
    def stop_texts(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


_parameters = msgspec.json.Decoder(Sampling)


def sampling_of(parameters: bytes | None) -> Sampling:
    """Raises msgspec.DecodeError (ValidationError) that names the parameter, or UnicodeDecodeError."""
    if not parameters:
        return Sampling()
    try:
        return _parameters.decode(parameters)
    except msgspec.ValidationError as error:
        _refuse_unknown(parameters)
        raise msgspec.ValidationError(f"{error}{_value_at(error, parameters)}") from error


def _refuse_unknown(parameters: bytes) -> None:
    """Raises msgspec.ValidationError with the names that do not exist, the nearest, and all that do."""
    given = msgspec.json.decode(parameters)
    allowed = Sampling.__struct_fields__
    unknown = [name for name in given if name not in allowed] if isinstance(given, dict) else []
    if unknown:
        named = " ".join(f"{name!r} is no parameter.{did_you_mean(name, allowed)}" for name in unknown)
        raise msgspec.ValidationError(f"{named} Allowed are {', '.join(allowed)}.")


def _value_at(error: msgspec.ValidationError, parameters: bytes) -> str:
    """What was given for the parameter that an error names, shortened; empty when it names none."""
    place = PLACE.search(str(error))
    if place is None:
        return ""
    value = repr(msgspec.json.decode(parameters).get(place[1]))
    return f", given {value if len(value) <= VALUE_CHARS_MAX else value[:VALUE_CHARS_MAX] + '...'}"

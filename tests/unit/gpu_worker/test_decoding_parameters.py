"""What a request may ask of a decoder, and stop texts in a growing answer."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.decoding.parameters import Sampling, sampling_of
from gpu_worker.decoding.stops import look_for_stops
from tests.examples import examples


def test_nothing_asked_is_greedy() -> None:
    assert sampling_of(None) == sampling_of(b"{}") == Sampling()


def test_one_stop_text_or_several() -> None:
    assert sampling_of(b'{"stop":"END"}').stop_texts == ("END",)
    assert sampling_of(b'{"stop":["END","\\n"]}').stop_texts == ("END", "\n")


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        (b'{"temperature":3}', "temperature"),
        (b'{"top_p":0}', "top_p"),
        (b'{"min_p":1}', "min_p"),
        (b'{"repetition_penalty":0}', "repetition_penalty"),
        (b'{"presence_penalty":-3}', "presence_penalty"),
        (b'{"logprobs":99}', "logprobs"),
        (b'{"stop":[""]}', "stop"),
        (b'{"best_of":2}', "best_of"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(parameters: bytes, named: str) -> None:
    with pytest.raises(msgspec.DecodeError, match=named):
        sampling_of(parameters)


@pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "top_k"])
@pytest.mark.parametrize("value", ["1" + "0" * 40, str(2**63), str(-(2**63)), "-1", "1.5", '"5"', "NaN", "1e400"])
def test_counts_are_whole_numbers_of_64_bits(name: str, value: str) -> None:
    with pytest.raises(msgspec.DecodeError):
        sampling_of(f'{{"{name}":{value}}}'.encode())
    assert getattr(sampling_of(f'{{"{name}":{2**63 - 1}}}'.encode()), name) == 2**63 - 1


@pytest.mark.parametrize(
    ("value", "shown"),
    [("0", "given 0"), ('"5"', "given '5'"), ("1" + "0" * 70, f"<= {2**63 - 1} - at `$.max_tokens`, given 1000")],
)
def test_a_refusal_names_parameter_value_and_what_is_allowed(value: str, shown: str) -> None:
    with pytest.raises(msgspec.ValidationError) as raised:
        sampling_of(f'{{"max_tokens":{value}}}'.encode())
    assert "max_tokens" in str(raised.value)
    assert shown in str(raised.value)
    assert len(str(raised.value)) < 160


@pytest.mark.parametrize("digits", [4_000, 4_400, 100_000])
def test_a_number_of_any_length_is_refused(digits: int) -> None:
    with pytest.raises(msgspec.ValidationError):
        sampling_of(b'{"max_tokens":1' + b"0" * digits + b"}")


def test_unknown_names_are_told_with_the_nearest_and_all_that_are_allowed() -> None:
    with pytest.raises(msgspec.ValidationError) as raised:
        sampling_of(b'{"temprature":0.2,"xyzzy":1,"top_p":0.5}')
    said = str(raised.value)
    assert "'temprature' is no parameter. Did you mean 'temperature'?" in said
    assert "'xyzzy' is no parameter. Allowed are max_tokens, min_tokens, temperature," in said


texts = st.text("ab\N{REPLACEMENT CHARACTER}", max_size=12)


@given(texts, st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
@examples(150)
def test_however_an_answer_grows_it_ends_at_the_first_stop_text_and_nothing_shown_is_taken_back(
    whole: str, stops: list[str]
) -> None:
    """Letter by letter. A stop text counts as soon as it is complete; nothing of it was shown before."""
    shown, text = 0, ""
    for letter in whole:
        text += letter
        look = look_for_stops(text, stops, shown)
        assert look.shown >= shown
        assert all(stop not in text[: look.shown] for stop in stops)
        if look.stopped:
            assert any(text.startswith(stop, look.shown) for stop in stops)
            return
        assert not any(stop in text for stop in stops)
        held = text[look.shown :].rstrip("\N{REPLACEMENT CHARACTER}")
        assert not held or any(stop.startswith(held) for stop in stops)
        shown = look.shown


def test_half_a_character_is_held_back() -> None:
    assert look_for_stops("caf\N{REPLACEMENT CHARACTER}", ()) == (3, False)
    assert look_for_stops("caf\N{LATIN SMALL LETTER E WITH ACUTE}", ()) == (4, False)

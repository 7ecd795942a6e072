"""The text of growing answers: whole characters, no part of a stop text, and all of it in the end."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.decoding import transcript
from gpu_worker.decoding.transcript import Transcript
from tests.examples import examples


def utf8(tokens: Sequence[int]) -> str:
    """One token per byte, as a byte-level tokenizer decodes."""
    return bytes(tokens).decode("utf-8", "replace")


def blank_first(tokens: Sequence[int]) -> str:
    """A tokenizer that strips the first blank of what it decodes: nothing of it can be decoded piece by piece."""
    return utf8(tokens).removeprefix(" ")


def pieces(text: str, stops: Sequence[str] = (), decode: transcript.Detokenise = utf8) -> tuple[list[str], Transcript]:
    tokens = list(text.encode())
    made = Transcript(decode, stops)
    found: list[str] = []
    for end in range(1, len(tokens) + 1):
        found.append(made.read(tokens[:end]))
        if made.stopped:
            break
    found.append(made.finish(tokens))
    return found, made


TEXTS = st.text(st.sampled_from("ab é你\N{GRINNING FACE}\n"), max_size=300)


@examples(60)
@given(TEXTS, st.sampled_from([utf8, blank_first]))
def test_pieces_are_whole_characters_and_together_the_text(text: str, decode: transcript.Detokenise) -> None:
    found, _ = pieces(text, decode=decode)
    assert "".join(found) == decode(list(text.encode()))
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in found)


@examples(60)
@given(TEXTS, st.lists(st.text("ab é", min_size=1, max_size=4), min_size=1, max_size=3))
def test_nothing_of_a_stop_text_is_shown(text: str, stops: list[str]) -> None:
    found, made = pieces(text, stops)
    shown = "".join(found)
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)
    assert made.stopped == any(stop in text for stop in stops)
    if not made.stopped:
        assert shown == text


def test_what_may_become_a_stop_text_is_held_back_until_it_does_not() -> None:
    found, made = pieces("one EN two END three", ["END"])
    assert "".join(found[:6]) == "one "
    assert "".join(found) == "one EN two "
    assert made.stopped


def test_long_answers_are_not_decoded_again_and_again() -> None:
    longest = 0

    def counting(tokens: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return utf8(tokens)

    text = "grüße " * 300
    found, _ = pieces(text, ["END"], counting)
    assert "".join(found) == text
    assert longest <= 2 * transcript.WINDOW + 3

"""From deltas and the result to one stream: whatever is lost, late or begun again, the text comes out right."""

from __future__ import annotations

from concurrent.futures import Future
from queue import SimpleQueue

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sie_stream.client.requests import InferenceResult, RequestFailed, ResultTimeout
from sie_stream.client.streaming import AnswerSoFar, TextDelta, unroll
from sie_stream.errors import FatalLogError
from sie_stream.records import Provenance, ResultError, Timings, TokenDelta, Usage
from tests.examples import examples

RESULT = InferenceResult(
    request_id="r",
    status="ok",
    model="m",
    version="1",
    variant="stable",
    instance="mi-1",
    outputs={"text": "one two three", "finish_reason": "stop"},
    error=None,
    usage=Usage(),
    timings_ms=Timings(),
    provenance=Provenance("t", 0, 0),
    finished_at=0,
)


def delta(index: int, text: str, attempt: int = 0, incarnation: str = "i1") -> TokenDelta:
    return TokenDelta("r", index, (index,), text, True, "w", incarnation, attempt)


def shown(deltas: list[TokenDelta], result: InferenceResult = RESULT) -> str:
    """What a reader has on the screen in the end."""
    answer, text = AnswerSoFar(), ""
    for found in [*map(answer.take, deltas), answer.finish(result)]:
        if found is not None:
            text = found.text if found.restarted else text + found.text
    return text


def test_deltas_and_the_rest_that_only_the_result_has() -> None:
    answer = AnswerSoFar()
    assert answer.take(delta(0, "one ")) == TextDelta("r", "one ", (0,))
    assert answer.take(delta(1, "two")) == TextDelta("r", "two", (1,))
    assert answer.finish(RESULT) == TextDelta("r", " three")


def test_a_new_attempt_supersedes_what_came_before_and_late_deltas_of_the_old_one_do_not_count() -> None:
    answer = AnswerSoFar()
    answer.take(delta(0, "one ", incarnation="old"))
    assert answer.take(delta(0, "one", incarnation="new")) == TextDelta("r", "one", (0,), restarted=True)
    assert answer.take(delta(1, "two", incarnation="old")) is None
    assert answer.take(delta(0, "on", attempt=1, incarnation="new")) == TextDelta("r", "on", (0,), restarted=True)


def test_after_a_gap_only_the_result_tells_how_it_goes_on() -> None:
    answer = AnswerSoFar()
    answer.take(delta(0, "one "))
    assert answer.take(delta(2, "ree")) is None
    assert answer.take(delta(3, "!")) is None
    assert answer.finish(RESULT) == TextDelta("r", "two three")


DELTAS = st.builds(delta, st.integers(0, 3), st.text("onetw ", max_size=4), st.integers(0, 1), st.sampled_from("ab"))


@examples(80)
@given(st.lists(DELTAS, max_size=12))
def test_whatever_the_deltas_say_the_screen_ends_with_the_result(deltas: list[TokenDelta]) -> None:
    assert shown(deltas) == "one two three"


def test_an_answer_without_text_has_no_rest() -> None:
    assert AnswerSoFar().finish(msgspec.structs.replace(RESULT, outputs={"label": 1})) is None


def test_a_stream_ends_with_its_result_or_says_why_there_is_none() -> None:
    done: Future[InferenceResult] = Future()
    done.set_result(RESULT)
    inbox: SimpleQueue[object] = SimpleQueue()
    for one in (delta(0, "one "), done):
        inbox.put(one)
    assert list(unroll("r", inbox, 1.0)) == [  # type: ignore[arg-type]
        TextDelta("r", "one ", (0,)),
        TextDelta("r", "two three"),
        RESULT,
    ]
    failed: Future[InferenceResult] = Future()
    failed.set_result(msgspec.structs.replace(RESULT, status="failed", error=ResultError("poison", "it died")))
    inbox.put(failed)
    with pytest.raises(RequestFailed, match="poison"):
        list(unroll("r", inbox, 1.0))  # type: ignore[arg-type]
    inbox.put(FatalLogError("the log is gone"))
    with pytest.raises(FatalLogError):
        list(unroll("r", inbox, 1.0))  # type: ignore[arg-type]
    with pytest.raises(ResultTimeout):
        list(unroll("r", inbox, 0.0))  # type: ignore[arg-type]

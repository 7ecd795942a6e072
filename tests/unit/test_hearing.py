"""A reader that hears nothing asks whether there is something, and is deaf only when there is."""

from __future__ import annotations

import threading

import pytest

from sie_stream.edge import kafka_hearing
from sie_stream.edge.kafka_hearing import ASK_AFTER_S, ASK_AGAIN_S, STUCK_S, UNANSWERED_S, Hearing
from sie_stream.errors import Retriable
from tests.waiting import wait_until


class Watch:
    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    made = Watch()
    monkeypatch.setattr(kafka_hearing, "time", made)
    return made


def answered(hearing: Hearing, watch: Watch, after_s: float) -> bool:
    """The verdict of the look that is due then."""
    watch.now += after_s
    first = hearing.deaf()
    if first or hearing._question is None:
        return first
    question = hearing._question
    wait_until(lambda: question.ended, "the answer", 30)
    watch.now += kafka_hearing.LOOK_EVERY_S
    return hearing.deaf()


def away() -> bool:
    raise Retriable("no broker")


def test_silence_is_no_deafness_while_there_is_nothing_to_hear(watch: Watch) -> None:
    hearing = Hearing(lambda: False)
    assert not any(answered(hearing, watch, ASK_AFTER_S) for _ in range(20))


def test_it_does_not_ask_before_it_was_silent_for_a_while(watch: Watch) -> None:
    asked: list[bool] = []

    def unread() -> bool:
        asked.append(True)
        return True

    hearing = Hearing(unread)
    for _ in range(20):
        watch.now += ASK_AFTER_S / 2
        assert not hearing.deaf()
        hearing.heard()
    assert not asked


def test_what_is_there_at_two_looks_and_never_comes_makes_it_deaf(watch: Watch) -> None:
    hearing = Hearing(lambda: True)
    assert not answered(hearing, watch, ASK_AFTER_S)
    assert answered(hearing, watch, ASK_AGAIN_S)


def test_what_comes_between_two_looks_begins_anew(watch: Watch) -> None:
    hearing = Hearing(lambda: True)
    assert not answered(hearing, watch, ASK_AFTER_S)
    hearing.heard()
    assert not answered(hearing, watch, ASK_AFTER_S)


def test_a_broker_that_is_away_is_waited_for_and_then_looked_for_by_a_new_client(watch: Watch) -> None:
    hearing = Hearing(away)
    began = watch.now
    while not answered(hearing, watch, ASK_AGAIN_S):
        assert watch.now - began <= UNANSWERED_S + 2 * ASK_AGAIN_S
    assert watch.now - began > UNANSWERED_S


def test_a_question_that_never_returns_makes_it_deaf(watch: Watch) -> None:
    never = threading.Event()
    hearing = Hearing(never.wait)
    watch.now += ASK_AFTER_S
    assert not hearing.deaf()
    watch.now += STUCK_S + 1
    assert hearing.deaf()
    never.set()

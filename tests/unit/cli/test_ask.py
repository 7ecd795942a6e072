"""Whoever asks the scheduler gets the answer to what he asked, also while others ask about the same model."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from schemas.codec import encode_decision
from sie_stream.cli.ask import NotReady, ask, of_kind
from sie_stream.commands import RolloutOrder
from sie_stream.decisions import Decision
from sie_stream.edge.connection import Connection
from sie_stream.ids import TopicPartition
from sie_stream.records import LogRecord, LogWrite
from sie_stream.settings import Settings


class Cluster:
    """Puts commands at offset 101 and so on, and answers with decisions that are there already."""

    def __init__(self, *answers: Decision) -> None:
        self.settings = Settings()
        self.left = list(answers)
        self.asked = 100

    def reader(self) -> Any:
        return SimpleNamespace(
            partitions_of=lambda _topic: 1, end_offsets=lambda places: places, assign=lambda _places: None,
            poll=self._poll, close=lambda: None,
        )  # fmt: skip

    def plain_writer(self) -> Any:
        return SimpleNamespace(delivered=self._delivered, close=lambda: None)

    def _delivered(self, writes: Sequence[LogWrite], _wait_ms: int) -> list[int]:
        offsets = [self.asked + number for number, _ in enumerate(writes, start=1)]
        self.asked = offsets[-1]
        return offsets

    def _poll(self, _max: int, _wait_ms: int) -> list[LogRecord]:
        place = TopicPartition(self.settings.topics.decisions, 0)
        found = [LogRecord(*place, n, 0, b"", encode_decision(one)) for n, one in enumerate(self.left)]
        self.left = []
        return found


def decided(offset: int, reason: str, subject: str = "churn") -> Decision:
    return Decision(f"d-{offset}-0", "rollout_paused", subject, reason, cause_offset=offset, at_ms=0, chosen={})


def asked(cluster: Cluster, subjects: Sequence[str], timeout_s: float = 5.0) -> list[str]:
    commands = [RolloutOrder(subject, "pause") for subject in subjects]
    connection = cast("Connection", cluster)
    return [one.reason for one in ask(connection, commands, subjects, of_kind({"rollout_paused"}), timeout_s)]


def test_the_answer_to_what_somebody_asked_just_before_is_his() -> None:
    assert asked(Cluster(decided(100, "to him"), decided(101, "to me")), ["churn"]) == ["to me"]


def test_an_answer_to_others_is_none() -> None:
    with pytest.raises(NotReady, match="did not answer"):
        asked(Cluster(decided(100, "to him")), ["churn"], 0.0)


def test_what_follows_later_is_an_answer_too() -> None:
    """A worker is drained long after somebody asked for it."""
    assert asked(Cluster(decided(150, "done")), ["churn"]) == ["done"]


def test_each_of_several_commands_gets_its_own() -> None:
    answers = (decided(100, "his", "b"), decided(101, "a"), decided(102, "b", "b"), decided(103, "again"))
    assert asked(Cluster(*answers), ["churn", "b", "churn"]) == ["a", "b", "again"]

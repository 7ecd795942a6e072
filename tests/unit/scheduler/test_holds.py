"""Legal holds: who, why and when are on the log, and the fold remembers them."""

from __future__ import annotations

import pytest

from scheduler import holds
from scheduler.state import from_bytes, to_bytes
from sie_stream.control import HoldTopic, ReleaseTopic
from tests.unit.scheduler.kit import Cluster, decisions, kinds


def held() -> Cluster:
    cluster = Cluster()
    cluster.lead()
    cluster.append(HoldTopic("sie.results", "case 17", "ann"))
    return cluster


def test_a_hold_says_who_and_why_and_its_release_how_long() -> None:
    cluster = held()
    (decision,) = decisions(cluster.commands, "topic_held")
    assert (decision.subject, decision.asked_by) == ("sie.results", "ann")
    assert "case 17" in decision.reason
    loaded = from_bytes(to_bytes(cluster.machine.state))
    assert loaded is not None
    assert loaded.holds["sie.results"].since_ms == decision.at_ms
    cluster.now_ms += 5_000
    (released,) = decisions(cluster.append(ReleaseTopic("sie.results", "bob")))
    assert (released.kind, released.asked_by, released.took_ms) == ("topic_released", "bob", 5_000)
    assert (released.chosen["held_by"], released.facts[1].kind) == ("ann", "HoldTopic")
    assert cluster.machine.state.holds == {}


def test_holding_again_keeps_the_first_reason() -> None:
    cluster = held()
    (again,) = decisions(cluster.append(HoldTopic("sie.results", "other", "bob")))
    assert again.kind == "topic_held"
    assert "case 17" in again.reason
    assert cluster.machine.state.holds["sie.results"].actor == "ann"


@pytest.mark.parametrize(
    "record",
    [
        HoldTopic("", "why"),
        HoldTopic("a b", "why"),
        HoldTopic("x" * 250, "why"),
        HoldTopic("sie.results", "  "),
        ReleaseTopic("sie.requests"),
        ReleaseTopic("y" * 1_000_000),
    ],
)
def test_what_makes_no_sense_is_refused(record: HoldTopic | ReleaseTopic) -> None:
    cluster = held()
    assert kinds(cluster.append(record)) == ["hold_refused"]
    assert list(cluster.machine.state.holds) == ["sie.results"]


def test_holds_are_bounded_in_number_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds, "HOLDS_MAX", 3)
    cluster = held()
    found = [kinds(cluster.append(HoldTopic(f"t{n}", "x" * 1_000_000, "y" * 1_000_000)))[0] for n in range(3)]
    assert found == ["topic_held", "topic_held", "hold_refused"]
    assert len(to_bytes(cluster.machine.state)) < 10_000


def test_the_release_of_a_misspelt_topic_names_the_right_one() -> None:
    (refused,) = decisions(held().append(ReleaseTopic("sie.resluts", "bob")))
    assert "Did you mean 'sie.results'?" in refused.reason

"""More than two variants, shadows, and from when on a route holds everywhere, through the whole fold."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from msgspec import Raw

from sie_stream.commands import RolloutOrder, StartRollout
from sie_stream.control import EnsureTopic, TopicEnsured
from sie_stream.rollout_records import RoutesHeld
from sie_stream.routing import SHARES
from sie_stream.settings import Settings
from tests.unit.scheduler.kit import decisions, kinds, spec_json
from tests.unit.scheduler.rolling import ALIVE, QUICK, UNIT, Rolling, answered


def test_a_shadow_is_judged_by_its_copies_before_it_answers_anybody() -> None:
    cluster = Rolling()
    cluster.roll(rollout={**QUICK, "shadow": True, "pins": [{"by": "tenant", "equals": "beta"}]})
    assert cluster.shares() == {"stable": SHARES}
    cluster.make_ready(UNIT)
    stable, shadow = cluster.route.variants
    assert (stable.weight, shadow.variant, shadow.weight, shadow.shadow) == (SHARES, "canary", 0, SHARES)
    assert cluster.route.rules == (), "a rule would make it answer"
    assert cluster.rollout_decisions() == ["rollout_started", "rollout_shadowing"]
    cluster.windows()
    assert cluster.shares()["canary"] == 1_000
    assert cluster.route.variants[1].shadow == 0, "what answers gets no copies"
    assert [rule.variant for rule in cluster.route.rules] == ["canary"]
    assert cluster.model().rollouts["canary"].new.samples == 0, "copies are not samples of the first step"


def test_a_shadow_that_differs_never_answers() -> None:
    cluster = Rolling()
    cluster.roll(rollout={**QUICK, "shadow": True})
    cluster.make_ready(UNIT)
    assert "rollout_rolled_back" in cluster.windows(new=answered(200, score=0.9))
    assert cluster.shares() == {"stable": SHARES}
    assert len(cluster.route.variants) == 1
    assert "ks:score" in cluster.model().rollout_history[-1].why


@pytest.mark.parametrize(
    ("setting", "domain"), [("onnx, sklearn", "trial"), ("onnx", ""), ("", "")], ids=["named", "another", "none"]
)
def test_a_version_on_trial_gets_an_engine_apart_where_its_backend_permits_it(setting: str, domain: str) -> None:
    cluster = Rolling(Settings(trial_engines=setting))
    cluster.roll()
    cluster.make_ready(UNIT)
    assert cluster.machine.state.models[UNIT].launch.domain == domain
    (stable,) = cluster.placement().replicas
    assert stable.launch.domain == "", "what serves stays where it is"
    while cluster.model().version == "1.0.0":
        cluster.windows()
    cluster.make_ready()
    assert {one.launch.domain for one in cluster.placement().replicas} == {""}, "and so does what takes over"


def test_more_than_two_variants_with_fixed_shares() -> None:
    cluster = Rolling()
    for version, variant, share in (("1.1.0", "b", 3_000), ("1.2.0", "c", 1_000)):
        for command in cluster.append(StartRollout(Raw(spec_json(version=version)), variant, share, "test")):
            if isinstance(command, EnsureTopic):
                cluster.append(TopicEnsured(command.model, command.topic, command.partitions))
        cluster.make_ready(f"churn.{variant.upper()}")
    assert cluster.shares() == {"stable": 6_000, "b": 3_000, "c": 1_000}
    cluster.windows(10)
    assert cluster.shares() == {"stable": 6_000, "b": 3_000, "c": 1_000}, "they are compared, not promoted"
    cluster.append(StartRollout(Raw(spec_json(version="2.0.0")), "canary", 0, "test"))
    assert kinds(cluster.commands)[-1] == "model_rejected", "one that takes over by steps goes alone"
    cluster.append(RolloutOrder("churn", "promote", "b"))
    assert kinds(cluster.commands)[-1] == "rollout_ignored"
    assert decisions(cluster.commands)[-1].reason.endswith("abort c first.")
    owned = sorted(one for variant in cluster.route.variants for one in variant.ranges)
    assert owned[0][0] == 0
    assert owned[-1][1] == SHARES
    assert all(one[1] == other[0] for one, other in itertools.pairwise(owned))


def test_a_declaration_that_is_refused_is_answered_under_its_name() -> None:
    cluster = Rolling()
    spec = msgspec.json.decode(spec_json(version="2.0.0")) | {"replicas": {"min": 9, "max": 1}}
    [answer] = decisions(cluster.append(StartRollout(Raw(msgspec.json.encode(spec)), "canary", 0, "ada")))
    assert (answer.kind, answer.subject) == ("model_rejected", "churn"), "whoever asked waits for this name"
    assert answer.do_nothing


def test_the_moment_from_which_the_route_holds_is_said() -> None:
    cluster = Rolling()
    cluster.append(RoutesHeld("ingress-1", {"churn": cluster.route.route_epoch}))
    cluster.roll()
    cluster.make_ready(UNIT)
    epoch = cluster.route.route_epoch
    cluster.append(RoutesHeld("ingress-0", {"churn": epoch}))
    assert "route_held" not in kinds(cluster.commands)
    cluster.wait(500, ALIVE)
    cluster.append(RoutesHeld("ingress-1", {"churn": epoch}))
    held = decisions(cluster.commands)[-1]
    assert (held.kind, held.chosen) == ("route_held", {"route_epoch": epoch, "took_ms": 500})


def test_a_silent_ingress_is_named_and_then_forgotten() -> None:
    cluster = Rolling()
    cluster.append(RoutesHeld("ingress-1"))
    cluster.roll()
    cluster.make_ready(UNIT)
    for _ in range(8):
        cluster.append(RoutesHeld("ingress-0", {"churn": cluster.route.route_epoch}))
        cluster.wait(2_000, ALIVE)
    said = [one for one in decisions(cluster.commands) if one.kind.startswith("route_")]
    assert [one.kind for one in said][-2:] == ["route_not_held", "route_held"]
    assert said[-2].chosen["missing"] == "ingress-1"


def test_whoever_compares_a_version_is_not_told_that_it_takes_over() -> None:
    cluster = Rolling()
    command = StartRollout(Raw(spec_json(version="2.0.0")), "b", 2_000, "ada")
    [started] = [one for one in decisions(cluster.append(command)) if one.kind == "rollout_started"]
    assert "takes 20 % of the keys until somebody ends it" in started.reason
    assert "answers passed the gates" not in started.reason
    shadowed = StartRollout(Raw(spec_json(version="3.0.0", rollout={"shadow": True})), "c", 1_000, "ada")
    [started] = [one for one in decisions(cluster.append(shadowed)) if one.kind == "rollout_started"]
    assert "First it gets copies of all requests" in started.reason

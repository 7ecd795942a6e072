"""Ingress with more than one variant: topics of their own, content rules, shadows, and which route it holds."""

from __future__ import annotations

import pytest

from processors.ingress.held import BEAT_MS, RoutesReporter
from schemas.codec import decode_cluster
from sie_stream.control import VariantRow
from sie_stream.ports import TopicSpec
from sie_stream.rollout_records import PINNED, RoutesHeld, VariantRule
from sie_stream.routing import choose_variant
from sie_stream.sim.log import SimLog
from tests.unit.processors.kit import NAMES, body, machine, record, route, take_up

CANARY_TOPIC = NAMES.work("wine.CANARY")
SPLIT = (
    VariantRow("stable", "1.0.0", 8_000, ((0, 8_000),)),
    VariantRow("canary", "2.0.0", 2_000, ((8_000, 10_000),), CANARY_TOPIC, 4),
)
SHADOWED = (
    VariantRow("stable", "1.0.0", 10_000, ((0, 10_000),)),
    VariantRow("canary", "2.0.0", 0, (), CANARY_TOPIC, 2, 10_000),
)


def test_every_variant_has_its_topic() -> None:
    ingress = machine(route(variants=SPLIT))
    seen: dict[str, int] = {}
    for number in range(300):
        key = b"key%d" % number
        written = take_up(ingress, record(body(), number, key))
        [work], [write] = written.work, written.work_writes
        assert work.variant == choose_variant(SPLIT, key, b"mi-wine").variant
        assert write.topic == (CANARY_TOPIC if work.variant == "canary" else NAMES.work("wine"))
        assert work.version == ("2.0.0" if work.variant == "canary" else "1.0.0")
        assert work.model == "wine"
        seen[write.topic] = seen.get(write.topic, 0) + 1
    assert 30 < seen[CANARY_TOPIC] < 95


@pytest.mark.parametrize(
    ("rule", "fits", "misses"),
    [
        (VariantRule("tenant", "", "beta", "canary"), {"tenant": "beta"}, {"tenant": "other"}),
        (VariantRule("field", "name", "eu", "canary"), {"inputs": {"x": 1, "name": "eu"}}, {"inputs": {"x": 1}}),
        (VariantRule("field", "x", "3", "canary"), {"inputs": {"x": 3}}, {"inputs": {"x": 4}}),
    ],
)
def test_content_pins(rule: VariantRule, fits: dict[str, object], misses: dict[str, object]) -> None:
    stable_key = next(k for n in range(99) if choose_variant(SPLIT, k := b"s%d" % n, b"mi-wine").variant == "stable")
    ingress = machine(route(variants=SPLIT, rules=(rule,)))
    assert take_up(ingress, record(body(**fits), 1, stable_key)).work[0].variant == "canary"
    assert take_up(ingress, record(body(**misses), 2, stable_key)).work[0].variant == "stable"


def test_inputs_of_any_depth_are_answered_where_a_rule_looks_into_them() -> None:
    """One decoder stands deeper in the stack than another: what the first reads, the second may not."""
    ingress = machine(route(variants=SPLIT, rules=(VariantRule("field", "x", "3", "canary"),)))
    for offset, depth in enumerate(range(900, 1_010)):
        nested = "[" * depth + "]" * depth
        value = f'{{"model": "wine", "request_id": "r{depth}", "inputs": {{"x": {nested}}}}}'.encode()
        turn = take_up(ingress, record(value, offset, b"k"))
        assert [result.status for result in turn.results] == ["rejected"], depth


def test_header_pins_to_stable_and_a_named_version_is_stronger() -> None:
    rule = VariantRule("header", "x-safe", "1", "stable")
    canary_key = next(k for n in range(99) if choose_variant(SPLIT, k := b"c%d" % n, b"mi-wine").variant == "canary")
    ingress = machine(route(variants=SPLIT, rules=(rule,)))
    headers = (("x-safe", b"1"),)
    assert take_up(ingress, record(body(), 1, canary_key)).work[0].variant == "canary"
    assert take_up(ingress, record(body(), 2, canary_key, headers)).work[0].variant == "stable"
    named = take_up(ingress, record(body(model="wine@2.0.0"), 3, canary_key, headers))
    assert named.work[0].version == "2.0.0"


def test_whoever_chose_a_variant_is_marked_and_no_key_that_did() -> None:
    """Whatever content chose is no sample of all traffic: nobody may measure a version's scores by it."""
    stable_key = next(k for n in range(99) if choose_variant(SPLIT, k := b"s%d" % n, b"mi-wine").variant == "stable")
    rules = (VariantRule("tenant", "", "beta", "canary"), VariantRule("tenant", "", "old", "stable"))
    ingress = machine(route(variants=SPLIT, rules=rules))
    seen = {
        name: take_up(ingress, record(body(**changes), number, stable_key)).work_writes[0].headers
        for number, (name, changes) in enumerate(
            {"key": {}, "beta": {"tenant": "beta"}, "old": {"tenant": "old"}, "named": {"model": "wine@2.0.0"}}.items()
        )
    }
    assert seen == {"key": (), "beta": PINNED, "old": PINNED, "named": PINNED}
    alone = machine(route())
    assert take_up(alone, record(body(model="wine@1.0.0"), 9)).work_writes[0].headers == (), (
        "there is nothing to compare"
    )


def test_the_copy_of_a_pinned_request_is_marked_too() -> None:
    ingress = machine(route(variants=SHADOWED, rules=(VariantRule("tenant", "", "old", "stable"),)))
    assert [write.headers for write in take_up(ingress, record(body(), 1)).work_writes] == [(), ()]
    marked = take_up(ingress, record(body(tenant="old"), 2)).work_writes
    assert [write.headers for write in marked] == [PINNED, PINNED]


def test_a_shadow_gets_a_copy_that_answers_nobody() -> None:
    ingress = machine(route(variants=SHADOWED, output_topic="scores"), topics=["scores", "replies"])
    written = take_up(ingress, record(body(reply_topic="replies", request_id="r1"), 1, b"k"))
    work, copy = sorted(written.work, key=lambda one: one.variant)
    assert (work.variant, work.output_topic, work.reply_topic) == ("stable", "scores", "replies")
    assert (copy.variant, copy.version, copy.output_topic, copy.reply_topic) == ("~canary", "2.0.0", None, None)
    assert copy.request_id == "r1"
    assert {write.topic for write in written.work_writes} == {NAMES.work("wine"), CANARY_TOPIC}


def test_routes_are_reported_when_they_change_and_ingress_says_that_it_lives() -> None:
    log = SimLog()
    log.admin().ensure([TopicSpec(NAMES.cluster, 1, {})])
    reporter = RoutesReporter("ingress-0", NAMES.cluster, log.plain_writer(), log.clock)
    reporter.routes_changed((("wine", route(route_epoch=9)), ("gone", None)))
    reporter.beat()
    log.clock.advance(BEAT_MS)
    reporter.beat()
    reporter.leave()
    told = [decode_cluster(one.value) for one in log.visible(NAMES.cluster)]
    assert told == [
        RoutesHeld("ingress-0", {"wine": 9, "gone": 0}),
        RoutesHeld("ingress-0"),
        RoutesHeld("ingress-0", left=True),
    ]

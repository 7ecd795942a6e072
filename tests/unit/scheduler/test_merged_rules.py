"""Where two mechanisms meet: rollouts with narrow topics and shares, caps that outlive their reason, and their like."""

from __future__ import annotations

from msgspec import Raw

from scheduler.gates import added, is_sane
from scheduler.yielding import Pool, Tenant, YieldState, relieve
from sie_stream.control import EnsureTopic, ReplicaFailed, StartRollout, TopicEnsured
from sie_stream.rollout_records import RoutesHeld, VariantStats
from tests.unit.scheduler.kit import kinds, spec_json
from tests.unit.scheduler.rolling import ALIVE, UNIT, Rolling


def started(cluster: Rolling, version: str, variant: str, share: int, **fields: object) -> list[str]:
    """Starts a variant with a fixed share; its replicas still load. Returns the kinds of decisions."""
    spec = spec_json(version=version, **fields)  # type: ignore[arg-type]  # fields of a declaration
    commands = cluster.append(StartRollout(Raw(spec), variant, share, "test"))
    for command in list(commands):
        if isinstance(command, EnsureTopic):
            commands += cluster.append(TopicEnsured(command.model, command.topic, command.partitions))
    return kinds(commands)


def test_shares_of_variants_that_still_load_are_counted() -> None:
    cluster = Rolling()
    assert "rollout_refused" not in started(cluster, "1.1.0", "b", 6_000)
    assert "model_rejected" in started(cluster, "1.2.0", "c", 6_000)
    assert "model_rejected" not in started(cluster, "1.3.0", "d", 4_000)


def test_a_version_with_a_narrow_topic_is_rescued_by_one_with_a_wide_topic() -> None:
    cluster = Rolling()
    cluster.apply(spec_json(replicas={"min": 1, "max": 4}))
    cluster.make_ready()
    cluster.roll(replicas={"min": 1, "max": 1})
    cluster.make_ready(UNIT)
    assert cluster.shares()["canary"] > 0
    width = len(cluster.model(UNIT).partitions)
    for _ in range(5):
        for replica in list(cluster.model(UNIT).replicas):
            cluster.append(
                ReplicaFailed(replica.worker, "i0", UNIT, "2.0.0", replica.placement_epoch, "engine_died", "SIGSEGV")
            )
        cluster.wait(10_000, ALIVE)
    unit = cluster.model(UNIT)
    assert unit.version == cluster.model().version, "the stable version works its backlog off"
    assert len(unit.partitions) == width
    assert unit.topic_ready
    assert unit.replicas, "and has a place"


def test_a_cap_ends_when_the_model_is_no_batch_job_any_more() -> None:
    pool = Pool("p", 100, 75, 1)
    held = YieldState(caps={"m": 1})
    batch = Tenant("m", ("batch-job",), "p", 1, 0, 10, wanted=3)
    kept, _ = relieve(held, 1_000, [pool], [batch])
    assert kept.caps == {"m": 1}
    urgent = Tenant("m", ("high-sla",), "p", 1, 0, 10, wanted=3)
    ended, _ = relieve(held, 1_000, [pool], [urgent])
    assert ended.caps == {}


def test_who_reports_routes_of_models_that_nobody_declared_grows_nothing() -> None:
    cluster = Rolling()
    cluster.append(RoutesHeld("ingress-0", {f"invented-{number}": 5 for number in range(1_000)}))
    assert cluster.machine.state.ingresses["ingress-0"].epochs == {}
    cluster.append(RoutesHeld("x" * 10_000))
    assert list(cluster.machine.state.ingresses) == ["ingress-0"]


def test_windows_of_ever_other_values_do_not_pile_up() -> None:
    def window(number: int) -> VariantStats:
        return VariantStats(ok=200, labels={"name": {f"value-{number}-{place}": 1 for place in range(200)}})

    total = window(0)
    for number in range(1, 20):
        assert is_sane(window(number))
        total = added(total, window(number))
    assert len(total.labels["name"]) <= 256
    assert not is_sane(VariantStats(ok=1, labels={"n" * 1_000: {"a": 1}}))
    assert not is_sane(VariantStats(ok=1, labels={f"field-{number}": {"a": 1} for number in range(500)}))


def test_a_topic_that_nobody_has_is_not_remembered() -> None:
    cluster = Rolling()
    before = dict(cluster.machine.state.topic_widths)
    cluster.append(TopicEnsured("invented", "sie.work.other", 3))
    assert cluster.machine.state.topic_widths == before

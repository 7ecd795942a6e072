"""Which changes of a declaration make new replicas, and what the running ones take over as they are."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import structs

from scheduler.launches import accept
from scheduler.limits import RETRIES_MAX
from scheduler.redeclared import LIVE_FIELDS, keeps_replicas
from sie_stream.control import DeleteModel, EnsureTopic, InstanceRow, ModelRow, RouteRow
from sie_stream.ids import LANES, TopicNames
from sie_stream.spec import ModelSpec
from tests.unit.scheduler.kit import INSTANCE, TWO, Cluster, decisions, fail, joined, kinds, running, spec_json

GOOD = ({"inputs": {"age": 1}, "outputs": {"score": 0.5}},)
CHANGES: dict[str, object] = {
    "version": "2.0.0",
    "source": {"uri": "/models/other"},
    "min_gpu_memory_mb": 200,
    "description": "Churn.",
    "labels": {"team": "risk"},
    "backend": {"name": "sklearn", "config": {"threads": 2}},
    "service_type": "classification",
    "requires": {"pytorch": ">=2.0"},
    "preferred_precision": ["fp16"],
    "supported_context_length": 100,
    "max_seq_len": 100,
    "shared_kv_cache": True,
    "max_concurrent_requests": 5,
    "batch_sizes": {"max": 8},
    "paged_attention": {"enabled": True},
    "lora": {"base": "other", "rank": 8},
    "tensor_parallel_size": 2,
    "tensor_parallel_over": "numa",
    "tokenizer": {"path": "tokenizer.json"},
    "input_schema": {"type": "object", "properties": {"age": {"type": "number"}}},
    "output_schema": {"type": "object", "properties": {"score": {"type": "number"}}},
    "privacy": {"subject": "age"},
    "priority_level": "P0",
    "deadline_ms": 500,
    "slas": {"p99_latency_ms": 50},
    "replicas": {"min": 2, "max": 4},
    "tags": ["high-sla"],
    "node_selector": {"gpu": "a100"},
    "tolerations": [{"key": "spot", "operator": "Exists"}],
    "tier": "tier-1",
    "quota": {"requests_per_second": 5},
    "pre_warmup": [{"age": 1}],
    "baselines": [{"batch_size": size, "latency_ms": 2, "memory_mb": 100} for size in (1, 2, 4)],
    "kafka_input": {"topic": "orders"},
    "kafka_output": {"topic": "scores", "value_serializer": "avro"},
    "fusion": "pooled",
    "ordering": "key",
    "golden": GOOD,
    "rollout": {"steps": [50, 100]},
    "probes": {"readiness": {"period_ms": 2_000}},
}
"""Another value of every field that may change."""
NEEDED: dict[str, dict[str, object]] = {
    "fusion": {"output_schema": CHANGES["output_schema"]},
    "privacy": {
        "input_schema": {
            "type": "object",
            "properties": {"age": {"type": "string", "pii": "encrypt"}},
            "required": ["age"],
        }
    },
}
"""What a field is only allowed beside."""


def _spec(fields: dict[str, object]) -> bytes:
    return msgspec.json.encode(msgspec.json.decode(spec_json()) | fields)


def test_every_field_of_a_declaration_is_tried() -> None:
    assert set(CHANGES) == set(ModelSpec.model_fields) - {"name"}
    assert set(ModelSpec.model_fields) > LIVE_FIELDS


@pytest.mark.parametrize("field", CHANGES)
def test_a_changed_field_makes_new_replicas_unless_it_is_live(field: str) -> None:
    cluster = running()
    model = cluster.model()
    base = {"replicas": TWO} | NEEDED.get(field, {})
    before = accept(_spec(base), TopicNames())
    after = accept(_spec(base | {field: CHANGES[field]}), TopicNames())
    model.spec, model.launches[model.generation] = before.spec, before.launch
    assert keeps_replicas(model, after) == (field in LIVE_FIELDS)


def test_a_live_field_that_changes_what_a_worker_loads_makes_new_replicas() -> None:
    cluster = running()
    cluster.apply(spec_json(replicas=TWO, kafka_output={"topic": "scores"}))
    assert cluster.model().generation == 2, "results are JSON now instead of Avro"
    cluster.apply(spec_json(replicas=TWO, kafka_output={"topic": "others"}))
    assert cluster.model().generation == 2


def test_more_replicas_are_added_and_fewer_taken_away_while_the_others_stay() -> None:
    cluster = Cluster()
    cluster.lead()
    for worker, incarnation in (("w0", "a"), ("w1", "b"), ("w2", "c")):
        cluster.append(joined(worker, incarnation))
    cluster.apply(spec_json())
    cluster.make_ready()
    (first,) = cluster.model().replicas
    commands = cluster.apply(spec_json(replicas={"min": 3, "max": 3}))
    assert "replica_draining" not in kinds(commands)
    assert len(decisions(commands, "replica_placed")) == 2
    assert cluster.model().replicas[0] is first
    assert first.state == "ready"
    cluster.make_ready()
    cluster.release()
    assert set(cluster.owners().values()) == {"w0", "w1", "w2"}
    commands = cluster.apply(spec_json(replicas={"min": 2, "max": 3}))
    cluster.release()
    assert [replica.state for replica in cluster.model().replicas] == ["ready", "ready"]
    assert cluster.model().replicas[0] is first
    (accepted,) = decisions(commands, "model_accepted")
    assert accepted.reason == "The declaration of version 1.0.0 changed in replicas, so its replicas stay."
    assert accepted.do_nothing == "The old declaration stays."
    row = cluster.row("instances", INSTANCE, InstanceRow)
    assert (row.status, row.generation, row.applied_offset) == ("ready", 1, cluster.model().applied_offset)
    assert b'"min":2' in bytes(cluster.row("models", "churn", ModelRow).spec)


def test_a_wider_topic_is_asked_for_before_replicas_are_added() -> None:
    cluster = running()
    commands = cluster.apply(spec_json(replicas={"min": 2, "max": 4}))
    (ensure,) = [command for command in commands if isinstance(command, EnsureTopic)]
    assert ensure.partitions == LANES * 4
    assert len(cluster.model().replicas) == 2
    assert cluster.row("routes", "churn", RouteRow).width == 4


def test_a_changed_quota_reaches_the_route_and_no_worker() -> None:
    cluster = running()
    before, placement = cluster.row("routes", "churn", RouteRow), cluster.placement()
    commands = cluster.apply(spec_json(replicas=TWO, quota={"requests_per_second": 7}, deadline_ms=900))
    route = cluster.row("routes", "churn", RouteRow)
    assert (route.quota_per_s, route.deadline_ms) == (7, 900)
    assert route.route_epoch > before.route_epoch
    assert kinds(commands) == ["model_accepted", "route_published"]
    assert cluster.placement() == placement
    assert kinds(cluster.wait(5_000, (("w0", "a"), ("w1", "b")))) == [], "it is published once"


def test_the_shares_of_the_keys_stay_when_the_route_changes() -> None:
    cluster = running()
    model = cluster.model()
    assert model.published_route is not None
    model.published_route = structs.replace(model.published_route, shares=(9_000, 1_000))
    cluster.apply(spec_json(replicas=TWO, quota={"requests_per_second": 7}))
    assert cluster.row("routes", "churn", RouteRow).shares == (9_000, 1_000)


def test_a_change_while_a_new_version_loads_is_in_the_route_once_that_serves() -> None:
    cluster = running()
    cluster.apply(spec_json(version="2.0.0", replicas=TWO))
    cluster.apply(spec_json(version="2.0.0", replicas=TWO, quota={"requests_per_second": 7}))
    assert cluster.model().generation == 2
    assert cluster.row("routes", "churn", RouteRow).quota_per_s == 0, "the old version is still in charge"
    cluster.make_ready()
    cluster.release()
    assert cluster.row("routes", "churn", RouteRow).quota_per_s == 7


def test_a_change_tries_given_up_replicas_again_and_takes_a_deletion_back() -> None:
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    cluster.apply(spec_json())
    for attempt in range(RETRIES_MAX + 1):
        fail(cluster)
        cluster.wait(1_000 * 2**attempt, (("w0", "a"),))
    assert cluster.row("instances", INSTANCE, InstanceRow).given_up
    cluster.apply(spec_json(description="again"))
    cluster.make_ready()
    assert cluster.row("instances", INSTANCE, InstanceRow).status == "ready"
    cluster.append(DeleteModel("churn"))
    assert ("routes", "churn") not in cluster.tables
    cluster.apply(spec_json(description="and again"))
    assert cluster.row("instances", INSTANCE, InstanceRow).status == "ready"
    assert cluster.row("routes", "churn", RouteRow).topic
    assert [replica.state for replica in cluster.model().replicas] == ["ready"]


def test_a_change_wakes_a_model_that_sleeps_by_its_route_too() -> None:
    sleepy = {"min": 0, "max": 1}
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    cluster.apply(spec_json(replicas=sleepy))
    cluster.make_ready()
    cluster.wait(10 * 60_000, (("w0", "a"),))
    cluster.release()
    assert cluster.row("routes", "churn", RouteRow).asleep
    cluster.apply(spec_json(replicas=sleepy, description="awake"))
    assert not cluster.row("routes", "churn", RouteRow).asleep
    assert len(cluster.model().replicas) == 1

"""How many replicas of an instance are ready, of how many that are wanted."""

from __future__ import annotations

from msgspec import structs

from sie_stream.cli.models import replica_counts
from sie_stream.control import InstanceRow, ReplicaRow
from tests.unit.scheduler.kit import INSTANCE, Cluster, joined, spec_json


def _row(wanted: int, *replicas: ReplicaRow) -> InstanceRow:
    return InstanceRow("mi-1", "churn", "1", "degraded", replicas, "", {}, 1, replicas_wanted=wanted)


READY = ReplicaRow("w0", "a", "cpu", "1", "ready", 3, 1)


def test_ready_and_wanted_replicas_are_numbers_for_scripts_and_a_text_for_people() -> None:
    loading = structs.replace(READY, worker="w1", state="loading")
    counts = replica_counts(_row(3, READY, structs.replace(READY, worker="w2"), loading))
    assert counts == {"replicas_ready": 2, "replicas_wanted": 3, "ready_replicas": "2/3"}


def test_variants_are_not_counted_and_rows_of_before_do_not_say_what_is_wanted() -> None:
    counts = replica_counts(_row(-1, READY, structs.replace(READY, variant="canary")))
    assert counts == {"replicas_ready": 1, "replicas_wanted": None, "ready_replicas": "1/?"}


def test_a_replica_without_a_place_is_wanted_too() -> None:
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    cluster.apply(spec_json(replicas={"min": 2, "max": 2}))
    cluster.make_ready()
    assert replica_counts(cluster.row("instances", INSTANCE, InstanceRow))["ready_replicas"] == "1/2"

"""Which of its preferred precisions a replica is placed in, and that its launch says so."""

from __future__ import annotations

import pytest

from scheduler.placement import DeviceOffer, PlacementProblem, ReplicaWish, place
from scheduler.precision import choices_of, precision_on
from scheduler.rules import PlacementRules
from scheduler.state import from_bytes, to_bytes
from sie_stream.spec import from_json, not_enforced
from tests.unit.scheduler.kit import Cluster, decisions, joined, spec_json


def decoder(*preferred: str, backend: str = "torch", **config: object) -> bytes:
    wanted = {"kind": "text_generation", **config}
    return spec_json(backend={"name": backend, "config": wanted}, preferred_precision=list(preferred))


@pytest.mark.parametrize(
    ("spec", "choices"),
    [
        (decoder("int8", "fp32"), ("int8", "fp32")),
        (decoder("fp8", "int8"), ("int8",)),
        (decoder("fp8"), ("fp8",)),
        (decoder("fp32", "bf16", precision="bf16"), ("bf16",)),
        (decoder("fp32", precision="int8"), ("fp32",)),
        (decoder(), ()),
        (decoder("int8", "bf16", kind="embedding"), ("bf16",)),
        (decoder("int8", backend="onnx"), ()),
    ],
)
def test_the_choices_are_what_is_preferred_and_can_be_loaded(spec: bytes, choices: tuple[str, ...]) -> None:
    assert choices_of(from_json(spec)) == choices


@pytest.mark.parametrize(
    ("kind", "product", "chosen"),
    [
        ("cuda", "NVIDIA H100 80GB HBM3", "fp8"),
        ("cuda", "NVIDIA A100-SXM4-80GB", "bf16"),
        ("mig", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16"),
        ("cuda", "Tesla T4", "int4"),
        ("cuda", "", "int4"),
        ("cpu", "", "bf16"),
    ],
)
def test_the_device_decides_among_them(kind: str, product: str, chosen: str) -> None:
    choices = ("fp8", "bf16", "int4")
    assert precision_on(choices, kind, product) == chosen
    offer = DeviceOffer("w0", "i", "d", kind, 100, 0, ("torch",), product=product)
    wish = ReplicaWish("m", 1, 1, "torch", 10, rules=PlacementRules(precisions=choices))
    [placed] = place(PlacementProblem((offer,), (wish,))).chosen
    assert placed.precision == chosen


def test_where_a_device_computes_none_the_first_stays_and_the_engine_refuses_it_by_name() -> None:
    assert precision_on(("fp8", "bf16"), "cuda", "Tesla T4") == "fp8"
    assert precision_on((), "cpu", "") == ""


def test_the_launch_of_a_replica_says_what_it_was_placed_in_and_a_snapshot_keeps_it() -> None:
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    commands = cluster.apply(decoder("fp8", "int8", "fp32"))
    [replica] = cluster.placement().replicas
    assert replica.launch.precision == "int8"
    assert "precision" not in replica.launch.config
    assert decisions(commands, "replica_placed")[0].chosen["precision"] == "int8"
    state = from_bytes(to_bytes(cluster.machine.state))
    assert state is not None
    [kept] = state.models["churn"].replicas
    assert kept.precision == "int8"


def test_without_a_preference_nothing_is_said() -> None:
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    commands = cluster.apply(decoder(precision="int4"))
    [replica] = cluster.placement().replicas
    assert replica.launch.precision == ""
    assert "precision" not in decisions(commands, "replica_placed")[0].chosen


def test_describe_says_for_which_backends_it_counts() -> None:
    assert not_enforced(from_json(decoder("int8"))) == []
    assert not_enforced(from_json(decoder("int8", backend="onnx"))) == ["preferred_precision"]

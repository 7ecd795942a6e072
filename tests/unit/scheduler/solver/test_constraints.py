"""What forbids a device: one case per constraint, with the sentence that people read."""

from __future__ import annotations

import pytest

from scheduler.solver.constraints import forbids, forbids_staying, prefers_others, tier_conflict
from scheduler.solver.model import Demand, Device, PrecisionOption, Taint, Toleration
from tests.unit.scheduler.solver.fleets import NVLINK, demand, device

OPTION = PrecisionOption("bf16", 40)
SPOT_TAINT = Taint("spot", "yes", "NoSchedule")

FORBIDDEN: tuple[tuple[str, Demand, Device, str], ...] = (
    ("backend", demand("m", 40, backend="onnx"), device("s0:g0"), "backend 'onnx' is not offered (torch)."),
    ("memory", demand("m", 40), device("s0:g0", 50, reserved_bytes=11), "needs 40 bytes, 39 of 50 are not reserved."),
    ("precision", demand("m", 40), device("s0:g0", precisions=("fp32",)), "cannot compute in bf16 (fp32)."),
    ("product", demand("m", 40, product="H100"), device("s0:g0", product="L4"), "needs product 'H100', this is 'L4'."),
    (
        "node_selector",
        demand("m", 40, node_selector={"zone": "a"}),
        device("s0:g0", labels={"zone": "b"}),
        "needs label zone='a', the server has 'b'.",
    ),
    (
        "node_selector",
        demand("m", 40, node_selector={"zone": "a"}),
        device("s0:g0"),
        "needs label zone='a', the server has no such label.",
    ),
    (
        "taint",
        demand("m", 40, tolerations=(Toleration("spot", "Equal", "no"),)),
        device("s0:g0", taints=(SPOT_TAINT,)),
        "taint spot=yes:NoSchedule is not tolerated.",
    ),
    (
        "version",
        demand("m", 40, requires={"cuda": ">=12.1,<13"}),
        device("s0:g0", versions={"cuda": "13.0"}),
        "needs cuda >=12.1,<13, the worker has 13.0.",
    ),
    (
        "version",
        demand("m", 40, requires={"sglang": ">=0.5"}),
        device("s0:g0"),
        "needs sglang >=0.5, the worker reports none.",
    ),
    ("cordon", demand("m", 40), device("s0:g0", cordoned=True), "the device is cordoned: it takes nothing new."),
    ("drain", demand("m", 40), device("s0:g0", draining=True), "the device is being drained."),
    (
        "spot",
        demand("m", 40),
        device("s0:g0", spot=True),
        "the device is spot capacity, which the model does not tolerate.",
    ),
    (
        "tensor_parallel",
        demand("m", 40, tensor_parallel_size=2),
        device("s0:g0"),
        "needs 2 devices over NVLink, this has none.",
    ),
    (
        "tier",
        demand("m", 40, priority="P1"),
        device("s0:g0", tier="tier-0"),
        "409 Conflict: the device is of tier 'tier-0', which takes P0 models only, and model 'm' is P1.",
    ),
    (
        "tier",
        demand("m", 40, tier="tier-1"),
        device("s0:g0"),
        "the device is of no tier, model 'm' asks for tier 'tier-1'.",
    ),
)


@pytest.mark.parametrize(
    ("constraint", "wanted", "offer", "sentence"), FORBIDDEN, ids=[f"{c[0]}-{n}" for n, c in enumerate(FORBIDDEN)]
)
def test_a_device_is_forbidden_and_the_sentence_says_why(
    constraint: str, wanted: Demand, offer: Device, sentence: str
) -> None:
    refusal = forbids(wanted, OPTION, offer)
    assert refusal is not None
    assert (refusal.constraint, refusal.sentence) == (constraint, sentence)


@pytest.mark.parametrize(
    ("wanted", "offer"),
    [
        (demand("m", 40), device("s0:g0", 40)),
        (demand("m", 40, product="L4"), device("s0:g0", product="L4")),
        (demand("m", 40, node_selector={"zone": "a"}), device("s0:g0", labels={"zone": "a", "rack": "7"})),
        (demand("m", 40, requires={"cuda": ">=12.1,<13"}), device("s0:g0", versions={"cuda": "12.4"})),
        (demand("m", 40, spot_tolerant=True), device("s0:g0", spot=True)),
        (demand("m", 40, tier="tier-0", priority="P0"), device("s0:g0", tier="tier-0")),
        (demand("m", 40, tensor_parallel_size=2), device("s0:g0", island=NVLINK)),
        (demand("m", 40), device("s0:g0", taints=(Taint("slow", "", "PreferNoSchedule"),))),
    ],
)
def test_a_device_is_allowed(wanted: Demand, offer: Device) -> None:
    assert forbids(wanted, OPTION, offer) is None


@pytest.mark.parametrize(
    ("toleration", "tolerated"),
    [
        (Toleration("spot", "Equal", "yes"), True),
        (Toleration("spot", "Equal", "no"), False),
        (Toleration("spot", "Exists"), True),
        (Toleration("", "Exists"), True),
        (Toleration("gpu", "Exists"), False),
        (Toleration("spot", "Equal", "yes", "NoSchedule"), True),
        (Toleration("spot", "Equal", "yes", "NoExecute"), False),
        (Toleration("", "Equal", ""), False),
    ],
)
def test_tolerations_match_as_in_kubernetes(toleration: Toleration, tolerated: bool) -> None:
    found = forbids(demand("m", 40, tolerations=(toleration,)), OPTION, device("s0:g0", taints=(SPOT_TAINT,)))
    assert (found is None) is tolerated


@pytest.mark.parametrize(
    ("offer", "may_stay"),
    [
        (device("s0:g0", cordoned=True), True),
        (device("s0:g0", taints=(SPOT_TAINT,)), True),
        (device("s0:g0", taints=(Taint("gone", "", "NoExecute"),)), False),
        (device("s0:g0", draining=True), False),
        (device("s0:g0", tier="tier-1"), False),
    ],
)
def test_what_keeps_new_replicas_away_may_leave_running_ones(offer: Device, may_stay: bool) -> None:
    assert forbids(demand("m", 40), OPTION, offer) is not None
    assert (forbids_staying(demand("m", 40), OPTION, offer) is None) is may_stay


def test_only_an_untolerated_preference_counts() -> None:
    offer = device("s0:g0", taints=(Taint("slow", "", "PreferNoSchedule"),))
    assert prefers_others(demand("m", 40), offer)
    assert not prefers_others(demand("m", 40, tolerations=(Toleration("slow", "Exists"),)), offer)


def test_tier_0_refuses_what_is_not_p0_whatever_the_fleet() -> None:
    conflict = tier_conflict(demand("llm", 40, tier="tier-0", priority="P2"))
    assert conflict == (
        "409 Conflict: tier 'tier-0' takes P0 models only, and model 'llm' is P2; set priority_level to P0 or leave "
        "tier-0."
    )
    assert tier_conflict(demand("llm", 40, tier="tier-0", priority="P0")) is None
    assert tier_conflict(demand("llm", 40, tier="tier-1", priority="P2")) is None

"""How busy replicas keep a device: from arrivals and declared baselines, and what placement makes of it."""

from __future__ import annotations

from msgspec import structs

from scheduler.busy import FREE, LEAST, MOST, MOST_OF_BATCH, STEP, Busy, load_percent, noticed
from scheduler.offers import wish_of
from scheduler.placement import DeviceOffer, PlacementProblem, ReplicaWish, Resident, place
from tests.unit.scheduler.kit import Cluster, spec_json

GIB = 1 << 30


def seen(per_s: int, busy_ms: int, windows: int = 20) -> Busy:
    busy = Busy()
    for _ in range(windows):
        busy = noticed(busy, 5_000, 5 * per_s, 5 * per_s, busy_ms)
    return busy


def test_a_share_is_arrivals_times_the_declared_device_time() -> None:
    busy = seen(100, busy_ms=4_000)
    assert load_percent(busy, 5_000, "torch", 1) == 50
    assert load_percent(busy, 5_000, "torch", 2) == 25
    assert load_percent(busy, 50_000, "torch", 1) == MOST


def test_without_a_declaration_what_was_observed_counts() -> None:
    assert load_percent(seen(100, busy_ms=2_000), 0, "torch", 1) == 40


def test_what_had_nothing_to_do_yet_is_assumed_by_its_backend() -> None:
    assert noticed(Busy(), 5_000, 0, 0, 0) == Busy()
    assert load_percent(Busy(), 5_000, "sglang", 3) == LEAST["sglang"]
    assert load_percent(Busy(), 5_000, "sklearn", 3) == 0


def test_an_engine_that_decodes_takes_its_turns_however_little_it_has_to_do() -> None:
    assert load_percent(seen(1, busy_ms=10), 5_000, "sglang", 3) == LEAST["sglang"]
    assert load_percent(seen(1, busy_ms=10), 5_000, "sklearn", 3) == STEP
    assert load_percent(seen(100, busy_ms=4_000), 5_000, "sglang", 1) == 50


def test_a_small_share_counts_as_a_whole_step() -> None:
    """Its small batches cost more than the declared large one: many such models on one device made each other late."""
    assert load_percent(seen(1, busy_ms=10), 5_000, "torch", 1) == STEP
    assert load_percent(seen(10, busy_ms=10), 3_000, "torch", 1) == STEP
    assert load_percent(seen(10, busy_ms=10), 6_000, "torch", 1) == 2 * STEP


def test_a_batch_job_leaves_room_for_small_models_and_none_for_another() -> None:
    cluster = Cluster()
    for name, tags in (("bulk", ["batch-job"]), ("plain", [])):
        cluster.apply(spec_json(name, tags=tags))
        cluster.model(name).busy = seen(1_000, busy_ms=4_500)
    assert wish_of(cluster.model("plain")).load_percent > FREE
    assert wish_of(cluster.model("bulk")).load_percent == MOST_OF_BATCH
    assert FREE < 2 * MOST_OF_BATCH


def test_a_busy_language_model_is_not_put_beside_another_that_has_little_to_do() -> None:
    devices = tuple(
        DeviceOffer(f"w{n}", "a", "cuda:0", "cuda", 80 * GIB, 0, ("sglang",), host=f"h{n}") for n in range(2)
    )
    quiet = ReplicaWish("quiet", 1, 1, "sglang", 30 * GIB, load_percent=load_percent(seen(1, 10), 5_000, "sglang", 1))
    busy = structs.replace(quiet, model="busy", load_percent=load_percent(seen(100, 4_000), 5_000, "sglang", 1))
    (apart,) = place(PlacementProblem(devices, (busy,), (Resident(quiet, "w0", ("cuda:0",)),), "binpack")).chosen
    assert apart.worker == "w1"


def test_a_load_is_believed_sooner_when_it_comes_than_when_it_goes() -> None:
    low, high = seen(10, 0), seen(100, 0)
    up, down = (noticed(busy, 5_000, 5 * rate, 0, 0).per_s for busy, rate in ((low, 100), (high, 10)))
    assert up - low.per_s > high.per_s - down


def test_busy_replicas_do_not_share_a_device_while_another_is_free() -> None:
    devices = tuple(
        DeviceOffer(f"w{n}", "a", "cuda:0", "cuda", 80 * GIB, 0, ("sglang",), host=f"h{n}") for n in range(3)
    )
    wish = ReplicaWish("llm", 1, 1, "sglang", 30 * GIB, load_percent=60)
    other = structs.replace(wish, model="other")
    problem = PlacementProblem(devices, (other,), (Resident(wish, "w0", ("cuda:0",)),), "binpack")
    (apart,) = place(problem).chosen
    assert apart.worker != "w0"
    calm = structs.replace(problem, wishes=(structs.replace(other, load_percent=10),))
    (beside,) = place(calm).chosen
    assert beside.worker == "w0"

"""What the slowest requests share."""

from __future__ import annotations

from sie_stream.decisions import Decision
from sie_stream.records import Provenance, Result, Timings, Usage
from sie_stream.tracing.slow import SlowStudy


def result(number: int, total: float, worker: str, queue: float = 1.0, inference: float = 2.0) -> Result:
    origin = Provenance(
        *(
            "sie.requests",
            0,
            number,
            "sie.work.m",
            0,
            number,
            1,
            66,
            worker,
            f"{worker}-1",
            "cpu:0",
            "d",
            "e",
            None,
            8,
            0,
        )
    )
    timings = Timings(queue=queue, inference=inference, total=total)
    return Result(
        *(f"r{number}", "ok", "mi", "m", "1", "stable", b"{}", None, Usage(), timings, origin, 1_000_000 + number)
    )


def study(slow_worker: str, slow_batch: bool = False) -> SlowStudy:
    """1,000 requests over two workers; every hundredth is slow in the queue of `slow_worker`."""
    found = SlowStudy("m")
    for number in range(1_000):
        if number % 100 == 0:
            engine = 2.5 if slow_batch else 2.0 + number / 1e4
            found.add(result(number, 500.0 + number, slow_worker, 490.0 + number, engine))
        else:
            found.add(result(number, 5.0, f"w{number % 2}"))
    return found


def test_the_slow_ones_are_picked_and_their_worker_and_queue_are_named() -> None:
    report = study("w1").report()
    assert (report.requests, len(report.slow)) == (1_000, 10)
    assert report.slow[0].request_id == "r900"
    assert report.p99_ms == 500.0
    assert report.p50_ms is not None
    assert abs(report.p50_ms - 5.0) < 0.2
    shared = {trait.trait: trait for trait in report.shared}
    queue = shared["time in the queue dominates"]
    assert (queue.share, queue.share_of_all) == (1.0, 0.01)
    assert report.shared[0].trait == "time in the queue dominates"
    assert shared["worker w1"].lift is not None
    assert 1.9 < shared["worker w1"].lift < 2.1
    assert "placed by record 66 of sie.cluster" not in shared, "all have it"


def test_one_batch_and_one_decision_are_named() -> None:
    decision = Decision("d-70-0", "partitions_asked_back", "m", "why", 70, 999_990, {})
    report = study("w1", slow_batch=True).report([decision])
    named = [trait.trait for trait in report.shared]
    assert "the same batch of 8 on w1 that took 2.500 ms" in named
    assert "under way at d-70-0 partitions_asked_back m" in named


def test_nothing_in_common_is_said_by_silence() -> None:
    found = SlowStudy("m")
    for number in range(400):
        found.add(result(number, 5.0 + number / 1_000, f"w{number % 4}"))
    found.add(result(1, 5.0, "w0"))
    report = found.report()
    assert not [trait for trait in report.shared if trait.trait.startswith("worker")]


def test_other_models_and_no_requests() -> None:
    found = SlowStudy("x")
    found.add(result(1, 5.0, "w0"))
    report = found.report()
    assert (report.requests, report.p99_ms, report.slow) == (0, None, ())


def test_only_the_slowest_are_kept() -> None:
    found = SlowStudy("m", keep_max=5)
    for number in range(2_000):
        found.add(result(number, float(number), "w0"))
    report = found.report()
    assert [entry.total_ms for entry in report.slow] == [1_999.0, 1_998.0, 1_997.0, 1_996.0, 1_995.0]
    assert "less than one in a hundred" in report.notes[0]

"""The worker over the log in memory: what it answers, commits, gives back and refuses."""

from __future__ import annotations

import msgspec
import pytest

from gpu_worker.backends.base import EngineInput, EngineOutput
from gpu_worker.facts import Commit
from gpu_worker.sim.engine import EngineScript
from schemas.codec import decode_deadletter, decode_raw_output, decode_result
from sie_stream.control import (
    PartitionReleased,
    ReplicaFailed,
    ReplicaReady,
    WorkerHeartbeat,
    WorkerJoined,
    WorkerLeft,
)
from sie_stream.errors import Fenced, TransactionAborted
from sie_stream.ids import TopicPartition
from sie_stream.ports import TopicSpec
from sie_stream.records import LogWrite
from sie_stream.settings import Settings
from tests.unit.worker.rig import Rig, World, launch_of, serving, work_item


def test_answers_with_everything_the_result_depended_on() -> None:
    world, rig = serving()
    world.send(work_item("r1", key=b"user-1", seed=5))
    rig.run(50)
    result = world.results()["r1"]
    assert result.status == "ok"
    assert result.outputs == b'{"echo":{"x":1}}'
    assert result.provenance.work_topic == "sie.work.m"
    assert (result.provenance.work_partition, result.provenance.work_offset) == (1, 0)
    assert (result.provenance.source_topic, result.provenance.source_offset) == ("sie.requests", 7)
    assert (result.provenance.worker, result.provenance.incarnation) == ("w0", "w0-1")
    assert result.provenance.placement_epoch == 11
    assert result.provenance.engine == "sim (sim 1)"
    assert result.provenance.seed == 5
    assert result.provenance.batch_size == 1
    assert world.log.visible("sie.results")[0].key == b"user-1"
    assert world.committed("m", 1) == 1


def test_joins_reports_ready_and_beats() -> None:
    world, rig = serving()
    rig.run(2_000)
    assert len(world.reports(WorkerJoined)) == 1
    ready = world.reports(ReplicaReady)
    assert [(r.model, r.placement_epoch) for r in ready if isinstance(r, ReplicaReady)] == [("m", 11)]
    assert 3 <= len(world.reports(WorkerHeartbeat)) <= 5


def test_a_model_that_does_not_load_is_reported_and_does_not_stop_others() -> None:
    world = World()
    rig = Rig(world, script=EngineScript(refuses={"bad"}))
    world.place(world.add_model("bad"))
    world.place(world.add_model("good"))
    rig.run(200)
    failed = world.reports(ReplicaFailed)
    assert [(f.model, f.code) for f in failed if isinstance(f, ReplicaFailed)] == [("bad", "digest_mismatch")]
    assert len(world.reports(ReplicaReady)) == 1


def test_a_model_whose_load_kills_the_engine_is_given_up_after_three_attempts() -> None:
    world = World()
    rig = Rig(world, script=EngineScript(kills_loading={"bad"}))
    world.place(world.add_model("bad"))
    world.place(world.add_model("good"))
    rig.run_until(lambda: world.reports(ReplicaReady) and world.reports(ReplicaFailed))
    failed = world.reports(ReplicaFailed)[0]
    assert isinstance(failed, ReplicaFailed)
    assert (failed.model, failed.code) == ("bad", "engine_died")
    assert rig.engines.starts >= 3


def test_lower_lanes_wait_for_higher_ones() -> None:
    world, rig = serving(EngineScript(batch_ms=30.0), batch_max=2)
    world.send(*[work_item(f"p2-{n}", priority=2) for n in range(6)])
    rig.run(10)
    world.send(*[work_item(f"p0-{n}", priority=0) for n in range(2)])
    rig.run(400)
    order = [names for _, names in rig.engines.batches]
    # Two batches may be with the engine before the urgent ones arrive; nothing else gets ahead of them.
    assert order.index(("p0-0", "p0-1")) <= 2
    assert len(world.results()) == 8


def test_models_of_one_lane_take_turns() -> None:
    world = World()
    rig = Rig(world, script=EngineScript(batch_ms=5.0))
    for model in ("a", "b"):
        world.place(world.add_model(model, batch_max=4))
    rig.run(100)
    for model in ("a", "b"):
        world.give(model, [1])
        world.send(*[work_item(f"{model}{n}", model) for n in range(12)])
    rig.run(200)
    assert [names[0][0] for _, names in rig.engines.batches] == ["a", "b", "a", "b", "a", "b"]


# ---------------------------------------------------------------- release and take-over


def test_release_commits_what_runs_and_leaves_what_waits() -> None:
    world, rig = serving(EngineScript(batch_ms=40.0), batch_max=2)
    world.send(*[work_item(f"r{n}") for n in range(10)])
    rig.run(10)
    world.ask_back("m", [1])
    rig.run_until(lambda: world.reports(PartitionReleased))
    released = world.reports(PartitionReleased)[0]
    assert isinstance(released, PartitionReleased)
    assert released.placement_epoch == 12
    done = len(world.results())
    assert done < 10
    assert world.committed("m", 1) == released.offset == done
    second = Rig(world, "w1-1")
    world.place(world.add_model("m"), "w1-1")
    second.run(100)
    world.give("m", [1], "w1-1")
    second.run(300)
    assert len(world.results()) == 10


def test_the_next_owner_skips_what_finished_out_of_order() -> None:
    world = World()
    rig = Rig(world, script=EngineScript(hangs={"r0"}))
    world.place(world.add_model("m", backend="one"))
    world.place(launch_of("m", version="2", backend="two"))
    rig.run(100)
    world.give("m", [1])
    world.send(work_item("r0"), *[work_item(f"r{n}", version="2") for n in range(1, 6)])
    rig.run(50)
    assert sorted(world.results()) == ["r1", "r2", "r3", "r4", "r5"]
    assert world.committed("m", 1) == 0
    second = Rig(world, "w0-2")
    world.place(launch_of("m"), "w0-2")
    second.run(100)
    world.give("m", [1], "w0-2")
    second.run(100)
    assert len(world.results()) == 6
    assert [names for _, names in second.engines.batches] == [("r0",)]
    assert world.committed("m", 1) == 6


def test_a_killed_worker_loses_and_repeats_nothing() -> None:
    world, rig = serving(EngineScript(batch_ms=7.0), batch_max=4)
    world.send(*[work_item(f"r{n}") for n in range(100)])
    rig.run(60)
    done = len(world.results())
    assert 0 < done < 100
    # kill -9: the object is simply not used any more; its successor fences and takes over.
    second = Rig(world, "w0-2")
    world.place(world.add_model("m"), "w0-2")
    second.run(100)
    world.give("m", [0, 1, 2], "w0-2")
    second.run(1_000)
    assert len(world.results()) == 100
    with pytest.raises(Fenced):
        rig.run(200)
    assert len(world.results()) == 100


def test_a_paused_worker_that_was_fenced_commits_nothing() -> None:
    world, rig = serving(EngineScript(batch_ms=5.0))
    world.send(*[work_item(f"r{n}") for n in range(8)])
    rig.run(3)
    fencer = world.log.transactional_writer(world.names.worker_transactional_id("w0"))
    fencer.init()
    with pytest.raises(Fenced):
        rig.run(100)
    assert world.results() == {}
    assert world.committed("m", 1) == -1


def test_completions_of_an_earlier_assignment_are_dropped() -> None:
    world, rig = serving(EngineScript(batch_ms=50.0))
    world.send(*[work_item(f"r{n}") for n in range(4)])
    rig.run(10)
    world.give("m", [1])  # a new epoch, without a release: whatever ran before does not count
    rig.run(400)
    assert len(world.results()) == 4
    assert sum(len(names) for _, names in rig.engines.batches) == 8
    assert rig.machine.state.open_total == 0


def test_a_partition_taken_away_is_forgotten() -> None:
    world, rig = serving(EngineScript(batch_ms=50.0))
    world.send(*[work_item(f"r{n}") for n in range(20)])
    rig.run(10)
    world.take_away("m")
    rig.run(300)
    assert world.results() == {}
    assert rig.machine.state.open_total == 0
    assert rig.reader.assigned() == []


def test_an_unknown_release_is_answered_again() -> None:
    world, rig = serving()
    world.ask_back("m", [1])
    rig.run(50)
    assert len(world.reports(PartitionReleased)) == 1
    row = world.rows["m"]
    world.publish(msgspec.structs.replace(row))  # the same row again: our report may have been lost
    rig.run(50)
    assert len(world.reports(PartitionReleased)) == 2


def test_clean_stop_finishes_what_runs_and_says_so() -> None:
    world, rig = serving(EngineScript(batch_ms=30.0), batch_max=2)
    world.send(*[work_item(f"r{n}") for n in range(20)])
    rig.run(10)
    rig.host.request_stop()
    rig.run_until(lambda: rig.host.finished, 500)
    assert len(world.reports(WorkerLeft)) == 1
    done = len(world.results())
    assert 0 < done < 20
    assert world.committed("m", 1) == done


# ---------------------------------------------------------------- endings


def test_expired_items_never_start() -> None:
    world, rig = serving(EngineScript(batch_ms=60.0), batch_max=1)
    now = world.clock.now_ms()
    world.send(work_item("slow"), work_item("slow2"), work_item("late", deadline_at_ms=now + 50))
    rig.run(400)
    late = world.results()["late"]
    assert late.status == "expired"
    assert late.error is not None
    assert late.error.code == "deadline_exceeded"
    assert all("late" not in names for _, names in rig.engines.batches)
    assert world.committed("m", 1) == 3


def test_expired_items_are_told_while_the_engine_hangs() -> None:
    world, rig = serving(EngineScript(hangs={"stuck"}))
    world.send(work_item("stuck"))
    rig.run(40)
    world.send(work_item("late", deadline_at_ms=world.clock.now_ms() + 100))
    rig.run_until(lambda: "late" in world.results(), 400)
    assert world.results()["late"].status == "expired"


def test_an_error_of_one_item_is_its_own() -> None:
    def answer(item: EngineInput) -> EngineOutput:
        if item.request_id == "bad":
            return EngineOutput("bad", error_code="context_too_long", error_message="too long")
        return EngineOutput(item.request_id, outputs=b"{}")

    world, rig = serving(EngineScript(answer=answer))
    world.send(work_item("good"), work_item("bad"))
    rig.run(50)
    results = world.results()
    assert results["good"].status == "ok"
    assert results["bad"].status == "failed"
    assert results["bad"].error is not None
    assert results["bad"].error.code == "context_too_long"
    assert world.log.visible("sie.deadletter") == []


@pytest.mark.parametrize("outputs", [b'{"text":"' + b"x" * 2_000 + b'"}', b'{"text":"\xff"}'])
def test_outputs_that_cannot_be_written_fail_alone(outputs: bytes) -> None:
    def answer(item: EngineInput) -> EngineOutput:
        return EngineOutput(item.request_id, outputs=outputs if item.request_id == "bad" else b"{}")

    world, rig = serving(EngineScript(answer=answer), Settings(record_bytes_max=9_800))
    world.send(work_item("good"), work_item("bad"))
    rig.run(50)
    results = world.results()
    assert results["good"].status == "ok"
    bad = results["bad"]
    assert bad.error is not None
    assert (bad.status, bad.outputs) == ("failed", None)
    assert bad.error.code in ("output_too_large", "output_not_text")


def test_records_that_are_no_work_are_rejected_and_kept() -> None:
    world, rig = serving()
    world.writer.write([LogWrite("sie.work.m", b"garbage", b"k", 1), LogWrite("sie.work.m", None, b"k", 1)])
    world.send(work_item("good"))
    rig.run(50)
    results = world.results()
    assert sorted(results) == ["good", "src:sie.work.m:1:0", "src:sie.work.m:1:1"]
    assert results["src:sie.work.m:1:0"].status == "rejected"
    letters = [decode_deadletter(record.value) for record in world.log.visible("sie.deadletter")]
    assert [letter.original for letter in letters] == [b"garbage", b""]
    assert [letter.reason for letter in letters] == ["bad_avro", "empty_record"]
    assert world.committed("m", 1) == 3


def test_copies_go_to_topics_that_exist() -> None:
    world, rig = serving(output_serializer="json")
    world.add_topic("their-results")
    world.send(
        work_item("a", output_topic="their-results"),
        work_item("b", reply_topic="nowhere"),
        work_item("c", reply_topic="sie.cluster"),
        work_item("d", reply_topic="their-results", schema_id=9),
    )
    rig.run(50)
    assert sorted(world.results()) == ["a", "b", "c", "d"]
    as_json, as_avro = (record.value for record in world.log.visible("their-results"))
    assert as_json is not None
    assert msgspec.json.decode(as_json)["outputs"] == {"echo": {"x": 1}}
    assert decode_result(as_avro).request_id == "d"


def test_pooled_models_write_raw_outputs() -> None:
    def answer(item: EngineInput) -> EngineOutput:
        if item.request_id == "bad":
            return EngineOutput("bad", error_code="nope", error_message="no")
        return EngineOutput(item.request_id, token_ids=[5, 6], finish_reason="stop", completion_tokens=2)

    world, rig = serving(EngineScript(answer=answer), fusion="pooled")
    world.send(work_item("a", key=b"k"), work_item("bad"))
    rig.run(50)
    assert list(world.results()) == ["bad"]
    (record,) = world.log.visible("sie.outputs")
    raw = decode_raw_output(record.value)
    assert record.key == b"a"
    assert (raw.key, raw.token_ids, raw.finish_reason) == (b"k", (5, 6), "stop")
    assert raw.result.usage.completion_tokens == 2
    assert world.committed("m", 1) == 2


# ---------------------------------------------------------------- poison


def test_poison_is_isolated_and_its_neighbours_succeed() -> None:
    world, rig = serving(EngineScript(kills={"poison"}))
    world.send(*[work_item(f"r{n}") for n in range(5)], work_item("poison"), *[work_item(f"s{n}") for n in range(5)])
    rig.run_until(lambda: len(world.results()) == 11)
    results = world.results()
    poison = results.pop("poison")
    assert poison.status == "failed"
    assert poison.error is not None
    assert poison.error.code == "poison"
    assert {result.status for result in results.values()} == {"ok"}
    attempts = [names for _, names in rig.engines.batches if "poison" in names]
    assert len(attempts) == 3
    assert attempts[1:] == [("poison",), ("poison",)]
    (record,) = world.log.visible("sie.deadletter")
    letter = decode_deadletter(record.value)
    assert (letter.request_id, letter.reason, letter.attempts) == ("poison", "poison", 3)
    assert letter.original_bytes == len(letter.original) > 0
    rig.run(20)
    assert world.committed("m", 1) == 11


def test_neighbours_are_not_given_up_even_without_retries() -> None:
    world, rig = serving(EngineScript(kills={"poison"}), Settings(engine_attempts_max=1))
    world.send(work_item("a"), work_item("poison"), work_item("b"))
    rig.run_until(lambda: len(world.results()) == 3, 60_000)
    assert {name: result.status for name, result in world.results().items()} == {
        "a": "ok",
        "b": "ok",
        "poison": "failed",
    }


def test_an_engine_without_models_is_stopped_and_starts_again_when_needed() -> None:
    world, rig = serving()
    row = world.rows["m"]
    world.publish(msgspec.structs.replace(row, replicas=(), partitions=()))
    rig.run(50)
    assert not any(engine.running for engine in rig.machine.state.engines.values())
    world.place(launch_of("m"))
    rig.run(100)
    world.give("m", [1])
    world.send(work_item("r0"))
    rig.run(100)
    assert world.results()["r0"].status == "ok"
    assert rig.engines.starts == 2


def test_two_poisons_in_one_batch() -> None:
    world, rig = serving(EngineScript(kills={"x", "y"}))
    world.send(work_item("x"), work_item("a"), work_item("y"), work_item("b"))
    rig.run_until(lambda: len(world.results()) == 4, 60_000)
    statuses = {name: result.status for name, result in world.results().items()}
    assert statuses == {"x": "failed", "y": "failed", "a": "ok", "b": "ok"}


def test_a_hanging_batch_is_ended_by_its_timeout() -> None:
    world, rig = serving(EngineScript(hangs={"stuck"}), Settings(engine_batch_timeout_ms=200))
    world.send(work_item("a"), work_item("stuck"), work_item("b"))
    rig.run_until(lambda: len(world.results()) == 3, 10_000)
    results = world.results()
    assert results["stuck"].error is not None
    assert results["stuck"].error.code == "engine_timeout"
    assert {results["a"].status, results["b"].status} == {"ok"}


def test_an_exception_costs_the_engine_nothing() -> None:
    world, rig = serving(EngineScript(raises={"bad"}))
    world.send(work_item("a"), work_item("bad"), work_item("b"))
    rig.run_until(lambda: len(world.results()) == 3, 5_000)
    results = world.results()
    assert results["bad"].error is not None
    assert results["bad"].error.code == "engine_error"
    assert {results["a"].status, results["b"].status} == {"ok"}
    assert rig.engines.starts == 1


def test_an_engine_killed_from_outside_costs_nobody_an_answer() -> None:
    world, rig = serving(EngineScript(batch_ms=10.0))
    world.send(*[work_item(f"r{n}") for n in range(40)])
    rig.run(15)
    rig.engines.kill(next(iter(rig.machine.state.engines)))
    rig.run_until(lambda: len(world.results()) == 40)
    assert {result.status for result in world.results().values()} == {"ok"}
    assert len(world.reports(ReplicaReady)) == 2  # it is back


def test_suspects_of_a_released_partition_are_left_to_the_next_owner() -> None:
    world, rig = serving(EngineScript(batch_ms=30.0))
    world.send(*[work_item(f"r{n}") for n in range(4)])
    rig.run(10)
    world.ask_back("m", [1])
    rig.run(12)
    rig.engines.kill(next(iter(rig.machine.state.engines)))
    rig.run(300)
    assert len(world.reports(PartitionReleased)) == 1
    assert world.results() == {}
    assert rig.machine.state.open_total == 0


# ---------------------------------------------------------------- ordering


def test_one_item_of_a_key_at_a_time() -> None:
    world, rig = serving(EngineScript(batch_ms=10.0), ordering="key", batch_max=4)
    world.send(*[work_item(f"{key}{n}", key=key.encode()) for n in range(4) for key in ("a", "b")])
    rig.run(400)
    assert len(world.results()) == 8
    order = [name for _, names in rig.engines.batches for name in names]
    assert [name for name in order if name.startswith("a")] == ["a0", "a1", "a2", "a3"]
    assert all(len({name[0] for name in names}) == len(names) for _, names in rig.engines.batches)
    assert all(not queue.by_key for queue in rig.machine.state.queues.models.values())


# ---------------------------------------------------------------- back pressure


def test_a_blocked_engine_pauses_the_topic_and_memory_stays_flat() -> None:
    settings = Settings(worker_queue_max=200, worker_poll_max=20)
    world, rig = serving(EngineScript(hangs={"r0"}), settings)
    world.send(*[work_item(f"r{n}") for n in range(2_000)])
    rig.run(500)
    assert rig.machine.state.open_total <= 200 + 20
    assert rig.machine.state.partitions[TopicPartition("sie.work.m", 1)].paused


def test_large_requests_are_bounded_by_their_bytes() -> None:
    world, rig = serving(EngineScript(hangs={"r0"}), Settings(worker_poll_max=20))
    big = b'{"x":"' + b"y" * 200_000 + b'"}'
    world.send(*[work_item(f"r{n}", inputs=big) for n in range(1_000)])
    rig.run(500)
    assert 64 << 20 <= rig.machine.state.open_bytes <= (64 << 20) + 20 * 210_000
    assert len(rig.machine.state.partitions[TopicPartition("sie.work.m", 1)].backlog) == 0


def test_results_that_cannot_be_committed_stop_the_reading() -> None:
    world, rig = serving(None, Settings(worker_queue_max=100, worker_poll_max=20))
    rig.host._committer = NeverAnswers()
    world.send(*[work_item(f"r{n}") for n in range(2_000)])
    rig.run(2_000)
    assert 50 <= len(rig.machine.state.output.writes) <= 100 + 100 + 20


def test_urgent_models_are_loaded_first() -> None:
    world = World()
    rig = Rig(world)
    for model, priority in (("a", 2), ("b", 0), ("c", 1)):
        world.place(world.add_model(model, priority=priority))
    rig.run(200)
    ready = [report.model for report in world.reports(ReplicaReady) if isinstance(report, ReplicaReady)]
    assert ready == ["b", "c", "a"]


def test_paused_partitions_resume_and_drain() -> None:
    world, rig = serving(None, Settings(worker_queue_max=64, worker_poll_max=50))
    world.send(*[work_item(f"r{n}") for n in range(400)])
    rig.run_until(lambda: len(world.results()) == 400, 5_000)
    assert rig.machine.state.open_total == 0


def test_a_quick_engine_is_waited_for_and_nothing_is_fetched_twice() -> None:
    world, rig = serving(None, Settings(worker_queue_max=64, worker_poll_max=50))
    place = TopicPartition("sie.work.m", 1)
    world.send(*[work_item(f"r{n}") for n in range(400)])
    waited = 0
    while len(world.results()) < 400:
        rig.run(1)
        waited += rig.machine.records_max == 0
        assert not rig.machine.state.partitions[place].paused
    assert waited


def test_a_blocked_model_does_not_block_another() -> None:
    world = World(Settings(worker_queue_max=64, worker_poll_max=50, engine_batch_timeout_ms=60_000))
    rig = Rig(world, script=EngineScript(hangs={"slow0"}))
    world.place(world.add_model("slow", backend="one"))
    world.place(world.add_model("fast", backend="two"))
    rig.run(100)
    world.give("slow", [0, 1, 2])
    world.give("fast", [0, 1, 2])
    world.send(*[work_item(f"slow{n}", "slow") for n in range(500)])
    rig.run(100)
    world.send(*[work_item(f"fast{n}", "fast") for n in range(500)])
    rig.run_until(lambda: len(world.results()) == 500, 5_000)


# ---------------------------------------------------------------- commits


def test_an_aborted_transaction_is_done_again_with_the_same_results() -> None:
    world, rig = serving()
    left = iter(range(2))

    def abort_twice(operation: str, client: str) -> None:
        if operation == "commit" and next(left, None) is not None:
            raise TransactionAborted("scripted")

    world.log.cluster.before = abort_twice
    world.send(*[work_item(f"r{n}") for n in range(3)])
    rig.run(60)
    assert world.results() == {}
    world.send(*[work_item(f"s{n}") for n in range(3)])
    rig.run(500)
    assert len(world.results()) == 6
    assert len(rig.engines.batches) == 2
    assert world.committed("m", 1) == 6


def test_a_copy_that_can_never_be_written_does_not_stop_the_worker() -> None:
    world, rig = serving()
    world.log.admin().ensure([TopicSpec("tiny", 1, {"max.message.bytes": "10"})])
    world.send(work_item("a", output_topic="tiny"), work_item("b"))
    rig.run(1_000)
    assert sorted(world.results()) == ["a", "b"]
    assert world.log.visible("tiny") == []


def test_heartbeats_go_out_while_a_commit_waits_for_the_broker() -> None:
    world, rig = serving()
    rig.host._committer = NeverAnswers()
    world.send(work_item("r0"))
    before = len(world.reports(WorkerHeartbeat))
    rig.run(5_000)
    assert len(world.reports(WorkerHeartbeat)) >= before + 9
    assert world.results() == {}


class NeverAnswers:
    """A CommitPort whose broker is gone."""

    def start(self, commit: Commit) -> None:
        pass

    def outcome(self) -> None:
        return None


def test_offsets_of_idle_partitions_are_renewed() -> None:
    world, rig = serving(None, Settings(offsets_renew_ms=1_000))
    world.send(work_item("r0"))
    rig.run(100)
    before = rig.machine.state.partitions[TopicPartition("sie.work.m", 1)].written_at
    rig.run(3_000)
    assert rig.machine.state.partitions[TopicPartition("sie.work.m", 1)].written_at > before
    assert world.committed("m", 0) == 0

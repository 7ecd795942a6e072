"""Every checker can fail: for each, a world with one broken part, which the checker must notice."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from gpu_worker.backends.base import EngineInput, EngineOutput
from gpu_worker.committer import TransactionRunner
from gpu_worker.facts import Commit, CommitAborted, CommitSucceeded, PartitionReadOut, WorkerEvent
from gpu_worker.host import WorkerHost
from gpu_worker.sim.engine import EngineScript
from processors.ingress.events import CommitBatch
from processors.ingress.host import IngressHost
from scheduler.host import SchedulerHost
from sie_stream.records import CommittedOffset, LogWrite
from sie_stream.sim.main import load_scenario
from sie_stream.sim.processes import IngressBody
from sie_stream.sim.run import Run
from sie_stream.sim.scenario import Role, Scenario
from sie_stream.sim.scheduler_process import SchedulerBody, refold
from sie_stream.sim.worker_process import WorkerBody
from sie_stream.sim.world import Violation
from sie_stream.sim.writers import SimTransactionalWriter

pytestmark = pytest.mark.simulation

SEEDS = range(40)


Change = Callable[[Scenario], Scenario]


def unchanged(scenario: Scenario) -> Scenario:
    return scenario


def failure_of(
    name: str, break_it: Callable[[Run], None], *words: str, change: Change = unchanged, seeds: range = SEEDS
) -> str:
    """Break one part of worlds until one of them fails with one of the words; returns all failures in one text."""
    scenario = change(load_scenario(name))
    failures = ""
    for seed in seeds:
        run = Run(name, scenario, seed)
        break_it(run)
        outcome = run.go()
        failures += outcome.failure + "\n"
        if any(word in outcome.failure for word in words):
            return failures
    raise AssertionError(f"no world failed with one of {words}. Failures: {failures}")


def unbroken(run: Run) -> None:
    return None


def with_body(role: Role, body: type) -> Callable[[Run], None]:
    def break_it(run: Run) -> None:
        run.parts.bodies[role] = body

    return break_it


def broken(body: type, **parts: type) -> type:
    """A body with other parts."""
    return type(f"Broken{body.__name__}", (body,), parts)


def with_runner(runner: type[TransactionRunner]) -> Callable[[Run], None]:
    return with_body("worker", broken(WorkerBody, runner_type=runner))


class TooFar(TransactionRunner):
    """Commits the position of the consumer instead of the ledger's."""

    def run(self, commit: Commit) -> CommitSucceeded | CommitAborted:
        offsets = {place: CommittedOffset(one.offset + 3) for place, one in commit.offsets.items()}
        return super().run(msgspec.structs.replace(commit, offsets=offsets))


class Forgetful(TransactionRunner):
    """Moves on without writing the results."""

    def run(self, commit: Commit) -> CommitSucceeded | CommitAborted:
        return super().run(msgspec.structs.replace(commit, writes=commit.writes[1:]))


class ResultsOnly(TransactionRunner):
    """Writes results and never moves the offsets: whoever comes next does it all again."""

    def run(self, commit: Commit) -> CommitSucceeded | CommitAborted:
        return super().run(msgspec.structs.replace(commit, offsets={}))


class Garbler(TransactionRunner):
    """Metadata that nobody can read."""

    def run(self, commit: Commit) -> CommitSucceeded | CommitAborted:
        offsets = {place: CommittedOffset(one.offset, "what?") for place, one in commit.offsets.items()}
        return super().run(msgspec.structs.replace(commit, offsets=offsets))


class Talkative(TransactionRunner):
    """Gives users what a shadow made of the copy of their request."""

    def run(self, commit: Commit) -> CommitSucceeded | CommitAborted:
        writes = [
            msgspec.structs.replace(one, topic="sie.results") if one.topic == "sie.shadow" else one
            for one in commit.writes
        ]
        return super().run(msgspec.structs.replace(commit, writes=writes))


class Silent(TransactionRunner):
    """Drops what it made of copies."""

    def run(self, commit: Commit) -> CommitSucceeded | CommitAborted:
        writes = [one for one in commit.writes if one.topic != "sie.shadow"]
        return super().run(msgspec.structs.replace(commit, writes=writes))


class Unfenceable(SimTransactionalWriter):
    """As if the broker did not know producer epochs."""

    def _refuse_when_fenced(self) -> None:
        return None


class Dishonest(WorkerBody):
    def answer(self, item: EngineInput) -> EngineOutput:
        return EngineOutput(item.request_id, b'{"y":"42"}')


class Sleeper(WorkerBody):
    """Its engines never answer, and nobody minds."""

    def script(self) -> EngineScript:
        script = super().script()
        assert self.parts.traffic is not None
        script.hangs = set(self.parts.traffic.by_id)
        return script


class Repeater(SchedulerHost):
    """Publishes what it decides but never says how far it read."""

    def _transact(self, writes: list[LogWrite], position: CommittedOffset | None = None) -> None:
        super()._transact(writes, None)


class Hurried(WorkerHost):
    """Says that it read a draining partition to its end, without having looked where that is."""

    def _read_out(self) -> list[WorkerEvent]:
        said: list[WorkerEvent] = [PartitionReadOut(place, epoch) for place, (epoch, _) in self._to_drain.items()]
        self._to_drain.clear()
        return said


class Unfenced(WorkerBody):
    writer_type = Unfenceable


class Hasty(IngressHost):
    """Moves on past a request that it did not route."""

    def _promise(self, batch: CommitBatch) -> bool:
        return super()._promise(msgspec.structs.replace(batch, writes=batch.writes[1:]))


def fused_only(scenario: Scenario) -> Scenario:
    return msgspec.structs.replace(scenario, workload=msgspec.structs.replace(scenario.workload, models=1))


def test_a_commit_above_an_open_offset_is_noticed() -> None:
    assert failure_of("calm", with_runner(TooFar), "committed past", "stable is")


def test_a_lost_result_is_noticed() -> None:
    assert failure_of("calm", with_runner(Forgetful), "which has no outcome")


def test_a_second_terminal_record_is_noticed() -> None:
    assert failure_of("worker_kills", with_runner(ResultsOnly), "a second terminal record", change=fused_only)


def test_a_second_raw_output_is_noticed() -> None:
    assert failure_of("worker_kills", with_runner(ResultsOnly), "raw output")


def test_metadata_that_cannot_be_read_is_noticed() -> None:
    assert failure_of("calm", with_runner(Garbler), "cannot be read")


def test_a_worker_without_fencing_is_noticed() -> None:
    assert failure_of("pauses", with_body("worker", Unfenced), "which belongs to")


def test_a_wrong_answer_is_noticed() -> None:
    assert failure_of("calm", with_body("worker", Dishonest), "has the wrong answer")


def test_work_that_never_ends_is_noticed() -> None:
    def patient(scenario: Scenario) -> Scenario:
        return msgspec.structs.replace(scenario, settings={"engine_batch_timeout_ms": 3_600_000})

    assert failure_of("calm", with_body("worker", Sleeper), "not drained", change=patient)


def test_a_deleted_model_that_is_not_worked_off_is_noticed() -> None:
    # Work has to arrive after the last look and before the model is gone: 219 is the first of 200 worlds where it does.
    hurried = with_body("worker", broken(WorkerBody, host_type=Hurried))
    assert failure_of("deletes", hurried, "not drained", seeds=range(210, 230))


def test_a_request_taken_up_twice_is_noticed() -> None:
    def forget(scenario: Scenario) -> Scenario:
        return msgspec.structs.replace(scenario, settings={"dedupe_window_ms": 0})

    assert failure_of("duplicate_deliveries", unbroken, "work item", change=forget)


def test_a_decision_said_twice_is_noticed() -> None:
    assert failure_of("scheduler_kills", with_body("scheduler", broken(SchedulerBody, host_type=Repeater)), "twice")


def test_a_decision_that_depends_on_more_than_the_log_is_noticed() -> None:
    run = Run("calm", load_scenario("calm"), 1)
    assert not run.go().failure
    other = msgspec.structs.replace(run.settings, topic_prefix="other.")
    with pytest.raises(Violation, match="decision"):
        run.checkers.at_end(lambda records: refold(other, records))


def test_ingress_that_moves_on_without_routing_is_noticed() -> None:
    assert failure_of("calm", with_body("ingress", broken(IngressBody, host_type=Hasty)), "which has no outcome")


def only_shadows(scenario: Scenario) -> Scenario:
    workload = msgspec.structs.replace(scenario.workload, models=1, shadow_versions=1, broken_versions=0)
    return msgspec.structs.replace(scenario, workload=workload, faults=scenario.faults[:1])


def test_a_shadow_that_answers_a_user_is_noticed() -> None:
    words = ("was answered by the shadow", "a second terminal record")
    assert failure_of("rollouts", with_runner(Talkative), *words, change=only_shadows)


def test_a_copy_without_an_answer_is_noticed() -> None:
    assert failure_of("rollouts", with_runner(Silent), "which has no outcome", change=only_shadows)

"""A worker that stops commits what it has at once, and does not hammer a broker in trouble meanwhile."""

from __future__ import annotations

from gpu_worker.committer import CommitPort
from gpu_worker.facts import Commit, CommitAborted, CommitSucceeded
from gpu_worker.pacing import ABORT_PAUSE_MS
from gpu_worker.sim.engine import EngineScript
from sie_stream.ports import Clock
from tests.unit.worker.rig import serving, work_item


class AlwaysAborted:
    """A CommitPort whose broker takes nothing."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._aborted: CommitAborted | None = None
        self.started_at: list[float] = []

    def start(self, commit: Commit) -> None:
        self.started_at.append(self._clock.monotonic_ms())
        self._aborted = CommitAborted(commit.commit_id, "no broker")

    def outcome(self) -> CommitAborted | None:
        told, self._aborted = self._aborted, None
        return told


class Counting:
    """A CommitPort that counts what the other one is told to start."""

    def __init__(self, inner: CommitPort) -> None:
        self._inner = inner
        self.started = 0

    def start(self, commit: Commit) -> None:
        self.started += 1
        self._inner.start(commit)

    def outcome(self) -> CommitSucceeded | CommitAborted | None:
        return self._inner.outcome()


def test_commits_that_are_aborted_while_it_stops_are_paused_as_ever() -> None:
    world, rig = serving()
    committer = rig.host._committer = AlwaysAborted(world.clock)
    world.send(work_item("r0"))
    rig.run(20)
    rig.host.request_stop()
    rig.run(1_000)
    assert not rig.host.finished, "nothing is given up"
    pairs = zip(committer.started_at, committer.started_at[1:], strict=False)
    assert len(committer.started_at) >= 5
    assert min(later - earlier for earlier, later in pairs) >= ABORT_PAUSE_MS


def test_requests_of_a_continuous_model_that_end_one_by_one_are_committed_in_groups_while_it_stops() -> None:
    script = EngineScript(continuous={"m": 30})
    world, rig = serving(script)
    for number in range(30):
        script.batch_ms = 60.0 + number
        world.send(work_item(f"r{number}"))
        rig.run(1)
    rig.run(5)
    counting = rig.host._committer = Counting(rig.host._committer)
    rig.host.request_stop()
    rig.run_until(lambda: rig.host.finished)
    done = len(world.results())
    assert done >= 20, "what runs is finished"
    assert counting.started <= done // 2


def test_the_last_commit_of_a_stop_waits_for_nothing() -> None:
    world, rig = serving(EngineScript(batch_ms=30.0))
    world.send(work_item("r0"))
    rig.run(10)
    rig.host.request_stop()
    rig.run_until(lambda: rig.host.finished, 100)
    assert list(world.results()) == ["r0"]

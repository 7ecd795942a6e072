"""What goes into each transaction, and what becomes of it.

Results wait in state.output, finished offsets in the ledgers. A commit takes both at the same moment, so a transaction
always holds exactly the results of the offsets it moves. Aborted, both are taken again by the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_worker.facts import Commit, CommitAborted, CommitSucceeded
from gpu_worker.outcomes import Output
from gpu_worker.state import Replica
from gpu_worker.worker_state import WorkerState
from sie_stream.control import ReplicaAnswered
from sie_stream.records import LogWrite

ABORTS_BEFORE_COPIES_DROP = 3
"""A bound output topic or reply topic that cannot be written must not stop the worker for ever."""
RENEW_CHECKS = 8
"""How often, within offsets_renew_ms, idle partitions are looked at."""


@dataclass(slots=True)
class Commits:
    """At most one commit is under way."""

    next_id: int = 1
    under_way: int = 0
    """Its id; 0: none."""
    writes: Sequence[LogWrite] = ()
    copies: Sequence[LogWrite] = ()
    first_answers: Sequence[Replica] = ()
    """Replicas whose first results it holds."""
    aborts_in_a_row: int = 0
    renew_at: float = 0.0


def due_in_ms(state: WorkerState, commits: Commits, next_finish_ms: float | None) -> float | None:
    """Milliseconds until the next commit should start; None: nothing to commit, or one is under way.

    At a stop the last one starts at once, unless the one before it was aborted: that pause is kept. What still runs
    then is committed in groups, as ever; only nothing waits for a batch that is about to finish.
    """
    if commits.under_way or not state.dirty:
        return None
    if state.stopping:
        if any(engine.outstanding for engine in state.engines.values()):
            return state.pacer.due_in_ms(state.at_ms, len(state.output.writes), None)
        return state.pacer.blocked_for_ms(state.at_ms)
    return state.pacer.due_in_ms(state.at_ms, len(state.output.writes), next_finish_ms)


def start(state: WorkerState, commits: Commits) -> None:
    """Everything finished so far, as one command."""
    commits.under_way = commits.next_id
    commits.next_id += 1
    commits.writes, commits.copies = state.output.writes, state.output.copies
    if commits.aborts_in_a_row >= ABORTS_BEFORE_COPIES_DROP and commits.copies:
        topics = ", ".join(sorted({write.topic for write in commits.copies}))
        state.note("copies_dropped", count=len(commits.copies), topics=topics)
        commits.copies = ()
    commits.first_answers, state.first_answers = state.first_answers, []
    state.output = Output([], [])
    state.committing = state.dirty
    state.dirty = {}
    offsets = {}
    for place, partition in state.committing.items():
        assert partition.ledger is not None
        offsets[place] = partition.ledger.to_commit()
    state.pacer.started(state.at_ms)
    state.commands.append(Commit(commits.under_way, commits.writes, commits.copies, offsets))


def on_succeeded(state: WorkerState, commits: Commits, event: CommitSucceeded) -> None:
    assert event.commit_id == commits.under_way, (event.commit_id, commits.under_way)
    for partition in state.committing.values():
        partition.written_at = state.at_ms
    state.committing = {}
    _report_first_answers(state, commits)
    commits.under_way = 0
    commits.writes = commits.copies = commits.first_answers = ()
    commits.aborts_in_a_row = 0
    state.pacer.succeeded(state.at_ms, event.took_ms)


def _report_first_answers(state: WorkerState, commits: Commits) -> None:
    identity = state.identity
    for replica in commits.first_answers:
        key = replica.key
        state.reports.append(
            ReplicaAnswered(identity.worker, identity.incarnation, key.model, key.version, key.placement_epoch)
        )


def on_aborted(state: WorkerState, commits: Commits, event: CommitAborted) -> None:
    """The results stay in memory, ahead of those that were finished since."""
    assert event.commit_id == commits.under_way, (event.commit_id, commits.under_way)
    state.output = Output([*commits.writes, *state.output.writes], [*commits.copies, *state.output.copies])
    state.dirty = {**state.committing, **state.dirty}
    state.first_answers = [*commits.first_answers, *state.first_answers]
    state.committing = {}
    commits.under_way = 0
    commits.writes = commits.copies = commits.first_answers = ()
    commits.aborts_in_a_row += 1
    state.pacer.aborted(state.at_ms)
    state.note("commit_aborted", reason=event.reason, in_a_row=commits.aborts_in_a_row)


def renew_idle(state: WorkerState, commits: Commits) -> None:
    """Write the offsets of idle partitions again, long before the broker forgets them."""
    if state.at_ms < commits.renew_at:
        return
    renew_ms = state.settings.offsets_renew_ms
    commits.renew_at = state.at_ms + renew_ms / RENEW_CHECKS
    for place, partition in state.partitions.items():
        if partition.state != "open" or place in state.dirty or place in state.committing:
            continue
        if state.at_ms - partition.written_at >= renew_ms:
            state.dirty[place] = partition
            state.pacer.pending(state.at_ms)

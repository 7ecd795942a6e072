"""`sie-stream cordon|drain|uncordon`: workers out of service and back."""

from __future__ import annotations

import getpass
from collections.abc import Collection
from typing import Annotated

import typer

from scheduler.state import ClusterState, ModelState
from sie_stream.cli.ask import NotReady, ask, of_kind, show_answer
from sie_stream.cli.output import BootstrapOption, OutputFormat, OutputOption, error_console
from sie_stream.cli.workers import cluster_state
from sie_stream.control import CordonWorker, Decision, DrainWorker, UncordonWorker
from sie_stream.edge.connection import Connection

ANSWER_S = 10.0
IGNORED = "maintenance_ignored"
TAKEN_BACK = "worker_uncordoned"
"""Somebody else put the worker back into service: whoever waits for the drain waits in vain."""
WorkerArgument = Annotated[str, typer.Argument(help="Name of the worker, as in `sie-stream get workers`.")]


def cordon(
    worker: WorkerArgument, bootstrap_servers: BootstrapOption = None, output: OutputOption = OutputFormat.TABLE
) -> None:
    """Place nothing new on a worker; what runs there stays.

    \b
    Examples:
      sie-stream cordon worker-0
    """
    connection = Connection.open(bootstrap_servers)
    _tell(_order(connection, CordonWorker(worker, getpass.getuser()), "worker_cordoned"), output)


def uncordon(
    worker: WorkerArgument, bootstrap_servers: BootstrapOption = None, output: OutputOption = OutputFormat.TABLE
) -> None:
    """Put a worker back into service after `cordon` or `drain`.

    \b
    Examples:
      sie-stream uncordon worker-0
    """
    connection = Connection.open(bootstrap_servers)
    _tell(_order(connection, UncordonWorker(worker, getpass.getuser()), TAKEN_BACK), output)


def drain(
    worker: WorkerArgument,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until nothing runs there any more.")] = True,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait.")] = 120.0,
    bootstrap_servers: BootstrapOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Move everything away from a worker, new before old, so that it can be stopped without anybody noticing.

    It stays out of service, also after a restart, until `sie-stream uncordon`.

    \b
    Examples:
      sie-stream drain worker-0
      sie-stream drain worker-0 --no-wait -o json
    """
    connection = Connection.open(bootstrap_servers)
    command = DrainWorker(worker, getpass.getuser())
    if not wait:
        _tell(_order(connection, command, "worker_draining"), output)
        return
    with error_console.status(f"draining {worker}"):
        try:
            done = ask(connection, [command], [worker], of_kind({"worker_drained", TAKEN_BACK, IGNORED}), timeout_s)[0]
        except NotReady as late:
            raise NotReady(what_is_left(cluster_state(connection), worker, timeout_s)) from late
    _tell(done, output, {IGNORED, TAKEN_BACK})


def _order(connection: Connection, command: CordonWorker | DrainWorker | UncordonWorker, answer: str) -> Decision:
    return ask(connection, [command], [command.worker], of_kind({answer, IGNORED}), ANSWER_S)[0]


def _tell(decision: Decision, output: OutputFormat, refusals: Collection[str] = (IGNORED,)) -> None:
    """An order that changed nothing is a refusal."""
    state = decision.kind.removeprefix("worker_") if decision.kind != IGNORED else "unchanged"
    show_answer(decision, output, [f"{decision.subject}: {state}. {decision.reason}"], refusals)


def what_is_left(state: ClusterState, worker: str, timeout_s: float) -> str:
    """What a draining worker still holds, and what each of it waits for."""
    found = [(model.model, _waits_for(state, model, worker)) for model in state.models.values()]
    left = [f"{name} ({why})" for name, why in found if why]
    return (
        f"{worker} still holds {len(left)} {'model' if len(left) == 1 else 'models'} after {timeout_s:.0f} s: "
        f"{', '.join(left[:5])}. It goes on draining; `sie-stream uncordon {worker}` takes that back."
    )


def _waits_for(state: ClusterState, model: ModelState, worker: str) -> str:
    """Why the worker still holds something of the model; empty when it does not."""
    if any(replica.worker == worker and replica.state != "draining" for replica in model.replicas):
        return model.message or "its replacement is not ready yet"
    held = sum(partition.owner is not None and partition.owner.worker == worker for partition in model.partitions)
    if not held and not any(replica.worker == worker for replica in model.replicas):
        return ""
    if state.workers[worker].status == "lost":
        return "it is lost, and its fence is awaited"
    return f"{held} {'partition is' if held == 1 else 'partitions are'} asked back: it ends what runs first"

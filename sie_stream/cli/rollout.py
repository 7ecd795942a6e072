"""`sie-stream rollout`: a new version takes over by steps, is watched, stopped and taken back."""

from __future__ import annotations

import getpass
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from msgspec import Raw
from rich.live import Live

from scheduler.rollout import FULL
from scheduler.state import ClusterState
from sie_stream.cli.ask import ask, of_kind, show_answer
from sie_stream.cli.declare import specs_for, with_absolute_paths
from sie_stream.cli.output import (
    BootstrapOption,
    OutputFormat,
    OutputOption,
    console,
    show_json,
    show_rows,
    show_text,
    with_examples,
)
from sie_stream.cli.rollout_follow import Changes, End, Watched, ends_of, from_there, under_way
from sie_stream.cli.rollout_rests import counted_rests
from sie_stream.cli.rollout_view import (
    HISTORY,
    history_rows,
    history_table_rows,
    picture,
    status_rows,
    with_a_past,
)
from sie_stream.cli.workers import cluster_state, fold, from_snapshot
from sie_stream.commands import RolloutOrder, StartRollout
from sie_stream.decisions import Decision
from sie_stream.edge.connection import Connection
from sie_stream.errors import ConfigError, Retriable, did_you_mean
from sie_stream.ids import TopicPartition
from sie_stream.spec import to_json

app = typer.Typer(
    help=with_examples(
        "Roll a new version out by steps: start, watch, pause, promote, abort, take back.",
        "sie-stream rollout status churn --follow",
        "sie-stream rollout undo churn",
    ),
    no_args_is_help=True,
)

ANSWER_S = 15.0
FOLLOW_MS = 250
STARTED = frozenset({"rollout_started", "model_rejected"})

ModelArgument = Annotated[str, typer.Argument(help="Name of the model.")]
VariantOption = Annotated[str, typer.Option("--variant", "-v", help="Which variant, where there are several.")]
Order = Literal["pause", "resume", "promote", "abort", "undo"]


@app.command()
def start(
    file: Annotated[Path, typer.Option("--file", "-f", help="Declaration of the new version (YAML or JSON).")],
    variant: Annotated[str, typer.Option("--variant", "-v", help="Its name among the variants.")] = "canary",
    share: Annotated[
        float,
        typer.Option(help="Fixed percent of the keys: compared (a/b/n), and not promoted by itself. 0: by steps."),
    ] = 0.0,
    bootstrap_servers: BootstrapOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Roll a version out, by its declared steps or by 10, 20, 50, 100 %; exit code 1 if it is refused.

    Each step needs its `hold_ms` and `samples_min` answers to go on. A breached gate takes it back at once, also before
    so many answers. With --share, scores that drift are told and stop nothing, unless the declaration says how much:
    `rollout: {gates: {ks_max: 0.1, psi_max: 0.2}}`.

    \b
    Examples:
      sie-stream rollout start -f churn-v2.yaml
      sie-stream rollout start -f churn-v3.yaml --variant b --share 20
    """
    parts = _parts(share)
    specs, connection = specs_for(lambda: Connection.open(bootstrap_servers), file)
    if len(specs) != 1:
        raise ConfigError(f"--file {file}: {len(specs)} declarations; a rollout starts one version")
    spec = with_absolute_paths(*specs[0])
    command = StartRollout(Raw(to_json(spec)), variant, parts, getpass.getuser())
    _tell(ask(connection, [command], [spec.name], of_kind(STARTED), ANSWER_S)[0], output, "model_rejected")


def _parts(share: float) -> int:
    """Percent as parts of 10,000. Raises ConfigError; what rounds to nothing would start a rollout by steps."""
    parts = round(share * FULL / 100) if 0 <= share <= 100 else -1
    if parts < 0 or (share and not parts):
        least = 100 / FULL
        raise ConfigError(f"--share {share:g}: allowed are {least:g} to 100 percent, or 0 for the steps of a rollout")
    return parts


@app.command()
def status(
    model: Annotated[str, typer.Argument(help="Only this model; default: all that roll something out.")] = "",
    follow: Annotated[
        bool, typer.Option("--follow", "-F", help="Until it ends: a live table, or a line for each change in a pipe.")
    ] = False,
    bootstrap_servers: BootstrapOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """What is rolled out now: every step with its share, samples and gates, and why it waits.

    Requests that wait for a variant without a replica are counted below, also when its rollout ended; in JSON these are
    rows of phase "rest".

    With --follow it ends with what was under way: exit code 0 when that completed, or when nothing was under way; 1
    when any was rolled back, aborted or refused.

    \b
    Examples:
      sie-stream rollout status
      sie-stream rollout status churn-eu --follow
    """
    connection = Connection.open(bootstrap_servers)
    state = cluster_state(connection)
    _known(list(state.models), model)
    watched = under_way(state, model)
    if follow and watched:
        _follow(connection, state, model, watched, output)
        return
    waiting = counted_rests(connection, state, model)
    if output is OutputFormat.JSON:
        show_json([*status_rows(state, model), *waiting])
        return
    console.print(picture(state, model))
    for row in waiting:
        show_text(f"{row['model']}, variant {row['variant']}: {row['note']}")


def _follow(
    connection: Connection, first: ClusterState, model: str, watched: Sequence[Watched], output: OutputFormat
) -> None:
    """Until all of `watched` ended. Raises Exit with code 1 when any did not complete."""
    states = from_there(first, followed(connection))
    if output is OutputFormat.JSON:
        ends = _shown(states, watched, lambda state: typer.echo(json.dumps(status_rows(state, model))))
    elif console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=False) as live:
            ends = _shown(states, watched, lambda state: live.update(picture(state, model), refresh=True))
    else:
        changes = Changes(watched)

        def tell_changes(state: ClusterState) -> None:
            for line in changes.lines(state):
                typer.echo(line)  # flushes: whoever reads a pipe sees each line when it comes

        ends = _shown(states, watched, tell_changes)
    if any(end.ending != "completed" for end in ends):
        raise typer.Exit(1)


def _shown(
    states: Iterator[ClusterState], watched: Sequence[Watched], show: Callable[[ClusterState], object]
) -> list[End]:
    for state in states:
        show(state)
        ends = ends_of(state, watched)
        if len(ends) == len(watched):
            return ends
    raise AssertionError("the log has no end")


@app.command()
def pause(
    model: ModelArgument,
    variant: VariantOption = "canary",
    bootstrap_servers: BootstrapOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Stay at the present share; gates are still watched, and a breach still takes it back.

    \b
    Examples:
      sie-stream rollout pause churn-eu
    """
    _order(RolloutOrder(model, "pause", variant, getpass.getuser()), bootstrap_servers, output)


@app.command()
def resume(
    model: ModelArgument,
    variant: VariantOption = "canary",
    bootstrap_servers: BootstrapOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Go on; the present step is held anew.

    \b
    Examples:
      sie-stream rollout resume churn-eu
    """
    _order(RolloutOrder(model, "resume", variant, getpass.getuser()), bootstrap_servers, output)


@app.command()
def promote(
    model: ModelArgument,
    variant: VariantOption = "canary",
    bootstrap_servers: BootstrapOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """All keys at once, whatever the gates say; then the model takes the version over.

    \b
    Examples:
      sie-stream rollout promote churn-eu
    """
    _order(RolloutOrder(model, "promote", variant, getpass.getuser()), bootstrap_servers, output)


@app.command()
def abort(
    model: ModelArgument,
    variant: VariantOption = "canary",
    bootstrap_servers: BootstrapOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """No key goes to the new version any more; what it has already is worked off.

    \b
    Examples:
      sie-stream rollout abort churn-eu
    """
    _order(RolloutOrder(model, "abort", variant, getpass.getuser()), bootstrap_servers, output)


@app.command()
def undo(
    model: ModelArgument,
    variant: VariantOption = "canary",
    bootstrap_servers: BootstrapOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Back to the version before: aborts what is under way, or replaces what was completed last.

    `rollout history` shows it. What did not come by a rollout is replaced by applying the older declaration.

    \b
    Examples:
      sie-stream rollout undo churn-eu
    """
    _order(RolloutOrder(model, "undo", variant, getpass.getuser()), bootstrap_servers, output)


@app.command()
def history(
    model: Annotated[str, typer.Argument(help="Only this model; default: all.")] = "",
    bootstrap_servers: BootstrapOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Rollouts that ended, how far they came, and why; also of models that were deleted.

    Every step and its gates are in JSON.

    \b
    Examples:
      sie-stream rollout history churn-eu
      sie-stream rollout history -o json
    """
    state = cluster_state(Connection.open(bootstrap_servers))
    _known(with_a_past(state), model)
    rows = history_rows(state, model)
    shown = rows if output is OutputFormat.JSON else history_table_rows(rows)
    show_rows(shown, HISTORY, output, empty="no rollout has ended")


ANSWERS: dict[Order, frozenset[str]] = {
    "pause": frozenset({"rollout_paused"}),
    "resume": frozenset({"rollout_resumed"}),
    "promote": frozenset({"rollout_step", "rollout_adopting"}),
    "abort": frozenset({"rollout_aborted"}),
    "undo": frozenset({"rollout_undone", "rollout_aborted"}),
}
IGNORED = "rollout_ignored"


def _order(order: RolloutOrder, bootstrap_servers: str | None, output: OutputFormat) -> None:
    connection = Connection.open(bootstrap_servers)
    answers = of_kind(ANSWERS[order.order] | {IGNORED})
    _tell(ask(connection, [order], [order.model], answers, ANSWER_S)[0], output, IGNORED)


def _tell(decision: Decision, output: OutputFormat, refusal: str) -> None:
    words = [f"{decision.subject}: {decision.reason}", *(f"    {line}" for line in decision.rejected)]
    show_answer(decision, output, words, {refusal})


def _known(names: Sequence[str], model: str) -> None:
    if model and model not in names:
        raise ConfigError(f"no model {model!r} is declared.{did_you_mean(model, names)}")


def followed(connection: Connection) -> Iterator[ClusterState]:
    """The state of the control plane, each time something was added to its log."""
    topics = connection.settings.topics
    reader = connection.reader()
    try:
        machine = from_snapshot(connection, reader)
        reader.assign({TopicPartition(topics.cluster, 0): machine.state.next_offset})
        while True:
            try:
                records = reader.poll(5_000, FOLLOW_MS)
            except Retriable:
                continue  # passing trouble of Kafka
            fold(machine, records)
            if records:
                yield machine.state
    finally:
        reader.close()

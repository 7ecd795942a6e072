"""`sie-stream explain placement`: why a model is where it is, and why not elsewhere."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from scheduler.offers import placement_problem, wish_of
from scheduler.placement import explanations
from scheduler.state import ClusterState
from sie_stream.cli.output import (
    BootstrapOption,
    OutputFormat,
    OutputOption,
    console,
    show_json,
    show_rows,
    with_examples,
)
from sie_stream.cli.workers import cluster_state
from sie_stream.edge.connection import Connection
from sie_stream.errors import ConfigError, did_you_mean
from sie_stream.settings import Settings

app = typer.Typer(
    help=with_examples("Why things are as they are.", "sie-stream explain placement wine-rf"), no_args_is_help=True
)


@app.callback()
def _commands() -> None:
    """Why things are as they are."""


@app.command()
def placement(
    model: Annotated[str, typer.Argument(help="Model name.")],
    bootstrap_servers: BootstrapOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Why each replica of a model is where it is, and for every other device what speaks against it.

    Missing replicas are explained as well: where they would go, or what forbids each device.

    \b
    Examples:
      sie-stream explain placement wine-rf
      sie-stream explain placement wine-rf -o json
    """
    connection = Connection.open(bootstrap_servers)
    found = explained(cluster_state(connection), model, connection.settings)
    if output is OutputFormat.JSON:
        show_json(found)
        return
    for replica in found:
        console.print(replica["sentence"], highlight=False, markup=False)
        rows = [{**verdict, "constraint": verdict["constraint"] or ""} for verdict in replica["devices"]]
        show_rows(rows, ["worker", "device", "verdict", "constraint", "sentence"], output, empty="no live worker")


def explained(state: ClusterState, model: str, settings: Settings) -> list[dict[str, Any]]:
    """One entry per replica, present or missing. Raises ConfigError for an unknown model."""
    found = state.models.get(model)
    if found is None:
        raise ConfigError(f"no model {model!r}.{did_you_mean(model, state.models)} `sie-stream get models` lists them.")
    missing = max(0, found.replicas_wanted - len(found.present()))
    problem = placement_problem(state, [wish_of(found)] * missing, settings.placement_packing)
    return [msgspec.to_builtins(explanation) for explanation in explanations(problem, model)]

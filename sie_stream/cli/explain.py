"""`sie-stream explain`: why a model is where it is and not elsewhere; why two models share KV blocks or do not."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
import typer
from msgspec import to_builtins

from scheduler.limits import RETRIES_MAX
from scheduler.offers import placement_problem, wish_of
from scheduler.placement import explanations
from scheduler.state import ClusterState, ModelState
from sie_stream.cli.output import (
    BootstrapOption,
    OutputFormat,
    OutputOption,
    console,
    show_json,
    show_rows,
    tell,
    with_examples,
)
from sie_stream.cli.top import RATE_OVER_MS, Board, fresh, readings
from sie_stream.cli.workers import cluster_state
from sie_stream.edge.connection import Connection
from sie_stream.errors import ConfigError, did_you_mean
from sie_stream.kv_sharing import KvSide, Place, kv_sharing
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
    state = cluster_state(connection)
    found = explained(state, model, connection.settings)
    note = nothing_more(_declared(state, model))
    if note:
        tell(note)
    if output is OutputFormat.JSON:
        show_json(found)
        return
    for replica in found:
        console.print(replica["sentence"], highlight=False, markup=False)
        rows = [{**verdict, "constraint": verdict["constraint"] or ""} for verdict in replica["devices"]]
        show_rows(rows, ["worker", "device", "verdict", "constraint", "sentence"], output, empty="no live worker")


@app.command()
def kv(
    first: Annotated[str, typer.Argument(help="Model name.")],
    second: Annotated[str, typer.Argument(help="Another one.")],
    bootstrap_servers: BootstrapOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Whether two models use each other's keys and values for equal prefixes, and if not, what differs.

    \b
    Examples:
      sie-stream explain kv chat chat-embedder
      sie-stream explain kv chat chat-embedder -o json
    """
    connection = Connection.open(bootstrap_servers)
    state = cluster_state(connection)
    found = [_declared(state, name) for name in (first, second)]
    board = Board()
    for _ in readings(connection, board, time.monotonic() + RATE_OVER_MS / 1_000):
        pass
    verdict = kv_sharing(*(kv_side(model, board, round(time.time() * 1_000)) for model in found))
    if output is OutputFormat.JSON:
        show_json(to_builtins(verdict))
        return
    console.print(verdict.sentence, highlight=False, markup=False)
    if verdict.differences:
        show_rows(to_builtins(verdict.differences), ["what", "first", "second", "sentence"], output, empty="")


def kv_side(model: ModelState, board: Board, now_ms: int) -> KvSide:
    """The model as declared, and its trunk on every device that told of it lately."""
    launch = model.launches[model.generation]
    adapter = msgspec.json.decode(model.spec).get("lora")
    alive = fresh(board, now_ms)
    trunks = [
        (Place(worker, device), seen[-1][1].trunk)
        for (worker, device, name, version), seen in sorted(board.models.items())
        if (worker, device) in alive and (name, version) == (launch.model, launch.version)
    ]
    return KvSide(
        model=model.model,
        backend=launch.backend,
        options={name: str(value) for name, value in launch.config.items()} | _precision(model),
        weights=launch.weights_digest or launch.source,
        tokenizer=model.route.tokenizer_digest or launch.tokenizer,
        adapter=msgspec.json.encode(adapter).decode() if adapter else "",
        trunks=tuple((place, trunk) for place, trunk in trunks if trunk is not None),
    )


def _precision(model: ModelState) -> dict[str, str]:
    """What its replicas are loaded in; before there are any, what is preferred."""
    chosen = [replica.precision for replica in model.present()] or [*model.rules.precisions[:1]]
    return {"precision": chosen[0]} if chosen and chosen[0] else {}


def _declared(state: ClusterState, model: str) -> ModelState:
    """Raises ConfigError for an unknown model."""
    found = state.models.get(model)
    if found is None:
        raise ConfigError(f"no model {model!r}.{did_you_mean(model, state.models)} `sie-stream get models` lists them.")
    return found


def explained(state: ClusterState, model: str, settings: Settings) -> list[dict[str, Any]]:
    """One entry per replica, present or missing. Raises ConfigError for an unknown model."""
    found = _declared(state, model)
    missing = 0 if nothing_more(found) else max(0, found.replicas_wanted - len(found.present()))
    problem = placement_problem(state, [wish_of(found)] * missing, settings.placement_packing)
    return [msgspec.to_builtins(explanation) for explanation in explanations(problem, model)]


def nothing_more(model: ModelState) -> str:
    """Why no replica of the model is placed now, whatever room there is; empty when room is all it takes."""
    name = model.model
    if model.status == "deleting":
        return f"{name} is being deleted: nothing is placed for it any more."
    if model.failures > RETRIES_MAX:
        return f"{name} was given up: {model.message} `sie-stream apply` tries it again."
    if not model.replicas_wanted:
        return f"{name} sleeps: it has no replica until the next request wakes it."
    return ""

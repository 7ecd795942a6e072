"""`sie-stream`: the command line."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from sie_stream import __version__
from sie_stream.cli import (
    audit,
    decisions,
    demo,
    demo_canary,
    doctor,
    explain,
    failures,
    keys,
    maintenance,
    models,
    replay,
    rollout,
    simulate,
    stream,
    top,
    topics,
    topology,
    trace,
    up,
)
from sie_stream.cli.output import show_error
from sie_stream.errors import SieError

app = typer.Typer(
    name="sie-stream",
    help="A Scalable Inference Engine as an event-driven pipeline on Apache Kafka.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(up.up)
app.command()(up.down)
app.command()(models.apply)
app.command()(models.get)
app.command()(models.describe)
app.command()(models.delete)
app.command()(models.schema)
app.command()(stream.produce)
app.command()(stream.results)
app.command()(trace.trace)
app.command()(topology.topology)
app.command()(top.top)
app.add_typer(explain.app, name="explain")
app.command()(maintenance.cordon)
app.command()(maintenance.drain)
app.command()(maintenance.uncordon)
app.command()(decisions.decisions)
app.command()(decisions.undo)
app.add_typer(rollout.app, name="rollout")
app.command()(failures.failures)
app.add_typer(audit.app, name="audit")
app.command()(replay.replay)
app.add_typer(keys.app, name="keys")
app.add_typer(topics.app, name="topics")
app.command()(doctor.doctor)
app.command()(demo.demo)
app.command()(simulate.simulate)
app.command()(demo_canary.demo_canary)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sie-stream {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Commands find Kafka by --bootstrap-servers, SIE_STREAM_BOOTSTRAP_SERVERS, or the `up` running in this folder."""


def main() -> None:
    """Entry point: expected errors become one line on standard error and exit code 1."""
    logging.basicConfig(level=logging.ERROR, format="%(message)s")  # passing trouble of Kafka clients is not news here
    try:
        app()
    except SieError as error:
        show_error(error)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

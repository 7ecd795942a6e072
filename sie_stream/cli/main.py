"""`sie-stream`: the command line."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from sie_stream import __version__
from sie_stream.cli.late import Late, LateGroup
from sie_stream.cli.output import show_error
from sie_stream.errors import SieError

COMMANDS = {
    "up": Late(
        "sie_stream.cli.up:up",
        "Start broker, scheduler, workers, ingress, egress and the bridge to other clusters on this machine.",
    ),
    "down": Late("sie_stream.cli.up:down", "Stop what `up` started in this folder; finished work is committed first."),
    "apply": Late(
        "sie_stream.cli.models:apply",
        "Declare models: new ones are placed and loaded, changed ones are replaced without a gap.",
    ),
    "get": Late("sie_stream.cli.models:get", "List what there is."),
    "describe": Late(
        "sie_stream.cli.models:describe",
        "Everything about one model: declaration, replicas, partitions, timings, fields not enforced yet.",
    ),
    "delete": Late(
        "sie_stream.cli.models:delete",
        "Take a model away: no new requests, what is queued is worked off; its topics stay until retention ends.",
    ),
    "schema": Late(
        "sie_stream.cli.models:schema", "Print the JSON Schema of declarations, for editors and validators."
    ),
    "produce": Late("sie_stream.cli.stream:produce", "Send rows to a model."),
    "results": Late("sie_stream.cli.stream:results", "Read terminal records (read_committed)."),
    "trace": Late(
        "sie_stream.cli.trace:trace",
        "Follow one request over all topics: ingress, placement, batch, moves, worker, result, deadline, attempts.",
    ),
    "topology": Late(
        "sie_stream.cli.topology:topology",
        "Draw the servers of the cluster: sockets, NUMA nodes, NVLink islands, devices, and the models on them.",
    ),
    "top": Late(
        "sie_stream.cli.top:top",
        "Devices, engines and models as they are now: how busy, how fast, what waits, KV blocks. Refreshes itself.",
    ),
    "memory": Late(
        "sie_stream.cli.memory:memory",
        "The memory map: for each device with a budget who holds its bytes, which models are on it, which wait where.",
    ),
    "cordon": Late("sie_stream.cli.maintenance:cordon", "Place nothing new on a worker; what runs there stays."),
    "drain": Late(
        "sie_stream.cli.maintenance:drain",
        "Move everything away from a worker, new before old, so that it can be stopped without anybody noticing.",
    ),
    "uncordon": Late(
        "sie_stream.cli.maintenance:uncordon", "Put a worker back into service after `cordon` or `drain`."
    ),
    "decisions": Late(
        "sie_stream.cli.decisions:decisions",
        "What the scheduler decided: who asked, on which facts, what was chosen, rejected and moved, memory, time.",
    ),
    "undo": Late(
        "sie_stream.cli.decisions:undo",
        "Put the replicas that a decision moved back where they were before it, as a new decision; exit code 1 if "
        "refused.",
    ),
    "failures": Late(
        "sie_stream.cli.failures:failures",
        "What failed (workers, devices, engines, replicas, schedulers), what followed from it, and how long it took.",
    ),
    "replay": Late(
        "sie_stream.cli.replay:replay", "Answer requests of the log again and compare with what was answered then."
    ),
    "doctor": Late(
        "sie_stream.cli.doctor:doctor",
        "Check Python, Java, Kafka jars, disk, libraries, broker, topics, schemas, workers and models.",
    ),
    "demo": Late(
        "sie_stream.cli.demo:demo",
        "Run 117+ real models on a real Kafka, kill a worker on the way, prove that nothing was lost or doubled.",
    ),
    "simulate": Late(
        "sie_stream.cli.simulate:simulate",
        "Run a fleet through hours of traffic and faults in virtual time, with the real scheduler, solver and routing.",
    ),
    "demo-canary": Late(
        "sie_stream.cli.demo_canary:demo_canary",
        "Roll a good, a wrong and a slow version out under load on a real Kafka; show that only the good one stays.",
    ),
    "explain": Late("sie_stream.cli.explain:app", "Why things are as they are."),
    "rollout": Late(
        "sie_stream.cli.rollout:app", "Roll a new version out by steps: start, watch, pause, promote, abort, take back."
    ),
    "audit": Late("sie_stream.cli.audit:app", "Check what the engine did against its log, and take the proof along."),
    "keys": Late(
        "sie_stream.cli.keys:app", "Keys that protect personal data: make, rotate, list, and shred those of one person."
    ),
    "topics": Late(
        "sie_stream.cli.topics:app", "Topics and schemas of this installation: plan, apply, and legal holds."
    ),
}


class Commands(LateGroup):
    """All commands, as `--help` lists them."""

    late = COMMANDS


app = typer.Typer(
    cls=Commands,
    name="sie-stream",
    help="A Scalable Inference Engine as an event-driven pipeline on Apache Kafka.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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


class FirstOnly(logging.Filter):
    """Lets the first message pass: a Kafka client says the same again each time that it tries to connect."""

    told = False

    def filter(self, record: logging.LogRecord) -> bool:
        told, self.told = self.told, self.told or record.levelno >= logging.ERROR
        return not told


def main() -> None:
    """Entry point: expected errors become one line on standard error and exit code 1."""
    logging.basicConfig(level=logging.ERROR, format="%(message)s")  # passing trouble of Kafka clients is not news here
    logging.getLogger("sie_stream.kafka").addFilter(FirstOnly())
    try:
        app()
    except SieError as error:
        show_error(error)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

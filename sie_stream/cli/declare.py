"""Hands declarations to the scheduler and waits for what it decides."""

from __future__ import annotations

import getpass
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from schemas.codec import decode_row
from sie_stream.cli.ask import NotReady, Tick, ask, of_kind
from sie_stream.control import ApplyModel, Decision, DeleteModel, InstanceRow
from sie_stream.edge.connection import Connection
from sie_stream.errors import ConfigError
from sie_stream.ids import TopicPartition
from sie_stream.spec import ModelSpec, parse_documents, to_json

SUFFIXES = (".yaml", ".yml", ".json")
ANSWERS = (
    "model_accepted", "model_rejected", "model_unchanged", "model_deleting", "delete_ignored", "rollout_started",
)  # fmt: skip
POLL_MS = 50


def load_specs(path: Path) -> list[tuple[ModelSpec, Path]]:
    """Declarations of a file, or of all files below a folder, each with the folder its relative paths start from.

    Raises ConfigError when there is none, SpecError when one is wrong.
    """
    if not path.exists():
        raise ConfigError(f"--file {path}: no such file or folder")
    files = (
        [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and _is_declaration(p))
    )
    if not files:
        raise ConfigError(f"--file {path}: no declarations ({', '.join(SUFFIXES)}) below this folder")
    return [(spec, file.parent) for file in files for spec in parse_documents(file.read_text(), str(file))]


def _is_declaration(path: Path) -> bool:
    """In a folder of models, weights and tokenizers lie beside the declaration; they are not declarations."""
    text = path.read_text(errors="replace") if path.stat().st_size < 1_000_000 else ""
    return "kind: ModelService" in text or '"ModelService"' in text or "model_id" in text


def with_absolute_source(spec: ModelSpec, folder: Path) -> ModelSpec:
    """Workers run in other folders: a relative source path starts at the declaration's own folder."""
    if spec.source.kind != "file":
        return spec
    path = str((folder / spec.source.uri.removeprefix("file://")).resolve())
    return spec.model_copy(update={"source": spec.source.model_copy(update={"uri": path})})


def apply_specs(
    connection: Connection,
    specs: Sequence[tuple[ModelSpec, Path]],
    timeout_s: float,
    on_ready: Callable[[int], None],
    tick: Tick,
) -> list[Decision]:
    """Declare models and wait until each is ready; `on_ready` gets the count so far. Raises NotReady, ConfigError."""
    decisions = declare(connection, specs, timeout_s, tick)
    refused = [decision for decision in decisions if decision.kind == "model_rejected"]
    if refused:
        raise ConfigError("\n".join(f"{decision.subject}: {decision.reason}" for decision in refused))
    wait_ready(connection, [spec.model_id for spec, _ in specs], timeout_s, on_ready, tick)
    return decisions


def declare(
    connection: Connection, specs: Sequence[tuple[ModelSpec, Path]], timeout_s: float, tick: Tick
) -> list[Decision]:
    """Write ApplyModel for each and return the scheduler's answers. Raises NotReady when it stays silent."""
    actor = getpass.getuser()
    records = [ApplyModel(msgspec.Raw(to_json(with_absolute_source(spec, folder))), actor) for spec, folder in specs]
    return ask(connection, records, [spec.model_id for spec, _ in specs], of_kind(ANSWERS), timeout_s, tick)


def delete(connection: Connection, model: str, timeout_s: float, tick: Tick) -> Decision:
    return ask(connection, [DeleteModel(model, getpass.getuser())], [model], of_kind(ANSWERS), timeout_s, tick)[0]


def wait_ready(
    connection: Connection, models: Sequence[str], timeout_s: float, on_ready: Callable[[int], None], tick: Tick
) -> None:
    """Wait until every instance is ready. Raises NotReady with the scheduler's words about those that are not."""
    topics = connection.settings.topics
    reader = connection.reader()
    wanted = set(models)
    states: dict[str, InstanceRow] = {}
    try:
        places = [TopicPartition(topics.instances, n) for n in range(reader.partitions_of(topics.instances))]
        reader.assign(reader.beginning_offsets(places))
        deadline = time.monotonic() + timeout_s
        while left := sorted(name for name in wanted if name not in states or states[name].status != "ready"):
            on_ready(len(wanted) - len(left))
            for record in reader.poll(5_000, POLL_MS):
                if record.value is not None:
                    row = decode_row(record.value, InstanceRow)
                    states[row.model] = row
            tick()
            if time.monotonic() > deadline:
                raise NotReady(_why(left, states, timeout_s))
        on_ready(len(wanted))
    finally:
        reader.close()


def _why(left: Sequence[str], states: dict[str, InstanceRow], timeout_s: float) -> str:
    lines = [f"{len(left)} models not ready after {timeout_s:.0f} s:"]
    for name in left[:8]:
        state = states.get(name)
        lines.append(f"  {name}: {f'{state.status} {state.message}' if state else 'unknown to the scheduler'}")
    return "\n".join(lines)

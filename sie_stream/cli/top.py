"""`sie-stream top`: what every device, engine and model does right now, from the samples on sie.telemetry."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from msgspec import structs
from rich.console import Group
from rich.live import Live
from rich.table import Table

from schemas.codec import decode_row
from schemas.wire import CodecError
from sie_stream.cli.output import BootstrapOption, OutputFormat, OutputOption, console, show_json, table_of
from sie_stream.edge.connection import Connection
from sie_stream.errors import ConfigError
from sie_stream.ids import TopicPartition
from sie_stream.telemetry import (
    MODEL_GONE_MS,
    MODELS_TOLD_EVERY_MS,
    DeviceSample,
    EngineSample,
    ModelSample,
    implausible,
)

BACK_MS = MODELS_TOLD_EVERY_MS + 5_000
"""So far back the newest sample of every model is found."""
FRESH_MS = 10_000
"""Devices without a sample for so long are not shown."""
RATE_OVER_MS = 4_000
"""Rates are over at least so long, and at most what was read."""
WAIT_MS = 250
POLL_MAX = 2_000
MIB = 1024 * 1024
DEVICES = ("worker", "device", "busy_pct", "memory", "engines", "gpu")
MODELS = (
    "model",
    "version",
    "worker",
    "requests_s",
    "ms_each",
    "waiting",
    "running",
    "p99_ms",
    "tokens_s",
    "kv",
    "reused",
)


def top(
    seconds: Annotated[float, typer.Option("--seconds", help="Stop after so long; 0: until Ctrl-C.", min=0)] = 0.0,
    once: Annotated[bool, typer.Option("--once", help="One look, then end.")] = False,
    idle: Annotated[bool, typer.Option("--idle", help="Show models that do nothing, too.")] = False,
    bootstrap_servers: BootstrapOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Devices, engines and models as they are now: how busy, how fast, what waits, KV blocks. Refreshes itself.

    \b
    Examples:
      sie-stream top
      sie-stream top --once --idle
      sie-stream top --once -o json
    """
    connection = Connection.open(bootstrap_servers)
    board = Board()
    if once or output is OutputFormat.JSON:
        for _ in readings(connection, board, time.monotonic() + RATE_OVER_MS / 1_000):
            pass
        now_ms = round(time.time() * 1_000)
        devices, models = device_rows(board, now_ms), model_rows(board, now_ms)
        if output is OutputFormat.JSON:
            show_json({"devices": devices, "models": models})
        else:
            console.print(picture(devices, models if idle else busy(models)))
        return
    until = time.monotonic() + seconds if seconds else float("inf")
    with Live(console=console, auto_refresh=False) as live:
        for _ in readings(connection, board, until):
            now_ms = round(time.time() * 1_000)
            models = model_rows(board, now_ms)
            live.update(picture(device_rows(board, now_ms), models if idle else busy(models)), refresh=True)


class Board:
    """Newest samples by device, and of each model those of the last seconds, which rates are measured by."""

    def __init__(self) -> None:
        self.devices: dict[tuple[str, str], DeviceSample] = {}
        self.models: dict[tuple[str, str, str, str], list[tuple[int, ModelSample]]] = {}
        """By (worker, device, model, version): (at_ms, sample), oldest first."""

    def add(self, sample: DeviceSample) -> None:
        key = (sample.worker, sample.device)
        before = self.devices.get(key)
        if before is not None and before.incarnation != sample.incarnation:
            for gone in [one for one in self.models if one[:2] == key]:
                del self.models[gone]
        self.devices[key] = sample
        for model in sample.models:
            seen = self.models.setdefault((*key, model.model, model.version), [])
            if seen and sample.at_ms <= seen[-1][0]:  # a clock that stands still or goes back says nothing about rates
                seen.clear()
            seen.append((sample.at_ms, model))
            while len(seen) > 1 and sample.at_ms - seen[1][0] >= RATE_OVER_MS:
                seen.pop(0)


def readings(connection: Connection, board: Board, until: float) -> Iterator[None]:
    """Adds samples to the board as they come; yields a few times a second until that monotonic time, in seconds.

    Raises ConfigError when there is no topic of telemetry.
    """
    topic = connection.settings.topics.telemetry
    reader = connection.reader()
    try:
        places = [TopicPartition(topic, number) for number in range(reader.partitions_of(topic))]
        if not places:
            raise ConfigError(f"topic {topic!r} does not exist. Create it with `sie-stream topics apply`.")
        reader.assign(reader.offsets_at(places, round(time.time() * 1_000) - BACK_MS))
        while time.monotonic() < until:
            for record in reader.poll(POLL_MAX, WAIT_MS):
                try:
                    sample = decode_row(record.value, DeviceSample)
                except CodecError:
                    continue  # somebody else's record
                if not implausible(sample, round(time.time() * 1_000)):
                    board.add(sample)
            yield
    finally:
        reader.close()


def fresh(board: Board, now_ms: int) -> dict[tuple[str, str], DeviceSample]:
    return {key: one for key, one in sorted(board.devices.items()) if now_ms - one.at_ms <= FRESH_MS}


def device_rows(board: Board, now_ms: int) -> list[dict[str, Any]]:
    """One row for each device that was heard of lately."""
    return [
        {
            "worker": worker,
            "device": device,
            "incarnation": sample.incarnation,
            "busy_pct": round(sample.busy_bp / 100, 1),
            "used_mb": used_bytes(sample) // MIB,
            "memory_mb": sample.memory_bytes // MIB,
            "engines": [engine_row(one) for one in sample.engines],
            "gpu": None if sample.gpu is None else structs.asdict(sample.gpu),
        }
        for (worker, device), sample in fresh(board, now_ms).items()
    ]


def used_bytes(sample: DeviceSample) -> int:
    """What the GPU says, whoever uses it; without one, what the engines of the device hold."""
    told = sample.gpu and sample.gpu.memory_used_bytes
    return sum(one.memory_bytes for one in sample.engines) if told is None else told


def engine_row(engine: EngineSample) -> dict[str, Any]:
    return {
        "backend": engine.backend,
        "domain": engine.domain,
        "pid": engine.pid,
        "memory_mb": engine.memory_bytes // MIB,
        "jitter_mb": round(engine.memory_jitter_bytes / MIB, 1),
        "cpu_s": round(engine.cpu_ms / 1_000, 1),
        "ends": engine.ends,
    }


def model_rows(board: Board, now_ms: int) -> list[dict[str, Any]]:
    """One row for each model on each device, the busiest first. What the device names no more is gone."""
    alive = fresh(board, now_ms)
    rows = [
        model_row(key[0], seen, alive[key[:2]].at_ms)
        for key, seen in board.models.items()
        if key[:2] in alive and alive[key[:2]].at_ms - seen[-1][0] <= MODEL_GONE_MS
    ]
    return sorted(rows, key=lambda row: (-row["requests_s"], row["model"], row["worker"]))


def busy(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of models that have something to do."""
    return [row for row in rows if row["requests_s"] or row["waiting"] or row["running"]]


def model_row(worker: str, seen: list[tuple[int, ModelSample]], at_ms: int) -> dict[str, Any]:
    """`at_ms`: the newest sample of the device. A model that was not told since has not changed since."""
    last, window_ms = seen[-1][1], min(RATE_OVER_MS, max(1, at_ms - seen[0][0]))
    first = next((sample for told_ms, sample in reversed(seen) if told_ms <= at_ms - window_ms), seen[0][1])
    seconds = window_ms / 1_000
    requests, busy_ms = last.requests - first.requests, last.busy_ms - first.busy_ms
    sequences = last.sequences
    return {
        "model": last.model,
        "version": last.version,
        "worker": worker,
        "requests_s": round(requests / seconds, 1),
        "ms_each": round(busy_ms / requests, 2) if requests else None,
        "waiting": last.waiting,
        "running": last.running,
        "p99_ms": last.p99_ms,
        "tokens_s": round((last.completion_tokens - first.completion_tokens) / seconds, 1) or None,
        "kv": f"{sequences.blocks_used}/{sequences.blocks}" if sequences else None,
        "reused": f"{100 * sequences.reused_tokens / sequences.prompt_tokens:.0f} %"
        if sequences and sequences.prompt_tokens
        else None,
        "requests": last.requests,
        "errors": last.errors,
        "memory_mb": round(last.memory_bytes / MIB, 1),
        "cold_start_ms": last.cold_start_ms,
        "size_entropy_bits": last.size_entropy_bits,
        "compute_us_per_byte": round(last.compute_us_per_byte, 3),
    }


def picture(devices: list[dict[str, Any]], models: list[dict[str, Any]]) -> Group:
    shown = [
        row
        | {
            "memory": f"{row['used_mb']} of {row['memory_mb']} MB",
            "engines": [f"{one['backend']} {one['memory_mb']} MB" for one in row["engines"]],
            "gpu": row["gpu"] and f"{row['gpu']['utilisation_pct']} %, {row['gpu']['temperature_c']} C",
        }
        for row in devices
    ]
    if not devices:
        return Group("no worker has told of itself in the last ten seconds")
    below: Table | str = table_of(models, MODELS) if models else "no model has anything to do (--idle shows all)"
    return Group(table_of(shown, DEVICES), "", below)
